"""Starts, calls and kills one worker process, from the side of the reward service.

A worker is a fresh interpreter, because a fork after gRPC has started threads is unsafe. It leads a session of its own,
so that a kill also ends the programs that a reward function started. Start workers from the main thread: the kernel
kills them when the thread that started them ends.
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

from fourfold.host.postmortem import oom_kill_count, signal_name
from fourfold.host.scratch import Scratch
from fourfold_reward import protocol
from fourfold_reward.worker_sandbox import WorkerSandbox

_MODULE: Final = "fourfold_reward.worker"
# A process in uninterruptible sleep ignores SIGKILL. It is abandoned after this time.
_REAP_SECONDS: Final = 5.0
# A process that closed its pipe is about to end. Its own exit code explains more than our SIGKILL.
_EXIT_SECONDS: Final = 0.5


class WorkerDied(Exception):
    """The worker ended or broke the protocol. The text is the known cause."""


class ChildProcess:
    """A process of this service with a pipe in each direction and a scratch folder."""

    def __init__(self, process: Process, scratch: Scratch, *, builtin: bool) -> None:
        """Wrap a started process; use `start_child`."""
        self._process = process
        self._scratch = scratch
        self._oom_kills = oom_kill_count()
        self.builtin = builtin  # it runs built-in verifiers; otherwise it runs users' functions

    @classmethod
    async def start_child(cls, module: str, sandbox: WorkerSandbox, *, builtin: bool, timeout_seconds: float) -> Self:
        """Start `python -m MODULE` with the rights of built-in verifiers or of users' functions, for limited calls."""
        scratch = Scratch("reward-worker")
        policy = sandbox.policy(builtin=builtin, timeout_seconds=timeout_seconds, scratch=scratch.path)
        variables = sandbox.variables(builtin=builtin, scratch=scratch.path)
        try:
            process = await asyncio.create_subprocess_exec(
                # -P: no current directory on the import path; the worker appends it at the end.
                *(sys.executable, "-P", "-m", module, str(os.getpid())),
                policy.to_json() if policy is not None else "",
                stdin=PIPE,
                stdout=PIPE,
                # The worker imports what the service can import, also from a source checkout.
                env=variables | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                start_new_session=True,
            )
        except BaseException:
            scratch.remove()
            raise
        return cls(process, scratch, builtin=builtin)

    @property
    def pid(self) -> int:
        """Process id, which is also the id of the process group."""
        return self._process.pid

    async def kill(self) -> None:
        """Kill the process group, wait for the end of the worker, and remove its scratch folder."""
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

    async def describe_end(self) -> str:
        """Return why the process ended or closed its pipe."""
        await self._wait(_EXIT_SECONDS)
        code = self._process.returncode
        if code is None:
            return "the worker closed its pipe"
        if code >= 0:
            return f"the worker process ended with exit code {code}"
        # A SIGKILL does not tell its sender, but the kernel counts its own kills for lack of memory.
        out_of_memory = code == -signal.SIGKILL and oom_kill_count() > self._oom_kills
        suffix = "; the kernel's out-of-memory killer struck while it ran" if out_of_memory else ""
        return f"the worker process was killed by {signal_name(-code)}{suffix}"


class WorkerProcess(ChildProcess):
    """A worker process of the reward service, for one request at a time."""

    @classmethod
    async def start(cls, sandbox: WorkerSandbox, *, builtin: bool, timeout_seconds: float) -> Self:
        """Start a worker with the rights of built-in verifiers or of reward functions, for samples of limited time."""
        worker = await cls.start_child(_MODULE, sandbox, builtin=builtin, timeout_seconds=timeout_seconds)
        worker.loaded = set()
        return worker

    loaded: set[str]  # names of its verifiers

    async def call(self, request: Mapping[str, Any], *, timeout: float) -> dict[str, Any]:
        """Send a request and return the reply.

        Raises:
            TimeoutError: no reply within `timeout` seconds; kill the worker then, because its reply may come late.
            WorkerDied: the worker ended or sent an invalid reply.
        """
        reader, writer = self._process.stdout, self._process.stdin
        if reader is None or writer is None:
            raise WorkerDied("the worker has no pipes")
        try:
            async with asyncio.timeout(timeout):
                writer.write(protocol.pack(request))
                await writer.drain()
                (size,) = protocol.HEADER.unpack(await reader.readexactly(protocol.HEADER.size))
                if size > protocol.MAX_REPLY_BYTES:
                    raise WorkerDied(f"the worker announced a reply of {size} bytes")
                return protocol.unpack(await reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            description = await self.describe_end()
            await self.kill()
            raise WorkerDied(description) from None
        except ValueError as error:
            raise WorkerDied(f"the worker sent an invalid reply: {error}") from None
