"""Commits concurrent changes of the ledger in one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar

from fourfold.errors import FourfoldError

from .files import DiskWriter
from .ledger import Ledger

P = ParamSpec("P")
T = TypeVar("T")


class _Change:
    """A change of the ledger, and its outcome."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make, self.done = make, False
        self.result: Any = None
        self.error: FourfoldError | None = None


class GroupCommit:
    """Changes a ledger for many tasks. A commit costs more than the change itself.

    The changes of one turn of the event loop share a commit, in the order of the calls. A call returns when its change
    is committed, as without this class. A refused change does not affect the others.
    """

    def __init__(self, ledger: Ledger, disk: DiskWriter) -> None:
        self._ledger, self._disk = ledger, disk
        self._lock = asyncio.Lock()  # held by the task that commits a batch
        self._batch: list[_Change] = []  # the batch that accepts further changes

    async def write(self, change: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the ledger; raise its errors, or DiskFull. A cancelled wait changes nothing."""
        mine, batch = _Change(partial(change, *args, **kwargs)), self._batch
        batch.append(mine)
        try:
            await asyncio.sleep(0)  # lets the other tasks of this turn add their changes
            async with self._lock:  # the first task of a batch commits it for all
                if self._batch is batch:
                    self._batch = []
                if not mine.done:
                    await self._disk.write(self._make, batch)
        except BaseException:
            batch.remove(mine)
            raise
        if mine.error is not None:
            raise mine.error
        result: T = mine.result
        return result

    def _make(self, batch: list[_Change]) -> None:
        """Make the changes of a batch, without those whose calls were cancelled meanwhile."""
        changes = [change for change in batch if not change.done]
        try:
            with self._ledger.together():
                for change in changes:
                    change.result = change.make()
        except FourfoldError:  # one change is refused, so none was made: make them one by one
            for change in changes:
                try:
                    change.result = change.make()
                except FourfoldError as error:
                    change.error = error
                change.done = True
        for change in changes:
            change.done = True
