"""Calls to many engines, and the trainer, at the same time; and whose fault it is when one of them fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from fourfold.errors import FourfoldError
from fourfold.rollout.v1 import rollout_control_service_pb2 as control

from ..routing.replica import Replica
from ..routing.trainer_session import TrainerRestarted
from .probe import ReplicaKey

T = TypeVar("T")

# After the first failure of a phase the others get this long to fail, too: it tells who is to blame.
_BLAME_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedEngine:
    """A replica and what it says of itself."""

    replica: Replica
    about: control.DescribeEngineResponse

    @property
    def key(self) -> ReplicaKey:
        """Name and incarnation."""
        return self.replica.key

    @property
    def name(self) -> str:
        """Of the member."""
        return self.replica.member.member_id


class UpdateFailed(Exception):
    """An update was given up, by all or by some.

    `engines` failed, by name and incarnation; `trainer` is its error, when it failed. Engines that are in neither
    are well.
    """

    def __init__(self, engines: Mapping[ReplicaKey, FourfoldError], trainer: FourfoldError | None = None) -> None:
        super().__init__("; ".join(str(error) for error in (*engines.values(), trainer) if error is not None))
        self.engines = dict(engines)
        self.trainer = trainer


async def call_all(
    calls: Mapping[ReplicaKey, Coroutine[Any, Any, T]], *, trainer: Coroutine[Any, Any, object] | None = None
) -> dict[ReplicaKey, T]:
    """Make one call to every engine, and one to the trainer, at the same time; return the engines' answers.

    Raises:
        UpdateFailed: with every call that failed within a second of the first failure; the others were cancelled. The
            trainer is not to blame for engines that failed while others were served.
        TrainerRestarted: the trainer is another process.
    """
    tasks = {key: asyncio.ensure_future(call) for key, call in calls.items()}
    sender: asyncio.Future[object] | None = None if trainer is None else asyncio.ensure_future(trainer)
    everything: list[asyncio.Future[Any]] = [*tasks.values(), *([sender] if sender else [])]
    try:
        _, pending = await asyncio.wait(everything, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            await asyncio.wait(pending, timeout=_BLAME_SECONDS)
    finally:
        for task in everything:
            task.cancel()
        await asyncio.gather(*everything, return_exceptions=True)
    failures = {key: error for key, task in tasks.items() if (error := _error(task)) is not None}
    own = None if sender is None else _error(sender)
    if isinstance(own, TrainerRestarted):
        raise own
    if failures and any(task.done() and not task.cancelled() and task.exception() is None for task in tasks.values()):
        own = None
    if failures or own is not None:
        raise UpdateFailed(failures, own)
    return {key: task.result() for key, task in tasks.items()}


async def call_trainer(call: Awaitable[T]) -> T:
    """Make a call to the trainer alone, failing as `call_all` does."""
    try:
        return await call
    except TrainerRestarted:
        raise
    except FourfoldError as error:
        raise UpdateFailed({}, error) from error


def _error(task: asyncio.Future[Any]) -> FourfoldError | None:
    """Return why a task failed; None when it did not or was cancelled. An error that is no one's raises."""
    error = None if task.cancelled() else task.exception()
    if error is None or isinstance(error, FourfoldError):
        return error
    raise error
