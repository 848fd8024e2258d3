"""The one thread that uses the engine: jobs in the order of their arrival, each awaited with a deadline.

    event loop                               engine thread
    ----------                               -------------
    run(phase, job, timeout) --> queue -->   on_phase(phase); job(); on_phase(WAITING)
        result, error        <------------

A job whose caller has gone or is out of time before it began is dropped; one that has begun
runs to its end. These end the service, and no further job begins:

- a job takes longer than the limit, or raises what is not meant for callers: a rank may be anywhere in a collective;
- a job raises an error for its caller after it began to change the engine. Its step, run again, would train on weights
  that have already changed; the service that is started next has the weights of a checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from fourfold.errors import DeadlinePassed, FourfoldError, Unavailable
from fourfold_trainer.engine import EngineFailedError

_log = logging.getLogger("fourfold.trainer")

T = TypeVar("T")


class Phase(Enum):
    """What the engine thread is doing."""

    STARTING = "starting"
    WAITING = "waiting"
    TRAINING = "training"
    PUBLISHING = "publishing"
    SAVING = "saving"
    COMPUTING = "computing"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Job:
    phase: Phase
    run: Callable[[], Any]
    future: Future[Any]


class EngineThread:
    """Runs jobs. `run` belongs to the event loop, `stop` to anybody."""

    def __init__(
        self,
        *,
        limit_seconds: float,
        on_phase: Callable[[Phase], None],
        is_known: Callable[[], bool],
        fatal: Callable[[str], None],
    ) -> None:
        """Prepare; `start` starts the thread.

        Args:
            limit_seconds: longest time one job may take.
            on_phase: told of every change, in the engine thread.
            is_known: returns whether the engine's state is the one that was noted last; called in the engine thread.
            fatal: ends the service with a message; called from any thread.
        """
        self._limit, self._on_phase, self._is_known, self._fatal = limit_seconds, on_phase, is_known, fatal
        self._failed = False
        """No further job begins."""
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._phase = Phase.STARTING
        # A daemon: a thread inside of a collective that never returns must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the jobs that are queued."""
        self._jobs.put(None)

    async def run(self, phase: Phase, job: Callable[[], T], *, timeout: float) -> T:
        """Queue a job and await its result.

        Args:
            phase: reported while it runs.
            job: called in the engine thread.
            timeout: seconds, queueing included.

        Raises:
            DeadlinePassed: the job has not ended in time; it is dropped if it had not begun.
            FourfoldError: what the job raised.
        """
        future: Future[T] = Future()
        self._jobs.put(_Job(phase=phase, run=job, future=future))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout)
        except TimeoutError as error:
            if isinstance(error, FourfoldError):  # the job's own
                raise
            raise DeadlinePassed(
                f"the engine was still {self._phase.value} after {timeout:.1f} s; call again, with a longer deadline"
            ) from None

    def _work(self) -> None:
        """Run jobs until told to stop."""
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            if self._failed:
                job.future.set_exception(_ended())
                continue
            self._set(job.phase)
            timer = threading.Timer(self._limit, self._stuck, (job.phase,))
            timer.daemon = True
            timer.start()
            try:
                self._run(job)
            finally:
                timer.cancel()

    def _run(self, job: _Job) -> None:
        """Run one job. The one place that catches every error: those that are not for the caller end the service."""
        try:
            result = job.run()
        except FourfoldError as error:
            if self._is_known():
                self._set(Phase.WAITING)
                job.future.set_exception(error)
            else:
                self._fail(job, f"the engine stopped in the middle of {job.phase.value}: {error.message}")
        except EngineFailedError as error:
            self._fail(job, str(error))
        except BaseException as error:
            _log.exception("the engine failed while %s", job.phase.value)
            self._fail(job, f"the engine failed while {job.phase.value}: {_explain(error)}")
        else:
            self._set(Phase.WAITING)
            job.future.set_result(result)

    def _fail(self, job: _Job, message: str) -> None:
        """End the service. The phase stays: the engine waits for no call any more. Callers do not get the message."""
        self._failed = True
        self._fatal(message)
        job.future.set_exception(_ended())

    def _set(self, phase: Phase) -> None:
        self._phase = phase
        self._on_phase(phase)

    def _stuck(self, phase: Phase) -> None:
        self._fatal(
            f"the engine is {phase.value} for more than trainer.step_timeout_seconds = {self._limit:g}; a rank may be "
            f"stuck: raise it, or lower batch.tokens_per_micro_batch"
        )


def _ended() -> Unavailable:
    return Unavailable("the trainer failed and is ending; its log says why")


def _explain(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if "out of memory" in text.lower() or isinstance(error, MemoryError):
        text += "; lower batch.tokens_per_micro_batch, or set trainer.gradient_checkpointing"
    return text
