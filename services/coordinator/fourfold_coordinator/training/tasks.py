"""Several things at once, and one error when they fail."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from ..routing.trainer_session import TrainerRestarted

T = TypeVar("T")


async def all_of(work: Iterable[Coroutine[Any, Any, T]], *, beside: Coroutine[Any, Any, None] | None = None) -> list[T]:
    """Run all of `work` at once, started in order, and return the results in order.

    The first error cancels everything. `beside` runs along and is cancelled at the end; it only ever ends the others
    with an error.

    Raises:
        TrainerRestarted: when that is among the errors: the run goes on after it.
        Exception: else the first error.
    """
    try:
        async with asyncio.TaskGroup() as group:
            companion = None if beside is None else group.create_task(beside)
            tasks = [group.create_task(coroutine) for coroutine in work]
            if companion is not None:
                if tasks:
                    await asyncio.wait(tasks)
                companion.cancel()
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([companion])
    except BaseExceptionGroup as errors:
        leaves = list(_leaves(errors))
        raise next((e for e in leaves if isinstance(e, TrainerRestarted)), leaves[0]) from None
    return [task.result() for task in tasks]


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterable[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
