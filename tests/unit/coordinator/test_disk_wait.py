"""Writes wait while the disk is full: they are shown, bounded, and never done twice."""

from __future__ import annotations

import asyncio
import errno
import logging
import sqlite3
from pathlib import Path

import pytest

from fourfold_coordinator.state.disk_wait import DiskFull, DiskWriter
from fourfold_coordinator.state.ledger import Ledger, SampleState
from fourfold_coordinator.state.run_board import RunBoard
from tests.fakes.clock import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def board(clock: FakeClock) -> RunBoard:
    return RunBoard(name="toy", step_count=1, clock=clock)


@pytest.fixture
def disk(tmp_path: Path, board: RunBoard, clock: FakeClock) -> DiskWriter:
    return DiskWriter(tmp_path, board, wait_seconds=10.0, clock=clock)


class Full:
    """A write for which there is no room a few times."""

    def __init__(self, times: int) -> None:
        self.times, self.calls = times, 0

    def __call__(self, value: str) -> str:
        self.calls += 1
        if self.calls <= self.times:
            raise OSError(errno.ENOSPC, "No space left on device")
        return value


def subjects(board: RunBoard) -> list[str]:
    return [condition.subject for condition in board.status.conditions]


async def test_a_write_waits_for_room_and_says_where(
    disk: DiskWriter, board: RunBoard, clock: FakeClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Full(2), Full(3)
    with caplog.at_level(logging.INFO):
        tasks = [asyncio.ensure_future(disk.write(full, "done")) for full in (first, second)]
        await clock.advance(0)
        (condition,) = board.status.conditions
        assert condition.subject == "disk"
        assert str(tmp_path) in condition.text and "No space left" in condition.text
        assert "the run waits up to 10 s: make room there" in condition.text
        await clock.advance(1)
        await clock.advance(1)
        assert tasks[0].done() and not tasks[1].done() and subjects(board) == ["disk"]
        await clock.advance(1)
        assert [await task for task in tasks] == ["done", "done"] and subjects(board) == []
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.WARNING, logging.INFO], "one line at the beginning, one at the end"


async def test_a_wait_that_lasts_too_long_ends_with_the_remedy(
    disk: DiskWriter, board: RunBoard, clock: FakeClock, tmp_path: Path
) -> None:
    task = asyncio.ensure_future(disk.write(Full(1000), "done"))
    for _ in range(12):
        await clock.advance(1)
    with pytest.raises(DiskFull) as error:
        await task
    assert f"make room, then go on with: fourfold run --resume {tmp_path}" in error.value.message
    assert "for 10 s (retry.service_wait_seconds)" in error.value.message
    assert subjects(board) == []


async def test_other_errors_are_not_waited_for(disk: DiskWriter, board: RunBoard) -> None:
    def refuse() -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    for write in (disk.write, disk.write_in_thread):
        with pytest.raises(PermissionError):
            await write(refuse)
    assert subjects(board) == []


async def test_a_ledger_without_room_changes_nothing_and_goes_on_with_it(
    disk: DiskWriter, clock: FakeClock, tmp_path: Path
) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    issued = ledger.issue(step=1, position=0, count=2)
    ledger._db.execute("PRAGMA max_page_count = 1")  # SQLite takes the present size: it is full
    with pytest.raises(sqlite3.OperationalError) as error:
        ledger.issue(step=1, position=1, count=5000)
    assert error.value.sqlite_errorcode == sqlite3.SQLITE_FULL, "the first error, not that of a second rollback"
    assert ledger.counts() == {SampleState.ISSUED: 2}
    task = asyncio.ensure_future(disk.write(ledger.issue, step=1, position=1, count=5000))
    await clock.advance(1)
    assert not task.done()
    ledger._db.execute("PRAGMA max_page_count = 1000000")
    await clock.advance(1)
    assert len((await task).sample_ids) == 5000
    assert ledger.counts() == {SampleState.ISSUED: 5002}
    ledger.move(issued.sample_ids, SampleState.RUNNING)
    ledger.close()
