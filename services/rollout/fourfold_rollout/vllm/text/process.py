"""Starts and calls the text processes (`main.py`), from the side of the service. Belongs to one event loop."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fourfold.errors import ConfigError, DeadlinePassed, InvalidInput, Overloaded, Unavailable
from fourfold.workers import frames
from fourfold_rollout.engine import GrammarConstraint, ParsedText
from fourfold_rollout.vllm.text.main import MAX_FRAME_BYTES

_FORKS: Final = 2
_START_SECONDS: Final = 180.0
# Longer than the worker's limit for one text: after this time the process is stuck and is replaced.
_STUCK_SECONDS: Final = 60.0
_QUEUE: Final = 256
_RETRY_SECONDS: Final = 1.0
_PROGRAM: Final = "fourfold_rollout.vllm.text.main"


class TextProcess:
    """Implements `TextWork` with one process and its forks. It starts at the first call, or by `start`.

    Start it from the main thread: the kernel kills the process when the thread that started it ends.
    """

    def __init__(self, folder: str, tool_parser: str, reasoning_parser: str) -> None:
        """Work for the model in `folder` with vLLM's parsers of these names; an empty name is no parser."""
        self._folder = folder
        self.tool_parser = tool_parser
        self.reasoning_parser = reasoning_parser
        self._process: subprocess.Popen[bytes] | None = None
        self._sockets: list[socket.socket] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._free: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        self._starting: asyncio.Task[None] | None = None
        self._waiting = 0
        self._exchanges: set[asyncio.Task[dict[str, Any]]] = set()

    def start(self) -> None:
        """Start the process, which loads its libraries now. `ready` waits for it. Needs no event loop."""
        pairs = [socket.socketpair() for _ in range(_FORKS)]
        theirs = [theirs.fileno() for _, theirs in pairs]
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", _PROGRAM),
                *(str(os.getpid()), self._folder, self.tool_parser, self.reasoning_parser, *map(str, theirs)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),  # the service's own stdout has its READY line
            pass_fds=theirs,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "CUDA_VISIBLE_DEVICES": ""},
        )
        self._sockets = [ours for ours, _ in pairs]
        for _, end in pairs:
            end.close()

    async def ready(self) -> None:
        """Return when texts can be parsed; start the process if it does not run.

        Raises:
            ConfigError: vLLM has no parser of that name, or the parser does not fit the tokenizer.
            Unavailable, DeadlinePassed: the process ended, or did not start in time.
        """
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._connect())
            self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._starting)

    async def parse(self, text: str, tools_json: str) -> ParsedText:
        """Return the parts of a text; one that reaches a limit is all content. Raises InvalidInput: malformed tools."""
        if not self.tool_parser and not self.reasoning_parser:
            return ParsedText(content=text)
        result = await self._call({"parse": [text, tools_json]})
        if result is None:
            return ParsedText(content=text)
        calls = tuple((name, arguments) for name, arguments in result["tool_calls"])
        return ParsedText(content=result["content"], reasoning=result["reasoning"], tool_calls=calls)

    async def check_grammar(
        self, constraint: GrammarConstraint, stop_token_ids: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Compile a grammar and check that it accepts some tokens. Raises InvalidInput: it does not, or is too costly.

        The engine compiles it again: a compiled grammar can be a thousand times as large as its text.
        """
        request = {"grammar": [constraint.kind, constraint.text, list(stop_token_ids), list(accepted)]}
        if await self._call(request) is None:
            raise InvalidInput(
                "sampling_params.grammar takes too much time or memory to compile; use a smaller one, with fewer "
                "repetitions and alternatives"
            )

    async def close(self) -> None:
        """Kill the process. Calls in flight fail."""
        for task in (*self._exchanges, *filter(None, [self._starting])):
            task.cancel()
        self._stop(self._process)

    async def _connect(self) -> None:
        try:
            await self._open()
        except BaseException:
            self._stop(self._process)  # the next call starts it again
            raise

    async def _open(self) -> None:
        if self._process is None:
            self.start()
        sockets, self._sockets = self._sockets, []
        streams = [await asyncio.open_unix_connection(sock=ours, limit=MAX_FRAME_BYTES) for ours in sockets]
        self._writers = [writer for _, writer in streams]
        try:
            async with asyncio.timeout(_START_SECONDS):
                reply = await _receive(streams[0][0])
        except TimeoutError:
            raise DeadlinePassed(f"the process that parses texts did not start in {_START_SECONDS:.0f} s") from None
        if "config_error" in reply:
            raise ConfigError(str(reply["config_error"]))
        for stream in streams:
            self._free.put_nowait(stream)

    async def _call(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the result of a request; None if it reached a limit. Raises InvalidInput."""
        if self._waiting >= _QUEUE:
            raise Overloaded(
                f"{self._waiting} texts wait for the process that parses them; try again",
                reason="TOO_MANY_TEXTS",
                retry_after=_RETRY_SECONDS,
            )
        # In a task of its own, which reads the reply even if the caller leaves.
        exchange = asyncio.get_running_loop().create_task(self._exchange(request))
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._forget)
        reply = await asyncio.shield(exchange)
        if "invalid" in reply:
            raise InvalidInput(str(reply["invalid"]))
        return None if "died" in reply else dict(reply["result"])

    async def _exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
        await self.ready()
        process = self._process
        try:
            async with asyncio.timeout(_STUCK_SECONDS):
                self._waiting += 1
                try:
                    reader, writer = await self._free.get()
                finally:
                    self._waiting -= 1
                writer.write(frames.pack(request))
                await writer.drain()
                reply = await _receive(reader)
        except BaseException as error:
            self._stop(process)
            if isinstance(error, TimeoutError):
                text = f"a text was not parsed within {_STUCK_SECONDS:.0f} s; try again"
                raise DeadlinePassed(text) from None
            raise
        if self._process is process:
            self._free.put_nowait((reader, writer))
        return reply

    def _forget(self, exchange: asyncio.Task[dict[str, Any]]) -> None:
        self._exchanges.discard(exchange)
        if not exchange.cancelled():
            exchange.exception()  # retrieved, or asyncio would log it where the caller has left

    def _stop(self, process: subprocess.Popen[bytes] | None) -> None:
        """Kill a process and its forks if it is the present one; the next call starts a new one."""
        if process is not self._process:
            return
        self._process = self._starting = None
        for end in self._sockets:
            end.close()
        for writer in self._writers:
            writer.close()
        self._sockets, self._writers = [], []
        while not self._free.empty():
            self._free.get_nowait()
        if process is not None:
            process.kill()
            # The event loop must not wait for a process that the kernel cannot end at once.
            threading.Thread(target=process.wait, name="reap-text-process", daemon=True).start()


async def _receive(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Read one message. Raises Unavailable: the process has ended, or sent something else."""
    try:
        return await frames.receive(reader, max_bytes=MAX_FRAME_BYTES)
    except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
        raise Unavailable(
            f"the process that parses texts has ended: {type(error).__name__}; see the service's log",
            reason="TEXT_PROCESS_DIED",
            retry_after=_RETRY_SECONDS,
        ) from None
