"""Writes of the coordinator that wait while the disk is full.

    write --> done
      | no room
      '--> condition "disk" on the board, one log line --> a second later again ... --> done: resolved
                                                           retry.service_wait_seconds over: DiskFull

A write must leave the file as it was when it fails: transactions of the ledger, `append_lines`, and files that are
written under another name first. The event loop goes on meanwhile, and with it the leases of all members.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from fourfold.errors import Unavailable
from fourfold.host.clock import SYSTEM_CLOCK, Clock
from fourfold.host.disk import free_gib, is_full

from .run_board import RunBoard

log = logging.getLogger("fourfold.coordinator")

P = ParamSpec("P")
T = TypeVar("T")

SUBJECT: Final = "disk"
_RETRY_SECONDS: Final = 1.0


class DiskFull(Unavailable):
    """There was no room for too long; the run cannot go on."""


class DiskWriter:
    """Repeats writes to the folder of one run until there is room."""

    def __init__(self, folder: Path, board: RunBoard, *, wait_seconds: float, clock: Clock = SYSTEM_CLOCK) -> None:
        """Prepare.

        Args:
            folder: of the run, for messages.
            board: shows the condition "disk" while a write waits.
            wait_seconds: longest wait of one write.
            clock: times the waits.
        """
        self._folder, self._board = folder, board
        self._wait_seconds, self._clock = wait_seconds, clock
        self._waiting = 0

    async def write(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `work` here, on the event loop, until there is room; return what it returns.

        Raises:
            DiskFull: there was none for too long.
        """

        async def attempt() -> T:
            return work(*args, **kwargs)

        return await self._until_room(attempt)

    async def write_in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do the same in another thread: for what takes more than a moment."""
        return await self._until_room(lambda: asyncio.to_thread(work, *args, **kwargs))

    async def _until_room(self, attempt: Callable[[], Awaitable[T]]) -> T:
        try:
            return await attempt()
        except (OSError, sqlite3.Error) as error:
            if not is_full(error):
                raise
            reason = error
        end = self._clock.monotonic() + self._wait_seconds
        self._begin(reason)
        try:
            while True:
                await self._clock.sleep(_RETRY_SECONDS)
                try:
                    return await attempt()
                except (OSError, sqlite3.Error) as error:
                    if not is_full(error):
                        raise
                    if self._clock.monotonic() >= end:
                        raise DiskFull(
                            f"{self._explain(error)} for {self._wait_seconds:g} s (retry.service_wait_seconds); "
                            f"make room, then go on with: fourfold run --resume {self._folder}"
                        ) from None
        finally:
            self._end()

    def _begin(self, error: BaseException) -> None:
        self._waiting += 1
        text = f"{self._explain(error)}; the run waits up to {self._wait_seconds:g} s: make room there"
        if self._waiting == 1:
            log.warning("%s", text)
        self._board.report_condition(SUBJECT, text)

    def _end(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            log.info("no write waits for the disk any more")
            self._board.resolve_condition(SUBJECT)

    def _explain(self, error: BaseException) -> str:
        try:
            free = f"{free_gib(self._folder):.2f} GiB free"
        except OSError:
            free = "free space not known"
        return f"{self._folder} cannot be written ({error}; {free})"
