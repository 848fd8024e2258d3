"""A queue of items from which workers take batches; each call waits for the results of its own items.

A cancelled or late call leaves nothing in the queue. The owner limits the queue: it checks the room before `put`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar


class Measured(Protocol):
    """An item of a queue."""

    size_bytes: int


AnyItemT = TypeVar("AnyItemT")
ItemT = TypeVar("ItemT", bound=Measured)
ResultT = TypeVar("ResultT")


class Call(Generic[ResultT]):
    """The results of the items of one caller, so far. Other threads may read `closed`."""

    __slots__ = ("closed", "done", "left", "results")

    def __init__(self, count: int) -> None:
        self.results: list[ResultT | None] = [None] * count
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Resolved when all items have a result, or by `close`."""
        self.closed = False
        self.left = count  # items without a result

    def close(self) -> None:
        """Take no more results: the caller has left, or gets an answer now."""
        self.closed = True
        if not self.done.done():
            self.done.set_result(None)

    def set_result(self, index: int, result: ResultT) -> bool:
        """Keep the first result of an item. Return whether this one was kept."""
        if self.closed or self.results[index] is not None:
            return False
        self.results[index] = result
        self.left -= 1
        if not self.left:
            self.close()
        return True


class Entry(Generic[AnyItemT, ResultT]):
    """One item of a call, in the queue or in a batch."""

    __slots__ = ("call", "index", "item")

    def __init__(self, call: Call[ResultT], index: int, item: AnyItemT) -> None:
        self.call, self.index, self.item = call, index, item

    @property
    def pending(self) -> bool:
        """Return whether a caller waits for its result."""
        return not self.call.closed and self.call.results[self.index] is None

    def set_result(self, result: ResultT) -> None:
        """Keep the first result of an item."""
        self.call.set_result(self.index, result)


class BatchQueue(Generic[ItemT, ResultT]):
    """Use it from one event loop. `len(queue)` items of `size_bytes` together wait."""

    def __init__(self, on_filled: Callable[[], None]) -> None:
        """Create a queue; `on_filled` is called when items were added."""
        self._entries: deque[Entry[ItemT, ResultT]] = deque()
        self._on_filled = on_filled
        self.size_bytes = 0

    def __len__(self) -> int:
        """Return the number of items that wait."""
        return len(self._entries)

    async def put(self, items: Sequence[ItemT], *, timeout: float) -> list[ResultT | None]:
        """Add at least one item, and return the results in order; None: there is none within `timeout` seconds."""
        call = Call[ResultT](len(items))
        self._entries.extend([Entry(call, index, item) for index, item in enumerate(items)])
        self.size_bytes += sum(item.size_bytes for item in items)
        self._on_filled()
        timer = asyncio.get_running_loop().call_later(timeout, call.close)
        try:
            await call.done
            return call.results
        finally:  # also when the caller went away
            timer.cancel()
            if call.left:
                call.close()
                self._entries = deque(entry for entry in self._entries if entry.call is not call)
                self.size_bytes = sum(entry.item.size_bytes for entry in self._entries)

    def take(self, most: int, most_bytes: int) -> list[Entry[ItemT, ResultT]]:
        """Remove the next `most` items: fewer when they reach `most_bytes`, and at least one if any waits."""
        taken, size = list[Entry[ItemT, ResultT]](), 0
        while self._entries and len(taken) < most and size < most_bytes:
            entry = self._entries.popleft()
            self.size_bytes -= entry.item.size_bytes
            if entry.pending:
                taken.append(entry)
                size += entry.item.size_bytes
        return taken

    def put_back(self, entries: Sequence[Entry[ItemT, ResultT]]) -> None:
        """Put items without a result back to the front, in order."""
        if again := [entry for entry in entries if entry.pending]:
            self._entries.extendleft(reversed(again))
            self.size_bytes += sum(entry.item.size_bytes for entry in again)
            self._on_filled()
