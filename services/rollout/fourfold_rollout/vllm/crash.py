"""Knows when an engine dies by itself, and why.

Either its core process ends, or the task does in which vLLM's front end works off what that process sends: an error of
vLLM's own there, and the core process goes on for nobody. Both are noticed, and both end the engine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from fourfold.host.postmortem import explain_sigkill, oom_kill_count, signal_name

if TYPE_CHECKING:
    from fourfold_rollout.vllm.launch import LaunchedEngine

_log = logging.getLogger(__name__)

# An exit code may come a moment after the end: vLLM's own thread may be the one that collects it.
_LOOKS: Final = 50
_LOOK_SECONDS: Final = 0.01
_NO_REASON: Final = "the engine does not answer any more; its log says more"


class CrashWatch:
    """Of one engine, on its event loop, which never stands still for it. The reason is looked for once."""

    def __init__(self, launched: LaunchedEngine, on_death: Callable[[str], None]) -> None:
        """Begin to watch.

        Args:
            launched: the engine.
            on_death: called once with the reason.
        """
        loop = asyncio.get_running_loop()
        self.reason: asyncio.Future[str] = loop.create_future()
        """There half a second after the death at the latest."""
        self._launched = launched
        self._oom_kills = oom_kill_count()
        self._on_death = on_death
        self._failure: Exception | None = None
        self._search: asyncio.Task[None] | None = None
        pid = launched.processes[0].pid
        assert pid is not None, "the core process was started"
        self._descriptor = os.pidfd_open(pid)
        loop.add_reader(self._descriptor, self.begin)
        # vLLM's task hands the error that ends it to every request, and keeps it from whoever looks at the task. Here
        # it comes even when nothing runs, and samples end when the reason is known.
        processor: Any = launched.llm.output_processor
        processor.propagate_error = self._output_task_failed

    @property
    def begun(self) -> bool:
        """Whether the engine is dead, or closed."""
        return self._search is not None or self.reason.done()

    def begin(self) -> None:
        """Know that the engine is dead, and find out why. Idempotent."""
        self._stop_watching()
        if not self.begun:
            self._search = asyncio.get_running_loop().create_task(self._find_reason())

    def close(self) -> None:
        """Watch no more: the engine is ended by its owner. Whoever waits for an answer gets an error."""
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
            if end := _end_of_process(
                self._launched, self._oom_kills
            ):  # what the process died of comes first: the rest follows from it
                reason = end
                break
            await asyncio.sleep(_LOOK_SECONDS)
        _log.error("%s", reason)
        self.reason.set_result(reason)
        self._on_death(reason)


def _end_of_process(engine: LaunchedEngine, oom_kills_before: int) -> str:
    """Return why the engine's process is gone: its first error, or its exit code or signal. Empty: it is not known."""
    if cause := engine.note.read():
        return f"the engine died: {cause}"
    for process in engine.processes:
        if (code := process.exitcode) is None:
            continue
        if code >= 0:
            return f"the engine's process {process.pid} ended with exit code {code}; its log says more"
        hint = (
            explain_sigkill(oom_kill_count() - oom_kills_before) if -code == signal.SIGKILL else "; its log says more"
        )
        return f"the engine's process {process.pid} was killed by {signal_name(-code)}{hint}"
    return ""
