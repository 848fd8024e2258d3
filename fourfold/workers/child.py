"""Starts, asks and kills one child process that runs a program of a user or a model, from the side of the service.

    Child.start(module)            a fresh interpreter, because a fork after gRPC has started threads is unsafe
    Child.start_program(program)   any program, in the same sandbox
    send, read, wait, receive      messages in both directions
    ended, describe_end            why it ended
    kill                           the process and all that it started

The child leads a session of its own and has a tag in its environment, so that a kill also ends the programs that it
started. Start children from the main thread: the kernel kills them when the thread that started them ends.

Replies come through a pipe of our own. An asyncio stream would wake the service for every reply, which costs more than
the scoring of a fast function; this one is read when the caller wants to.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from fourfold.host.postmortem import oom_kill_count, signal_name
from fourfold.host.process_tree import kill_group, kill_tagged, tag_variable
from fourfold.host.scratch import Scratch
from fourfold.sandbox import Policy
from fourfold.workers.frames import Messages
from fourfold.workers.program import VARIABLES

_PROGRAM_MODULE: Final = "fourfold.workers.program"
_START_SECONDS: Final = 60.0
_READ_BYTES: Final = 1 << 16  # the usual size of a pipe
# A process in uninterruptible sleep ignores SIGKILL. It is abandoned after this time.
_REAP_SECONDS: Final = 5.0
# A process that closed its pipe is about to end. Its own exit code explains more than our SIGKILL.
_EXIT_SECONDS: Final = 0.5


class WorkerDied(Exception):
    """The child ended or broke the protocol. The text is the known cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """What a child may do and see."""

    policy: Policy | None
    """None: all that the service may do."""
    variables: Mapping[str, str]
    """Environment variables."""
    starts_programs: bool = True
    """A kill searches all sessions for programs that the child started."""


RightsFor = Callable[[Path], Rights]
"""Returns the rights of a child with this scratch folder."""


