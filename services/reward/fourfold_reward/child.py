"""The service's end of one worker process: start it, ask it, kill it.

A worker is its own session, so that what a reward function starts dies with it. It is
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

from fourfold.host.scratch import Scratch
from fourfold_reward import frames
from fourfold_reward.confinement import Confinement

# A process in uninterruptible sleep does not end on SIGKILL; then it is left behind.
_REAP_SECONDS: Final = 5.0
# A process that closed its pipe is about to end; its own exit code says more than our SIGKILL.
_EXIT_SECONDS: Final = 0.5


class WorkerDied(Exception):
    """The worker ended, or broke the protocol, while it worked; the text says how."""


class Child:
    """One worker process. Not for concurrent use."""

    def __init__(self, process: Process, scratch: Scratch, *, builtin: bool) -> None:
        """Wrap a process that `start` made."""
        self._process = process
        self._scratch = scratch
        self.builtin = builtin
        """Whether its rights are those of built-in verifiers, and not of reward functions."""
        self.loaded: set[str] = set()
        """Names of the verifiers that it has loaded."""

    @classmethod
    async def start(cls, confinement: Confinement, *, builtin: bool, timeout_seconds: float) -> Self:
        """Start a worker. It sees the modules that this process sees.

        Args:
            confinement: how workers are confined.
            builtin: whether it gets the rights of built-in verifiers, or those of reward functions.
            timeout_seconds: longest time one sample may take.
        """
        scratch = Scratch("reward-worker")
        policy = confinement.policy(builtin=builtin, timeout_seconds=timeout_seconds, scratch=scratch.path)
        variables = confinement.variables(builtin=builtin, scratch=scratch.path)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "fourfold_reward.worker", str(os.getpid())),
                policy.to_json() if policy is not None else "",
                stdin=PIPE,
                stdout=PIPE,
                env=variables | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                start_new_session=True,
            )
        except BaseException:
            scratch.remove()
            raise
        return cls(process, scratch, builtin=builtin)

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
        self._scratch.remove()

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
