"""Control calls of one engine, one after the other, each to its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from fourfold.errors import DeadlinePassed, FourfoldError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

Step = Callable[[float], Awaitable[_T]]
"""What is done when the turn has come; it is told how many seconds are left."""


class SerialExecutor:
    """Runs steps in the order of their calls. Belongs to one event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self, step: Step[_T], timeout: float) -> _T:
        """Run one step when those before it are done; it goes on to its end when the caller is cancelled.

        Raises:
            DeadlinePassed: its turn did not come in `timeout` seconds.
        """
        return await asyncio.shield(self._spawn(self._take_turn(step, timeout), awaited=True))

    def start(self, step: Step[None], timeout: float) -> None:
        """Run one step when those before it are done, and wait for nothing; an error of it is logged."""
        self._spawn(self._take_turn(step, timeout), awaited=False)

    def cancel(self) -> None:
        """End all steps, the present one too."""
        for task in tuple(self._tasks):
            task.cancel()

    async def _take_turn(self, step: Step[_T], timeout: float) -> _T:
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
            return await step(deadline - loop.time())
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
        if not isinstance(error, FourfoldError):
            if error is not None:
                _log.error("a weight call failed", exc_info=error)
        elif not awaited:  # else its caller has it
            _log.error("a weight call of the service's own failed: %s", error)
