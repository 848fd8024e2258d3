"""Writes to the files of a run: a full disk delays them, is shown, and loses nothing."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from fourfold.host import disk as host_disk
from fourfold.host.program import resume_command
from fourfold.metrics import REWARD_MEAN
from fourfold_coordinator.state import files
from fourfold_coordinator.state.files import DiskFull, DiskWriter, MetricsWriter, replace_file
from fourfold_coordinator.state.ledger import Ledger, SampleState
from fourfold_coordinator.state.run_board import RunBoard
from fourfold_coordinator.training.recovery import truncate_after
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


@pytest.mark.parametrize("cancels", [1, 2])
async def test_a_cancelled_append_is_over_before_a_recovery_truncates_the_file(
    disk: DiskWriter, tmp_path: Path, cancels: int
) -> None:
    path, running, go_on = tmp_path / "samples.jsonl", threading.Event(), threading.Event()
    path.write_text('{"step": 1}\n')

    def append() -> None:
        running.set()
        assert go_on.wait(30)
        host_disk.append_lines(path, b'{"step": 2}\n')

    async def recover(append: asyncio.Task[None]) -> None:
        with pytest.raises(asyncio.CancelledError):
            await append
        await disk.write_in_thread(truncate_after, path, 1)

    appending = asyncio.ensure_future(disk.write_in_thread(append))
    recovering = asyncio.ensure_future(recover(appending))
    await asyncio.to_thread(running.wait, 30)
    for _ in range(cancels):
        appending.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
    assert not appending.done()
    go_on.set()
    await recovering
    assert path.read_text() == '{"step": 1}\n'


async def test_a_wait_that_lasts_too_long_ends_with_the_remedy(
    disk: DiskWriter, board: RunBoard, clock: FakeClock, tmp_path: Path
) -> None:
    task = asyncio.ensure_future(disk.write(Full(1000), "done"))
    for _ in range(12):
        await clock.advance(1)
    with pytest.raises(DiskFull) as error:
        await task
    assert f"make room, then resume with: {resume_command(tmp_path)}" in error.value.message
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


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.address"
    replace_file(path, ["127.0.0.1:1\n"])
    replace_file(path, ["127.0.0.1:2\n"])
    assert path.read_text() == "127.0.0.1:2\n"
    assert list(tmp_path.iterdir()) == [path]


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_are_lines_in_order(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for step in range(100):
        writer.write({"step": step, REWARD_MEAN: step / 3})
    writer.close()
    writer.close()
    records = lines(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(100))
    assert records[1][REWARD_MEAN] == 1 / 3
    assert writer.dropped_count == 0


def test_a_second_writer_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        writer = MetricsWriter(tmp_path / "metrics.jsonl")
        writer.write({"step": step})
        writer.close()
    assert [r["step"] for r in lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_disk_that_stands_still_costs_records_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, moves = tmp_path / "metrics.jsonl", threading.Event()

    def stand_still(path: Path, line: bytes) -> None:
        moves.wait(20)
        host_disk.append_lines(path, line)

    monkeypatch.setattr(files, "append_lines", stand_still)
    writer = MetricsWriter(path)
    for step in range(3000):  # returns, although nothing is written
        writer.write({"step": step})
    assert 3000 - 1024 - 2 <= writer.dropped_count <= 3000 - 1024
    moves.set()
    assert not writer.close(timeout=20)
    assert lines(path)[0] == {"step": 0} and len(lines(path)) == 3000 - writer.dropped_count


def test_a_disk_that_fails_is_said_once_and_no_record_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_RETRY_SECONDS", 0.01)
    path = tmp_path / "later" / "metrics.jsonl"
    with caplog.at_level(logging.WARNING):
        writer = MetricsWriter(path)
        writer.write({"step": 1})
        writer.write({"step": 2})
        while not caplog.records:
            time.sleep(0.01)
        path.parent.mkdir()
        writer.write({"step": 3})
        assert writer.close()
    assert len(caplog.records) == 1
    assert lines(path) == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_a_disk_that_never_works_again_costs_the_records_and_close_says_so(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "missing" / "metrics.jsonl")
    for step in range(3):
        writer.write({"step": step})
    assert not writer.close()
    assert writer.dropped_count == 3
