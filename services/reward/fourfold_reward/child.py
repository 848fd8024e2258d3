"""The service's end of one worker process: start it, ask it, kill it.

A worker is its own process group, so that what a reward function starts dies with it. It is
started with spawn semantics (a fresh interpreter): forking after gRPC has started is unsafe.
Start workers from the main thread: the kernel ends them when the thread that started them ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from typing import Any, Final, Self

from fourfold_reward import frames

# A process in uninterruptible sleep does not end on SIGKILL; then it is left behind.
_REAP_SECONDS: Final = 5.0
# A process that closed its pipe is about to end; its own exit code says more than our SIGKILL.
_EXIT_SECONDS: Final = 0.5


class WorkerDied(Exception):
    """The worker ended, or broke the protocol, while it worked; the text says how."""


class Child:
    """One worker process. Not for concurrent use."""

    def __init__(self, process: Process) -> None:
        """Wrap a process that `start` made."""
        self._process = process
        self.loaded: set[str] = set()
        """Names of the verifiers that it has loaded."""

    @classmethod
    async def start(cls) -> Self:
        """Start a worker. It sees the modules that this process sees."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "fourfold_reward.worker", str(os.getpid())),
                stdin=PIPE,
                stdout=PIPE,
                env=environment,
                process_group=0,
            )
        )

    @property
    def pid(self) -> int:
        """Process id, and id of its process group."""
        return self._process.pid

    async def ask(self, request: Mapping[str, Any], *, timeout: float) -> dict[str, Any]:
        """Send a request and return its reply.

        Raises:
            TimeoutError: no reply in `timeout` seconds; the worker is of no more use: kill it.
            WorkerDied: as it says.
        """
        reader, writer = self._process.stdout, self._process.stdin
        if reader is None or writer is None:
            raise WorkerDied("the worker has no pipes")
        try:
            async with asyncio.timeout(timeout):
                writer.write(frames.pack(request))
                await writer.drain()
                (size,) = frames.HEADER.unpack(await reader.readexactly(frames.HEADER.size))
                if size > frames.MAX_REPLY_BYTES:
                    raise WorkerDied(f"the worker announced a reply of {size} bytes")
                return frames.unpack(await reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._wait(_EXIT_SECONDS)
            await self.kill()
            raise WorkerDied(_describe(self._process.returncode)) from None
        except ValueError as error:
            raise WorkerDied(f"the worker sent no message: {error}") from None

    async def kill(self) -> None:
        """End the process and everything it started; return when it is gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._wait(_REAP_SECONDS)

    async def _wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._process.wait()


def _describe(code: int | None) -> str:
    if code is None:
        return "the worker closed its pipe"
    if code >= 0:
        return f"the worker process ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"the worker process was killed by {name}{hint}"
