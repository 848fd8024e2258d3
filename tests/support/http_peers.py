"""HTTP servers on loopback that answer what a test tells them, correct or hostile."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web

Respond = Callable[[dict[str, Any]], Awaitable[web.StreamResponse | Any]]


class JsonServer:
    """Answers each POST with what `respond` returns: a response of aiohttp, or a value that becomes JSON."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.at_once = 0
        """Most requests that were in progress at the same time."""
        self._running = 0
        self.respond: Respond

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        self._running += 1
        self.at_once = max(self.at_once, self._running)
        try:
            found = await self.respond(body)
        finally:
            self._running -= 1
        return found if isinstance(found, web.StreamResponse) else web.json_response(found)


@contextlib.asynccontextmanager
async def json_server(path: str) -> AsyncIterator[JsonServer]:
    """Serve POST requests of a path."""
    made = JsonServer()
    app = web.Application(client_max_size=16 << 20)
    app.router.add_post(path, made.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    address = runner.addresses[0]
    made.url = f"http://{address[0]}:{address[1]}"
    try:
        yield made
    finally:
        await runner.cleanup()


HOSTILE: dict[str, bytes] = {
    "no HTTP": b"hello\r\n\r\n",
    "an endless header": b"HTTP/1.1 200 OK\r\nX: " + b"x" * (1 << 20),
    "a wrong length": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}",
    "a negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n{}",
    "a wrong chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "nothing": b"",
    "a compressed body": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    "no UTF-8": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xfe",
    "deep JSON": b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"[" * 100_000,
    "an array": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
    "a huge body": b"HTTP/1.1 200 OK\r\nContent-Length: 8000000\r\n\r\n" + b" " * 8_000_000,
    "a huge number": b"HTTP/1.1 200 OK\r\nContent-Length: 20000\r\n\r\n" + b'{"rewards": [' + b"9" * 19_985 + b"]}",
    "a redirect": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    "an upgrade": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
}
"""What a server sends that is no usable response."""


@contextlib.asynccontextmanager
async def raw_server(answer: bytes, *, drip_seconds: float = 0.0) -> AsyncIterator[str]:
    """Answer every connection with these bytes, then close it; return the URL.

    Args:
        drip_seconds: time after each byte; 0: all at once.
    """

    tasks: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await answer_one(reader, writer)
        finally:
            writer.transport.abort() if drip_seconds else writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def answer_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            for index in range(len(answer)) if drip_seconds else ():
                writer.write(answer[index : index + 1])
                await writer.drain()
                await asyncio.sleep(drip_seconds)
            if not drip_seconds:
                writer.write(answer)
                await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def dumps(value: Any) -> web.Response:
    """Return a response with JSON that has NaN."""
    return web.Response(text=json.dumps(value), content_type="application/json")
