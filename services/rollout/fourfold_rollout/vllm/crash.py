"""Detects the death of an engine and finds its cause.

An engine dies in one of two ways: its core process ends, or the task of vLLM's front end that reads the core's outputs
fails.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from fourfold.host.postmortem import explain_sigkill, oom_kill_count, signal_name
from fourfold_rollout.vllm.patches.front_end import on_output_failure

if TYPE_CHECKING:
    from fourfold_rollout.vllm.launch import LaunchedEngine

_log = logging.getLogger(__name__)

# vLLM's own thread may collect the exit code, which then appears a moment after the end of the process.
_LOOKS: Final = 50
_LOOK_SECONDS: Final = 0.01
_NO_REASON: Final = "the engine does not answer any more; see its log"
_CORE_LOGGER: Final = "vllm.v1.engine.core"
# The core process logs these errors of one call or request and goes on.
_SURVIVED: Final = ("Invocation of ", "Unexpected error pre-processing ")
_NOTE_BYTES: Final = 2000


class CrashNote(logging.Handler):
    """Keeps the first exception that ends the core process; later ones are its consequences.

    The note is in memory that a forked core process shares; without a fork it stays empty.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._descriptor = os.memfd_create("fourfold-crash-note")
        logging.getLogger(_CORE_LOGGER).addHandler(self)

    def read(self) -> str:
        return os.pread(self._descriptor, _NOTE_BYTES, 0).decode(errors="replace")

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or str(record.msg).startswith(_SURVIVED) or os.fstat(self._descriptor).st_size:
            return
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        os.pwrite(self._descriptor, f"{one_line(error)}{where}".encode()[:_NOTE_BYTES], 0)


class CrashWatch:
    """Watches one engine on the event loop, without blocking it. `on_death` gets the cause once."""

    def __init__(self, launched: LaunchedEngine, on_death: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()
        self.reason: asyncio.Future[str] = loop.create_future()  # done at most half a second after the death
        self._launched = launched
        self._oom_kills = oom_kill_count()
        self._on_death = on_death
        self._failure: Exception | None = None
        self._search: asyncio.Task[None] | None = None
        pid = launched.processes[0].pid
        assert pid is not None, "the core process was started"
        self._descriptor = os.pidfd_open(pid)
        loop.add_reader(self._descriptor, self.begin)
        on_output_failure(launched.llm, self._output_task_failed)

    @property
    def begun(self) -> bool:
        """Return true once the engine is dead or closed."""
        return self._search is not None or self.reason.done()

    def begin(self) -> None:
        """Treat the engine as dead and search the cause. Idempotent."""
        self._stop_watching()
        if not self.begun:
            self._search = asyncio.get_running_loop().create_task(self._find_reason())

    def close(self) -> None:
        """Stop watching: the owner closes the engine. Calls that wait for the engine get an error."""
        self._stop_watching()
        if self._search is not None:
            self._search.cancel()
        if not self.reason.done():
            self.reason.set_result("the engine is closed")

    def _output_task_failed(self, error: Exception) -> None:
        self._failure = error
        self.begin()

    def _stop_watching(self) -> None:
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    async def _find_reason(self) -> None:
        reason = _NO_REASON
        if self._failure is not None:
            reason = (
                f"vLLM's task for the engine's outputs failed: {type(self._failure).__name__}: {self._failure}; "
                f"the log of this service has the traceback"
            )
        for _ in range(_LOOKS):
            # The end of the process explains a failure of the output task, so it has precedence.
            if end := _end_of_process(self._launched, self._oom_kills):
                reason = end
                break
            await asyncio.sleep(_LOOK_SECONDS)
        _log.error("Engine died: %s", reason)
        self.reason.set_result(reason)
        self._on_death(reason)


def _end_of_process(engine: LaunchedEngine, oom_kills_before: int) -> str:
    """Return the cause of the process's end: its first error, exit code or signal; empty if it is not known."""
    if cause := engine.note.read():
        return f"the engine died: {cause}"
    for process in engine.processes:
        if (code := process.exitcode) is None:
            continue
        if code >= 0:
            return f"the engine's process {process.pid} ended with exit code {code}; see its log"
        hint = explain_sigkill(oom_kill_count() - oom_kills_before) if -code == signal.SIGKILL else "; see its log"
        return f"the engine's process {process.pid} was killed by {signal_name(-code)}{hint}"
    return ""


def one_line(error: BaseException) -> str:
    """Return the type and the text of an error in one line of at most 2,000 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_NOTE_BYTES] if text else type(error).__name__
