"""Forwards TCP connections on loopback, cuts them, or swallows what they carry."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress

_CHUNK = 1 << 16


class FlakyLink:
    """The way to one service: `reset` cuts its connections, `swallow` makes it a black hole for some seconds."""

    def __init__(self, target: str) -> None:
        self._host, port = target.rsplit(":", 1)
        self._port = int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._passes = asyncio.Event()
        self._passes.set()
        self._server: asyncio.Server | None = None
        self._healing: asyncio.TimerHandle | None = None

    async def start(self) -> str:
        """Listen; return the address that replaces the target."""
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def reset(self) -> None:
        """Cut all connections, with a TCP reset."""
        for writer in list(self._writers):
            raw = writer.get_extra_info("socket")
            with suppress(OSError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    def swallow(self, seconds: float) -> None:
        """Pass nothing on for some seconds; connections stay open, and what they carry arrives afterwards."""
        self._passes.clear()
        self.heal_after(seconds)

    def heal_after(self, seconds: float) -> None:
        """Let everything pass after some seconds."""
        if self._healing is not None:
            self._healing.cancel()
        self._healing = asyncio.get_running_loop().call_later(seconds, self._passes.set)

    def close(self) -> None:
        if self._healing is not None:
            self._healing.cancel()
        self._passes.set()
        self.reset()
        if self._server is not None:
            self._server.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            other_reader, other_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, other_writer}
        self._writers |= ends
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pump(reader, other_writer))
                tasks.create_task(self._pump(other_reader, writer))
        finally:
            self._writers -= ends
            for end in ends:
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK):
                await self._passes.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()  # HTTP/2 has no half-closed connections: end the other direction, too
