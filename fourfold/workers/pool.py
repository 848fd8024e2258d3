"""Keeps a number of children running, and lends each of them to one user at a time.

    start(4) --> free children --take--> one user --put--> free
                      ^                      `----kill--> another one is started
                      `-- a start that failed is tried again, with growing waits

A child whose users share it is never taken: they choose one of `free`, and `release` it when it takes no more users.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, Generic, TypeVar

from fourfold.workers.child import Child, WorkerDied
from fourfold.workers.tasks import Tasks

_log = logging.getLogger(__name__)

_FIRST_BACKOFF_SECONDS: Final = 1.0
_MAX_BACKOFF_SECONDS: Final = 30.0

ChildT = TypeVar("ChildT", bound=Child)


class Pool(Generic[ChildT]):
    """Use it from one event loop, in the main thread."""

    def __init__(
        self, launch: Callable[[], Awaitable[ChildT]], *, title: str, on_failure: Callable[[str], None]
    ) -> None:
        """Create a pool; `start` starts the children.

        Args:
            launch: starts a child that is ready for work, or kills it and raises WorkerDied, OSError or a cancellation.
            title: of the pool, in messages.
            on_failure: called with a message if a task of the pool ends because of a bug.
        """
        self._launch, self._title = launch, title
        self.tasks = Tasks(title, on_failure)
        """Tasks that end with the pool."""
        self.children: list[ChildT] = []
        self.free: deque[ChildT] = deque()
        self.filled = asyncio.Event()
        """Set when a child gets free; who waits for one clears it."""
        self._takers: deque[asyncio.Future[ChildT]] = deque()
        self._count = 0
        self._ending: set[ChildT] = set()  # of `children`, those that are being killed
        self._fills = 0  # tasks that start a child, or wait until they try again
        self._waiting_fills = 0
        self._closed = False

    async def start(self, count: int) -> None:
        """Start children. Raises WorkerDied, OSError: the first one cannot be started; others are tried again."""
        self._count = count
        # One first: if it fails, so would the others.
        self._add(await self._launch())
        await asyncio.gather(*(self._try_start() for _ in range(count - 1)))
        self.resize(count)

    async def close(self) -> None:
        """End the tasks and kill the children."""
        self._closed = True
        await self.tasks.close()
        await asyncio.gather(*(self.kill(child) for child in list(self.children)))

    def pids(self) -> list[int]:
        """Return the process ids of the children."""
        return [child.pid for child in self.children]

    def resize(self, count: int) -> None:
        """Keep this number of children; those that are too many end when they are free."""
        self._count = count
        if self._closed:
            return
        while self.free and self._too_many:
            self._end(self.free.popleft())
        self._fill()

    async def take(self) -> ChildT:
        """Return a child when one is free; `put` or `kill` it. Raises WorkerDied, OSError: one cannot be started."""
        while True:
            child = self.free.popleft() if self.free else await self._next_free()
            try:
                fault = await child.idle_fault()
            except BaseException:
                self._end(child)
                raise
            if not fault:
                return child
            _log.warning("worker lost while it had no work: pid=%d cause=%s", child.pid, fault)
            await self.kill(child)

    async def _next_free(self) -> ChildT:
        """Wait until a child gets free."""
        taker: asyncio.Future[ChildT] = asyncio.get_running_loop().create_future()
        self._takers.append(taker)
        self._fill()
        try:
            return await taker
        except asyncio.CancelledError:
            if taker.done() and not taker.cancelled() and taker.exception() is None:
                self.put(taker.result())
            raise

    def put(self, child: ChildT) -> None:
        """Take a child back."""
        if (taker := self._next_taker()) is not None:
            taker.set_result(child)
        elif self._too_many:
            self._end(child)
        else:
            self.free.append(child)
            self.filled.set()

    async def kill(self, child: ChildT) -> None:
        """Kill a child, and start another one in its place."""
        self._ending.add(child)
        await child.kill()
        self._ending.discard(child)
        self.release(child)

    def release(self, child: ChildT) -> None:
        """Forget a child, which the caller kills, and start another one in its place."""
        for children in (self.children, self.free):
            with suppress(ValueError):
                children.remove(child)
        self.resize(self._count)

    @property
    def _too_many(self) -> bool:
        return len(self.children) - len(self._ending) > self._count

    def _end(self, child: ChildT) -> None:
        self._ending.add(child)  # now, so that it does not count as too many again
        self.tasks.add(self.kill(child))

    def _fill(self) -> None:
        """Start the children that are missing. For a waiting user, one is started before the next try is due."""
        while len(self.children) + self._fills < self._count or (
            self._fills - self._waiting_fills < min(len(self._takers), self._count - len(self.children))
        ):
            self._fills += 1
            self.tasks.add(self._start_one())

    async def _start_one(self) -> None:
        """Start a child; after a failure try again as long as one is missing."""
        seconds = _FIRST_BACKOFF_SECONDS
        while not await self._try_start() and len(self.children) + self._fills <= self._count:
            self._waiting_fills += 1
            await asyncio.sleep(seconds)
            self._waiting_fills -= 1
            seconds = min(2 * seconds, _MAX_BACKOFF_SECONDS)
            if len(self.children) + self._fills > self._count:  # a taker has started one meanwhile
                break
        self._fills -= 1

    async def _try_start(self) -> bool:
        try:
            child = await self._launch()
        except (WorkerDied, OSError) as error:
            _log.error("start of a worker failed: pool=%s cause=%s", self._title, error)
            if (taker := self._next_taker()) is not None:
                taker.set_exception(error)
            return False
        self._add(child)
        return True

    def _add(self, child: ChildT) -> None:
        self.children.append(child)
        self.put(child)

    def _next_taker(self) -> asyncio.Future[ChildT] | None:
        while self._takers:
            if not (taker := self._takers.popleft()).done():
                return taker
        return None
