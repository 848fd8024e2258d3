"""Writes the files of a run; retries writes while the disk is full.

    DiskWriter.write --> done
      | no room
      '--> condition "disk" on the board, one log line --> again every second --> done: condition resolved
                                                              retry.service_wait_seconds over: DiskFull

`MetricsWriter` appends to metrics.jsonl from its own thread, so that the training loop never waits for that file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import queue
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from fourfold.errors import Unavailable
from fourfold.host.cancellation import completed
from fourfold.host.clock import SYSTEM_CLOCK, Clock
from fourfold.host.disk import append_lines, free_gib, is_full
from fourfold.host.program import resume_command

from .run_board import RunBoard

log = logging.getLogger("fourfold.coordinator")

P = ParamSpec("P")
T = TypeVar("T")

SUBJECT: Final = "disk"  # of the condition on the run board
_RETRY_SECONDS: Final = 1.0
_QUEUE_RECORDS: Final = 1024
_STOP: Final = None


class DiskFull(Unavailable):
    """The disk was full for longer than retry.service_wait_seconds; the run cannot continue."""


class DiskWriter:
    """Repeats writes to the folder of one run until there is room.

    A failed write must leave the file unchanged, like transactions of the ledger, `append_lines` and `replace_file`.
    The event loop runs during a wait, so that the members' leases are renewed.
    """

    def __init__(self, folder: Path, board: RunBoard, *, wait_seconds: float, clock: Clock = SYSTEM_CLOCK) -> None:
        """Prepare writes that wait for at most `wait_seconds` each; messages name `folder`, or that of the error."""
        self._folder, self._board = folder, board
        self._wait_seconds, self._clock = wait_seconds, clock
        self._waiting = 0
        self._begun: list[float] = []  # start times of the writes in progress, on the monotonic clock

    @property
    def pending_since(self) -> float | None:
        """Return when the oldest write in progress began, on the monotonic clock; None without one."""
        return min(self._begun, default=None)

    async def write(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `work` on the event loop until there is room; raise DiskFull when there was none for too long."""

        # A commit of the ledger blocks the event loop for milliseconds. A thread would not help much, because the next
        # line of the loop needs the row.
        async def attempt() -> T:
            return work(*args, **kwargs)

        return await self._until_room(attempt)

    async def write_in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `work` in another thread until there is room: for writes of more than a few milliseconds.

        A cancelled call ends after its thread. Otherwise the thread could append to a file that a recovery truncates.
        """

        async def attempt() -> T:
            return await completed(asyncio.to_thread(work, *args, **kwargs))

        return await self._until_room(attempt)

    async def _until_room(self, attempt: Callable[[], Awaitable[T]]) -> T:
        end = math.inf  # no limit until an attempt fails
        self._begun.append(began := self._clock.monotonic())
        try:
            while True:
                try:
                    return await attempt()
                except (OSError, sqlite3.Error) as error:
                    if not is_full(error):
                        raise
                    now = self._clock.monotonic()
                    if now >= end:
                        raise DiskFull(
                            f"{self._explain(error)} for {self._wait_seconds:g} s (retry.service_wait_seconds); "
                            f"make room, then resume with: {resume_command(self._folder)}"
                        ) from None
                    if end == math.inf:
                        end = now + self._wait_seconds
                        self._begin_wait(error)
                await self._clock.sleep(_RETRY_SECONDS)
        finally:
            self._begun.remove(began)
            if end < math.inf:
                self._end_wait()

    def _begin_wait(self, error: BaseException) -> None:
        self._waiting += 1
        text = f"{self._explain(error)}; the run waits up to {self._wait_seconds:g} s: make room there"
        if self._waiting == 1:
            log.warning("%s", text)
        self._board.report_condition(SUBJECT, text)

    def _end_wait(self) -> None:
        self._waiting -= 1
        if not self._waiting:
            log.info("disk has room again: all waiting writes are done")
            self._board.resolve_condition(SUBJECT)

    def _explain(self, error: BaseException) -> str:
        named = getattr(error, "filename", None)
        folder = Path(named).parent if named else self._folder
        try:
            free = f"{free_gib(folder):.2f} GiB free"
        except OSError:
            free = "free space not known"
        return f"{folder} cannot be written ({error}; {free})"


def replace_file(path: Path, lines: Iterable[str]) -> None:
    """Replace a file by one with these lines; a kill leaves the old file or the new one, both whole."""
    fresh = path.with_name(path.name + ".new")
    with fresh.open("w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())  # otherwise a power loss may leave the new name with an empty file
    fresh.replace(path)


class MetricsWriter:
    """Appends records to a JSONL file from a thread of its own; `write` never blocks.

    A record that cannot be written is retried; the reason is logged once. If the disk hangs, the queue fills up, and
    further records are dropped and counted.
    """

    def __init__(self, path: Path) -> None:
        self.dropped_count = 0  # records that never reached the file
        self._path = path
        self._queue: queue.Queue[bytes | None] = queue.Queue(_QUEUE_RECORDS)
        self._closed = threading.Event()
        self._logged = False  # whether the failure was logged
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def write(self, record: Mapping[str, object]) -> None:
        """Append one record of values that JSON has."""
        try:
            self._queue.put_nowait(json.dumps(record).encode() + b"\n")
        except queue.Full:
            self.dropped_count += 1

    def close(self, *, timeout: float = 5.0) -> bool:
        """Write the pending records for at most `timeout` seconds; return whether the file has every record."""
        self._closed.set()
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put(_STOP, timeout=timeout)
                self._thread.join(timeout)
        return not self._thread.is_alive() and not self.dropped_count

    def _run(self) -> None:
        while (line := self._queue.get()) is not _STOP:
            self._append(line)

    def _append(self, line: bytes) -> None:
        """Append one line; after `close`, try once more and then drop it."""
        while True:
            closed = self._closed.is_set()
            try:
                # Opened for each line: the file may be rotated, or cut back by a resumed run.
                append_lines(self._path, line)
                self._logged = False
                return
            except OSError as error:
                if not self._logged:
                    self._logged = True
                    log.warning("metrics wait until the file can be written: %s (%s)", self._path, error.strerror)
            if closed:
                self.dropped_count += 1
                return
            self._closed.wait(_RETRY_SECONDS)
