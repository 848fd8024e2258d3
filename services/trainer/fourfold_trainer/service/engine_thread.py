"""Runs all jobs on the engine in one thread, in order of arrival, and ends the service after an error that is not safe.

    event loop                               engine thread
    ----------                               -------------
    run(phase, job, timeout) --> queue -->   on_phase(phase); job(); on_phase(WAITING)
        result, error        <------------

A job is dropped if its caller leaves or times out before the job begins; a job that has begun runs to its end. After
one of these events no further job begins, and the service ends:

- A job takes longer than the limit, or raises an error that is not meant for callers: a rank may be in a collective.
- A job raises an error for its caller after it began to change the engine. A repeated step would train on weights that
  have already changed. The service that is started next loads a checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum
from typing import Any, TypeVar

from fourfold.errors import DeadlinePassed, FourfoldError, Unavailable
from fourfold.host.timing import PhaseSeconds
from fourfold_trainer.engine import EngineFailedError

_log = logging.getLogger("fourfold.trainer")

T = TypeVar("T")


class Phase(Enum):
    """Activity of the engine thread; the proto's TrainerPhase has the same names."""

    STARTING = "starting"
    WAITING = "waiting"
    TRAINING = "training"
    PUBLISHING = "publishing"
    SAVING = "saving"
    COMPUTING = "computing"


class EngineThread:
    """Runs jobs. Call `run` on the event loop, `stop` from any thread."""

    def __init__(
        self,
        *,
        limit_seconds: float,
        on_phase: Callable[[Phase], None],
        is_unchanged: Callable[[], bool],
        explain: Callable[[BaseException], str],
        fatal: Callable[[str], None],
    ) -> None:
        """Prepare; `start` starts the thread.

        Args:
            limit_seconds: longest time one job may take.
            on_phase: called with every new phase, in the engine thread.
            is_unchanged: returns whether the engine still has the state of the last successful job; called in the
                engine thread.
            explain: returns the text of an error that is not meant for callers.
            fatal: ends the service with a message; called from any thread.
        """
        self._limit, self._on_phase, self._is_unchanged = limit_seconds, on_phase, is_unchanged
        self._explain, self._fatal = explain, fatal
        self._failed = False
        self._jobs: queue.SimpleQueue[tuple[Phase, Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._phase = Phase.STARTING
        self.phase_seconds = PhaseSeconds(self._phase)
        # A daemon: a thread inside a collective that never returns must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the jobs that are queued."""
        self._jobs.put(None)

    async def run(self, phase: Phase, job: Callable[[], T], *, timeout: float) -> T:
        """Queue a job and await its result; `phase` is reported while it runs.

        Raises:
            DeadlinePassed: the job did not end within `timeout` seconds, queue included. If it had not begun, it never
                does.
            FourfoldError: the job raised it.
        """
        future: Future[T] = Future()
        self._jobs.put((phase, job, future))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout)
        except TimeoutError as error:
            if isinstance(error, FourfoldError):  # a DeadlinePassed that the job raised
                raise
            raise DeadlinePassed(
                f"the engine was still {self._phase.value} after {timeout:.1f} s; call again, with a longer deadline"
            ) from None

    def _work(self) -> None:
        while (entry := self._jobs.get()) is not None:
            phase, job, future = entry
            if not future.set_running_or_notify_cancel():
                continue
            if self._failed:
                future.set_exception(_ended())
                continue
            self._set(phase)
            timer = threading.Timer(self._limit, self._report_stuck, (phase,))
            timer.daemon = True
            timer.start()
            try:
                self._run(phase, job, future)
            finally:
                timer.cancel()

    def _run(self, phase: Phase, job: Callable[[], T], future: Future[T]) -> None:
        try:
            result = job()
        except FourfoldError as error:
            if self._is_unchanged():
                self._set(Phase.WAITING)
                future.set_exception(error)
            else:
                self._fail(future, f"the engine stopped in the middle of {phase.value}: {error.message}")
        except EngineFailedError as error:
            self._fail(future, str(error))
        except BaseException as error:  # the one broad handler of this process: a caller must always get an answer
            _log.exception("engine failed: phase=%s", phase.value)
            self._fail(future, f"the engine failed while {phase.value}: {self._explain(error)}")
        else:
            self._set(Phase.WAITING)
            future.set_result(result)

    def _fail(self, future: Future[Any], message: str) -> None:
        """End the service. The caller does not get the message, and the phase does not return to WAITING."""
        self._failed = True
        self._fatal(message)
        future.set_exception(_ended())

    def _set(self, phase: Phase) -> None:
        self._phase = phase
        self.phase_seconds.enter(phase)
        self._on_phase(phase)

    def _report_stuck(self, phase: Phase) -> None:
        self._fatal(
            f"the engine is {phase.value} for more than trainer.step_timeout_seconds = {self._limit:g}; a rank may be "
            f"stuck: raise it, or lower batch.tokens_per_micro_batch"
        )


def _ended() -> Unavailable:
    return Unavailable("the trainer failed and is ending; see its log")
