"""Calls many engines and the trainer concurrently, and decides which of them caused a failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from fourfold.errors import CONSEQUENCES, FourfoldError
from fourfold.rollout.v1 import rollout_control_service_pb2 as control

from ..routing.replica import Replica, ReplicaKey
from ..routing.trainer_session import TrainerRestarted

T = TypeVar("T")

# A failed member makes the other members of its NCCL or gloo group fail a moment later. `call_all` collects further
# errors for this time after the first, so that the caller can tell failed engines from healthy ones.
_BLAME_SECONDS: Final = 1.0
# The neighbours of a stalled member give up at most 5 s before its own call ends at the deadline (`gloo.py`).
_CAUSE_SECONDS: Final = 10.0
_STARTS_PER_TURN: Final = 32  # calls that begin in one turn of the event loop


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedEngine:
    """An engine and its answer to `DescribeEngine`."""

    replica: Replica
    about: control.DescribeEngineResponse

    @property
    def key(self) -> ReplicaKey:
        return self.replica.key

    @property
    def name(self) -> str:
        return self.replica.member.member_id


class UpdateFailed(Exception):
    """A weight update failed for all engines or for some.

    Attributes:
        engines: the error of each engine that failed. Engines of the update that are not listed are well.
        trainer: the trainer's error; None when the trainer is not to blame.
    """

    def __init__(self, engines: Mapping[ReplicaKey, FourfoldError], trainer: FourfoldError | None = None) -> None:
        super().__init__("; ".join(str(error) for error in (*engines.values(), trainer) if error is not None))
        self.engines = dict(engines)
        self.trainer = trainer


@contextmanager
def blame_trainer() -> Iterator[None]:
    """Raise errors of a service inside the block as UpdateFailed of the trainer, but for TrainerRestarted."""
    try:
        yield
    except TrainerRestarted:
        raise
    except FourfoldError as error:
        raise UpdateFailed({}, error) from error


async def call_all(
    calls: Mapping[ReplicaKey, Coroutine[Any, Any, T]], *, trainer: Coroutine[Any, Any, object] | None = None
) -> dict[ReplicaKey, T]:
    """Run one call per engine, and one to the trainer, concurrently; return the engines' answers.

    Raises:
        UpdateFailed: with all errors of the second after the first; if those are only consequences
            (`errors.CONSEQUENCES`), it waits up to 10 s for the cause. Consequences of a known cause are not listed.
            Running calls are cancelled.
        TrainerRestarted: the trainer is a new process.
    """
    sender: asyncio.Future[object] | None = None if trainer is None else asyncio.ensure_future(trainer)
    tasks: dict[ReplicaKey, asyncio.Future[T]] = {}
    everything: list[asyncio.Future[Any]] = [sender] if sender else []
    try:
        for key, call in calls.items():
            tasks[key] = asyncio.ensure_future(call)
            everything.append(tasks[key])
            if len(tasks) % _STARTS_PER_TURN == 0:  # a thousand starts in a row would block the event loop
                await asyncio.sleep(0)
        _, pending = await asyncio.wait(everything, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            await asyncio.wait(pending, timeout=_BLAME_SECONDS)
        end = time.monotonic() + _CAUSE_SECONDS
        while _only_consequences(everything) and (left := end - time.monotonic()) > 0:
            pending = {task for task in everything if not task.done()}
            if not pending:
                break
            await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in everything:
            task.cancel()
        for key in calls.keys() - tasks.keys():
            calls[key].close()
        await asyncio.gather(*everything, return_exceptions=True)
    failures = {key: error for key, task in tasks.items() if (error := service_error(task)) is not None}
    trainer_error = None if sender is None else service_error(sender)
    if isinstance(trainer_error, TrainerRestarted):
        raise trainer_error
    if causes := {key: error for key, error in failures.items() if error.reason not in CONSEQUENCES}:
        failures = causes
        if trainer_error is not None and trainer_error.reason in CONSEQUENCES:
            trainer_error = None
    # The trainer served at least one engine, so the failed engines caused its error.
    if failures and any(task.done() and not task.cancelled() and task.exception() is None for task in tasks.values()):
        trainer_error = None
    if failures or trainer_error is not None:
        raise UpdateFailed(failures, trainer_error)
    return {key: task.result() for key, task in tasks.items()}


def _only_consequences(tasks: Sequence[asyncio.Future[Any]]) -> bool:
    """Return whether tasks have failed, all of them because of a member whose own error is not known yet."""
    errors = [task.exception() for task in tasks if task.done() and not task.cancelled()]
    known = [error for error in errors if error is not None]
    return bool(known) and all(isinstance(error, FourfoldError) and error.reason in CONSEQUENCES for error in known)


def service_error(task: asyncio.Future[Any]) -> FourfoldError | None:
    """Return a task's error; None when it succeeded or was cancelled. Re-raise errors that no service caused: bugs."""
    error = None if task.cancelled() else task.exception()
    if error is None or isinstance(error, FourfoldError):
        return error
    raise error
