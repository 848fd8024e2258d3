"""Starts, asks and kills one process of a command scorer.

The program reads one sample per line from stdin, and writes one result per line to stdout. It leads a session of its
own and has a tag in its environment, so that a kill also ends the programs that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import replace
from typing import Any, Final

from fourfold.host.postmortem import signal_name
from fourfold.host.process_tree import tag_variable
from fourfold.host.scratch import Scratch
from fourfold_reward.worker_process import ChildProcess
from fourfold_reward.worker_sandbox import WorkerSandbox

MAX_LINE_BYTES: Final = 1 << 20
_MODULE: Final = "fourfold_reward.scorers.command_child"
_START_SECONDS: Final = 60.0
_EXIT_SECONDS: Final = 0.5
# No one can grant the program more CPU time for each sample, as a worker does. The time limit of a sample ends it.
_CPU_SECONDS: Final = 1 << 30


class ProgramFault(Exception):
    """The program did not answer one sample with one line. `reason` is a key of ERROR_CODES."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class CommandProcess(ChildProcess):
    """A running program, for one sample at a time."""

    def __init__(self, process: Process, scratch: Scratch, tag: str) -> None:
        """Wrap a started process; use `start`."""
        super().__init__(process, scratch, tag, builtin=False)
        self._waiting: asyncio.Future[bytes] | None = None
        self._fault = ""
        self._reader = asyncio.create_task(self._read_lines())

    @classmethod
    async def start(cls, program: str, words: tuple[str, ...], sandbox: WorkerSandbox) -> CommandProcess:
        """Start a program in the sandbox of users' functions. Raises OSError: it cannot be started."""
        scratch = Scratch("reward-command")
        tag = secrets.token_hex(16)
        reader, writer = os.pipe()
        try:
            policy = sandbox.policy(builtin=False, timeout_seconds=0, scratch=scratch.path)
            variables = sandbox.variables(builtin=False, scratch=scratch.path) | tag_variable(tag)
            request = {
                "parent": os.getpid(),
                "report": writer,
                "policy": replace(policy, cpu_seconds=_CPU_SECONDS).to_json() if policy is not None else "",
                "program": program,
                "words": words,
            }
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", _MODULE, json.dumps(request)),
                stdin=PIPE,
                stdout=PIPE,
                # The child imports what the service can import; the program gets its own variables.
                env=variables
                | {
                    "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                    "FOURFOLD_COMMAND_ENVIRONMENT": json.dumps(variables),
                },
                pass_fds=(writer,),
                start_new_session=True,
                limit=MAX_LINE_BYTES,
            )
        except BaseException:
            scratch.remove()
            os.close(reader)
            raise
        finally:
            os.close(writer)
        made = cls(process, scratch, tag)
        try:
            error = await _read_report(reader)
        except BaseException:
            await made.kill()
            raise
        if error:
            await made.kill()
            raise OSError(error)
        return made

    async def ended(self, seconds: float) -> str:
        """Return how the program ended within `seconds`; empty if it runs."""
        await self._wait(seconds)
        code = self._process.returncode
        if code is None:
            return ""
        return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"

    async def ask(self, request: bytes, *, timeout: float) -> Any:
        """Send one line, without its end; return the JSON value of the line that answers it.

        Raises:
            ProgramFault: there is no such line. Kill the program then.
            TimeoutError: there is none within `timeout` seconds. Kill the program then.
        """
        stdin = self._process.stdin
        assert stdin is not None
        if self._fault:
            raise ProgramFault("BAD_RESPONSE", self._fault)
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout):
                with contextlib.suppress(ConnectionError):  # then it has ended, which the reader reports
                    stdin.write(request + b"\n")
                    await stdin.drain()
                line = await self._waiting
        finally:
            self._waiting = None
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise ProgramFault("BAD_RESPONSE", f"the program wrote no JSON: {_excerpt(line)}") from None

    @property
    def fault(self) -> str:
        """What the program did between two samples that it must not do; empty: nothing."""
        return self._fault

    async def kill(self) -> None:
        """Kill the program and all that it started, wait for its end, and remove its scratch folder."""
        self._reader.cancel()
        await super().kill()

    async def _read_lines(self) -> None:
        """Hand each line to the sample that waits. A line that no sample waits for is a fault of the program.

        Without this the next sample would take it for its own.
        """
        stdout = self._process.stdout
        assert stdout is not None
        while True:
            try:
                line = await stdout.readuntil(b"\n")
            except asyncio.LimitOverrunError:
                return self._fail(
                    ProgramFault("BAD_RESPONSE", f"the program wrote a line of over {MAX_LINE_BYTES} bytes")
                )
            except asyncio.IncompleteReadError as error:
                how = await self.ended(_EXIT_SECONDS) or "closed its stdout"
                rest = f" after {_excerpt(error.partial)}" if error.partial else ""
                return self._fail(ProgramFault("WORKER_DIED", f"the program {how}{rest}"))
            if self._waiting is None or self._waiting.done():
                return self._fail(
                    ProgramFault("BAD_RESPONSE", f"the program wrote a line that no sample asked for: {_excerpt(line)}")
                )
            self._waiting.set_result(line)

    def _fail(self, fault: ProgramFault) -> None:
        self._fault = str(fault)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(fault)


async def _read_report(descriptor: int) -> str:
    """Return the error of the child; empty when the kernel has closed the pipe, because the program runs."""
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


def _excerpt(line: bytes) -> str:
    return repr(line[:200].decode(errors="replace"))
