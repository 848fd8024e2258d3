"""Starts, calls and kills one worker process, from the side of the reward service.

A worker is a fresh interpreter, because a fork after gRPC has started threads is unsafe. It leads a session of its own
and has a tag in its environment, so that a kill also ends the programs that a reward function started. Start workers
from the main thread: the kernel kills them when the thread that started them ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from typing import Any, Final, Self

from fourfold.host.postmortem import oom_kill_count, signal_name
from fourfold.host.process_tree import kill_group, kill_tagged, tag_variable
from fourfold.host.scratch import Scratch
from fourfold_reward import protocol
from fourfold_reward.worker_sandbox import WorkerSandbox

_MODULE: Final = "fourfold_reward.worker"
_READ_BYTES: Final = 1 << 16  # the usual size of a pipe
# A process in uninterruptible sleep ignores SIGKILL. It is abandoned after this time.
_REAP_SECONDS: Final = 5.0
# A process that closed its pipe is about to end. Its own exit code explains more than our SIGKILL.
_EXIT_SECONDS: Final = 0.5


class WorkerDied(Exception):
    """The worker ended or broke the protocol. The text is the known cause."""


class ChildProcess:
    """A process of this service with a pipe in each direction and a scratch folder."""

    def __init__(self, process: Process, scratch: Scratch, tag: str, *, builtin: bool) -> None:
        """Wrap a started process that leads a session of its own and has a tag in its environment."""
        self._process = process
        self._scratch = scratch
        self._tag = tag
        self._oom_kills = oom_kill_count()
        self.builtin = builtin  # it runs built-in verifiers; otherwise it runs users' functions

    @classmethod
    async def start_child(
        cls, module: str, sandbox: WorkerSandbox, *, builtin: bool, timeout_seconds: float, stdout: int = PIPE
    ) -> Self:
        """Start `python -m MODULE` with the rights of built-in verifiers or of users' functions, for limited calls."""
        scratch = Scratch("reward-worker")
        policy = sandbox.policy(builtin=builtin, timeout_seconds=timeout_seconds, scratch=scratch.path)
        tag = secrets.token_hex(16)
        variables = sandbox.variables(builtin=builtin, scratch=scratch.path) | tag_variable(tag)
        try:
            process = await asyncio.create_subprocess_exec(
                # -P: no current directory on the import path; the worker appends it at the end.
                *(sys.executable, "-P", "-m", module, str(os.getpid())),
                policy.to_json() if policy is not None else "",
                stdin=PIPE,
                stdout=stdout,
                # The worker imports what the service can import, also from a source checkout.
                env=variables | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                start_new_session=True,
            )
        except BaseException:
            scratch.remove()
            raise
        return cls(process, scratch, tag, builtin=builtin)

    @property
    def pid(self) -> int:
        """Process id, which is also the id of the process group."""
        return self._process.pid

    async def kill(self) -> None:
        """Kill the process and all that it started, wait for its end, and remove its scratch folder."""
        # Threads, because these read all of /proc.
        await asyncio.to_thread(kill_group, self.pid)
        if not self.builtin:  # programs that it started in other sessions
            await asyncio.to_thread(kill_tagged, self._tag)
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
    """A worker process of the reward service: it loads a function, and scores one batch of samples at a time.

    Its replies come through a pipe of our own. An asyncio stream would wake the service for every reply, which costs
    more than the scoring of a fast function; this one is read when the caller wants to.
    """

    @classmethod
    async def start(cls, sandbox: WorkerSandbox, *, builtin: bool, timeout_seconds: float) -> Self:
        """Start a worker with the rights of built-in verifiers or of reward functions, for samples of limited time."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        try:
            worker = await cls.start_child(
                _MODULE, sandbox, builtin=builtin, timeout_seconds=timeout_seconds, stdout=writer
            )
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        worker.warm = False
        worker._reader, worker._unread, worker._ended = reader, bytearray(), False
        return worker

    warm: bool  # its function has scored a sample
    _reader: int  # descriptor; -1: closed
    _unread: bytearray  # the start of a frame
    _ended: bool  # the pipe is at its end

    @property
    def usable(self) -> bool:
        """Return whether the worker waits for a request: it runs, and has written nothing that was not asked for."""
        with contextlib.suppress(ValueError):
            return not (self.read_replies() or self._unread or self._ended)
        return False

    def send(self, data: bytes) -> None:
        """Send a request without waiting. The data are kept until the worker reads them."""
        if self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(data)

    def read_replies(self) -> list[bytes]:
        """Return the bodies of the frames that have arrived, without waiting.

        Raises ValueError: a frame is longer than MAX_REPLY_BYTES.
        """
        frames: list[bytes] = []
        if self._reader < 0:
            self._ended = True
            return frames
        try:
            while not self._ended and len(self._unread) < protocol.HEADER.size + protocol.MAX_REPLY_BYTES:
                data = os.read(self._reader, _READ_BYTES)
                self._unread += data
                self._ended = not data
                if len(data) < _READ_BYTES:
                    break
        except BlockingIOError:
            pass
        at, end, header = 0, len(self._unread), protocol.HEADER
        while end - at >= header.size:
            (size,) = header.unpack_from(self._unread, at)
            if size > protocol.MAX_REPLY_BYTES and not frames:  # after the frames before it
                raise ValueError(f"the worker announced a reply of {size} bytes")
            if end - at < header.size + size:
                break
            frames.append(bytes(self._unread[at + header.size : at + header.size + size]))
            at += header.size + size
        del self._unread[:at]
        return frames

    async def wait_for_replies(self, until: float) -> None:
        """Wait until the worker has written or ended, at most until `until` (time of the event loop).

        Raises WorkerDied: it had ended already.
        """
        if self._ended:
            raise WorkerDied(await self.describe_end())
        loop, reader = asyncio.get_running_loop(), self._reader
        woken = loop.create_future()
        loop.add_reader(reader, _wake, woken)
        timer = loop.call_at(until, _wake, woken)
        try:
            await woken
        finally:
            timer.cancel()
            loop.remove_reader(reader)

    async def call(self, request: Mapping[str, Any], *, timeout: float) -> dict[str, Any]:
        """Send a request with one reply, and return it.

        Raises:
            TimeoutError: no reply within `timeout` seconds; kill the worker then, because its reply may come late.
            WorkerDied: the worker ended or sent an invalid reply.
        """
        end = asyncio.get_running_loop().time() + timeout
        self.send(protocol.pack(request))
        try:
            while not (replies := self.read_replies()):
                if asyncio.get_running_loop().time() >= end:
                    raise TimeoutError
                await self.wait_for_replies(end)
            if len(replies) > 1:
                raise ValueError(f"{len(replies)} replies to one request")
            return protocol.unpack(replies[0])
        except ValueError as error:
            raise WorkerDied(f"the worker sent an invalid reply: {error}") from None

    async def kill(self) -> None:
        """Kill the worker and all that it started, wait for its end, and remove its scratch folder."""
        if self._reader >= 0:
            asyncio.get_running_loop().remove_reader(self._reader)
            os.close(self._reader)
            self._reader = -1
        await super().kill()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
