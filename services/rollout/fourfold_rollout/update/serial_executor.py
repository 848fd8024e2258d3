"""Runs the control calls of one engine one after the other, each to its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from fourfold.errors import DeadlinePassed, FourfoldError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

Job = Callable[[float], Awaitable[_T]]  # gets the seconds left until the deadline of its call


class SerialExecutor:
    """Runs jobs in the order of their calls. Belongs to one event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, job: Job[_T], timeout: float) -> _T:
        """Run one job after those before it. The job runs to its end even if the caller is cancelled.

        Raises DeadlinePassed: an earlier job was still running after `timeout` seconds.
        """
        return await asyncio.shield(self._spawn(self._run_in_order(job, timeout), awaited=True))

    def start(self, job: Job[None], timeout: float) -> None:
        """Queue one job and return at once; its error is logged."""
        self._spawn(self._run_in_order(job, timeout), awaited=False)

    def cancel(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()

    async def _run_in_order(self, job: Job[_T], timeout: float) -> _T:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        try:
            async with asyncio.timeout(timeout):
                await self._lock.acquire()
        except TimeoutError:
            raise DeadlinePassed(
                f"another weight call was not done after {timeout:.1f} s; it ends at its own deadline: try again"
            ) from None
        try:
            return await job(deadline - loop.time())
        finally:
            self._lock.release()

    def _spawn(self, work: Coroutine[Any, Any, _T], *, awaited: bool) -> asyncio.Task[_T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._forget, awaited=awaited))
        return task

    def _forget(self, task: asyncio.Task[Any], *, awaited: bool) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, FourfoldError):
            if not awaited:  # otherwise the caller gets the error
                _log.error("Internal weight-update task failed: %s", error)
        elif error is not None:
            _log.error("Weight-update task failed", exc_info=error)