class Child:
    """A process with a pipe in each direction and a scratch folder. Use it from one event loop."""

    def __init__(
        self, process: Process, reader: int, scratch: Scratch, tag: str, rights: Rights, messages: Messages
    ) -> None:
        """Wrap a started process; use `start` or `start_program`."""
        self._process, self._reader, self._scratch, self._tag = process, reader, scratch, tag
        self._starts_programs, self._messages = rights.starts_programs, messages
        self._oom_kills = oom_kill_count()
        self._unread = bytearray()  # the start of a message
        self._closed = False  # the pipe is at its end

    @classmethod
    async def start(cls, module: str, rights: RightsFor, messages: Messages, *, purpose: str) -> Self:
        """Start `python -m MODULE PARENT POLICY`; `fourfold.workers.inside` has the other side.

        `purpose` is part of the name of the scratch folder.
        """
        return await cls._spawn(module, (), rights, messages, purpose)

    @classmethod
    async def start_program(
        cls, program: str, words: Sequence[str], rights: RightsFor, messages: Messages, *, purpose: str
    ) -> Self:
        """Start any program with these words, the first of which is its name. Raises OSError: it cannot be started."""
        reader, writer = os.pipe()
        try:
            child = await cls._spawn(_PROGRAM_MODULE, (str(writer), program, *words), rights, messages, purpose, writer)
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        try:
            error = await _read_report(reader)
        except BaseException:
            await child.kill()
            raise
        if error:
            await child.kill()
            raise OSError(error)
        return child

    @classmethod
    async def _spawn(
        cls, module: str, words: Sequence[str], rights_for: RightsFor, messages: Messages, purpose: str, *passed: int
    ) -> Self:
        tag = secrets.token_hex(16)
        reader, writer = os.pipe()
        scratch: Scratch | None = None
        try:
            os.set_blocking(reader, False)
            scratch = Scratch(purpose)
            rights = rights_for(scratch.path)
            variables = {**rights.variables, **tag_variable(tag)}
            process = await asyncio.create_subprocess_exec(
                # -P: no current directory on the import path; the child appends it at the end.
                *(sys.executable, "-P", "-m", module, str(os.getpid())),
                rights.policy.to_json() if rights.policy is not None else "",
                *words,
                stdin=PIPE,
                stdout=writer,
                # The child imports what the service can import, also from a source checkout. A program that replaces it
                # gets its own variables.
                env=variables
                | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
                | ({VARIABLES: json.dumps(variables)} if words else {}),
                pass_fds=passed,
                start_new_session=True,
            )
        except BaseException:
            if scratch is not None:
                scratch.remove()
            os.close(reader)
            raise
        finally:
            os.close(writer)
        return cls(process, reader, scratch, tag, rights, messages)

    @property
    def pid(self) -> int:
        """Process id, which is also the id of the process group."""
        return self._process.pid

    @property
    def closed(self) -> bool:
        """Return whether `read` has met the end of the pipe."""
        return self._closed

    @property
    def unread(self) -> bytes:
        """Return the start of a message of which the rest has not arrived."""
        return bytes(self._unread)

    async def idle_fault(self) -> str:
        """Return what a child did while it had no work and must not do; empty: nothing.

        The next request would take a message that no request asked for as its own reply.
        """
        try:
            messages = self.read()
        except ValueError as error:
            return f"it wrote something invalid: {error}"
        if messages or self._unread:
            return f"it wrote what no request asked for: {(*messages, self.unread)[0][:200]!r}"
        return await self.describe_end() if self._closed else ""

    def send(self, data: bytes) -> None:
        """Send a request without waiting. The data are kept until the child reads them."""
        if self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(data)

    def read(self) -> list[bytes]:
        """Return the messages that have arrived, without waiting. Raises ValueError: one is too long."""
        if self._reader < 0:
            self._closed = True
            return []
        try:
            while not self._closed and len(self._unread) <= self._messages.max_bytes + _READ_BYTES:
                data = os.read(self._reader, _READ_BYTES)
                self._unread += data
                self._closed = not data
                if len(data) < _READ_BYTES:
                    break
        except BlockingIOError:
            pass
        return self._messages.split(self._unread)

    async def wait(self, until: float | None = None) -> None:
        """Wait until the child has written or ended, at most until `until` (time of the event loop).

        Raises WorkerDied: it had ended already.
        """
        if self._closed:
            raise WorkerDied(await self.describe_end())
        loop, reader = asyncio.get_running_loop(), self._reader
        woken = loop.create_future()
        loop.add_reader(reader, _wake, woken)
        timer = loop.call_at(until, _wake, woken) if until is not None else None
        try:
            await woken
        finally:
            if timer is not None:
                timer.cancel()
            if self._reader == reader:  # after `kill` the number may belong to another pipe
                loop.remove_reader(reader)

    async def receive(self, *, timeout: float | None = None) -> list[bytes]:
        """Wait for messages and return those that have arrived.

        Raises:
            TimeoutError: there is none within `timeout` seconds; kill the child then, because one may come late.
            WorkerDied: the child ended.
            ValueError: a message is too long.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout if timeout is not None else None
        while not (messages := self.read()):
            if until is not None and loop.time() >= until:
                raise TimeoutError
            await self.wait(until)
        return messages

    async def kill(self) -> None:
        """Kill the process and all that it started, wait for its end, and remove its scratch folder."""
        if self._reader >= 0:
            asyncio.get_running_loop().remove_reader(self._reader)
            os.close(self._reader)
            self._reader = -1
        # Threads, because these read all of /proc.
        await asyncio.to_thread(kill_group, self.pid)
        if self._starts_programs:  # in other sessions
            await asyncio.to_thread(kill_tagged, self._tag)
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._wait_for_end(_REAP_SECONDS)
        self._scratch.remove()

    async def ended(self, seconds: float = _EXIT_SECONDS) -> str:
        """Return how the process ended within `seconds`, such as "ended with exit code 1"; empty if it runs."""
        await self._wait_for_end(seconds)
        code = self._process.returncode
        if code is None:
            return ""
        if code >= 0:
            return f"ended with exit code {code}"
        # A SIGKILL does not tell its sender, but the kernel counts its own kills for lack of memory.
        out_of_memory = code == -signal.SIGKILL and oom_kill_count() > self._oom_kills
        suffix = "; the kernel's out-of-memory killer struck while it ran" if out_of_memory else ""
        return f"was killed by {signal_name(-code)}{suffix}"

    async def describe_end(self) -> str:
        """Return why the process ended or closed its pipe."""
        how = await self.ended()
        return f"the worker process {how}" if how else "the worker closed its pipe"

    async def _wait_for_end(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._process.wait()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _read_report(descriptor: int) -> str:
    """Return the error of `fourfold.workers.program`; empty when the kernel has closed the pipe: the program runs."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    try:
        async with asyncio.timeout(_START_SECONDS):
            return (await reader.read()).decode(errors="replace")
    except TimeoutError:
        return f"it did not start within {_START_SECONDS:g} s"
    finally:
        transport.close()
