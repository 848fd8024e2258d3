"""Changes of the ledger that share a transaction, and are otherwise as if each had its own."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from fourfold.errors import FourfoldError, WrongState
from fourfold_coordinator.state.files import DiskWriter
from fourfold_coordinator.state.group_commit import GroupCommit
from fourfold_coordinator.state.ledger import IssuedGroup, Ledger, SampleState
from fourfold_coordinator.state.run_board import RunBoard
from tests.fakes.clock import FakeClock


class Changes:
    """A ledger that counts its commits, and the changes of it."""

    def __init__(self, folder: Path) -> None:
        self.ledger, self.clock, self.statements = Ledger(folder / "ledger.sqlite"), FakeClock(), list[str]()
        self.ledger._db.set_trace_callback(self.statements.append)
        disk = DiskWriter(folder, RunBoard(name="t", step_count=9), wait_seconds=100.0, clock=self.clock)
        self.commit = GroupCommit(self.ledger, disk)

    @property
    def commits(self) -> int:
        return self.statements.count("COMMIT")

    def issue(self, position: int, count: int = 2) -> asyncio.Task[IssuedGroup]:
        change = self.commit.write(self.ledger.issue, step=1, position=position, count=count)
        return asyncio.create_task(change)

    def move(self, group: IssuedGroup, to: SampleState) -> asyncio.Task[None]:
        return asyncio.create_task(self.commit.write(self.ledger.move, group.sample_ids, to))


async def test_changes_of_one_turn_share_a_commit_and_keep_their_order(tmp_path: Path) -> None:
    changes = Changes(tmp_path)
    groups = await asyncio.gather(*(changes.issue(position % 5) for position in range(20)))
    assert [g.group_id for g in groups] == [f"p{n % 5:07d}-{n // 5}" for n in range(20)]
    assert changes.commits == 1 and changes.ledger.counts() == {SampleState.ISSUED: 40}
    await asyncio.gather(*(changes.move(g, SampleState.RUNNING) for g in groups))
    assert changes.commits == 2 and changes.ledger.counts() == {SampleState.RUNNING: 40}


async def test_a_change_is_committed_when_the_call_returns(tmp_path: Path) -> None:
    changes = Changes(tmp_path)
    (group, _) = await asyncio.gather(changes.issue(0), changes.issue(1))
    with sqlite3.connect(tmp_path / "ledger.sqlite") as other:
        assert other.execute("SELECT COUNT(*) FROM samples").fetchone() == (4,)
        await changes.move(group, SampleState.RUNNING)
        assert other.execute("SELECT COUNT(*) FROM samples WHERE state = 'RUNNING'").fetchone() == (2,)


async def test_a_change_that_is_refused_leaves_the_others_alone(tmp_path: Path) -> None:
    changes = Changes(tmp_path)
    groups = [await changes.issue(position) for position in range(3)]
    moves = [
        changes.move(groups[0], SampleState.RUNNING),
        changes.move(groups[1], SampleState.READY),
        changes.move(groups[2], SampleState.RUNNING),
        changes.issue(7),
    ]
    outcomes = await asyncio.gather(*moves, return_exceptions=True)
    assert isinstance(outcomes[1], WrongState) and "cannot become READY" in str(outcomes[1])
    assert not any(isinstance(outcome, FourfoldError) for outcome in (outcomes[0], outcomes[2], outcomes[3]))
    assert changes.ledger.counts() == {SampleState.RUNNING: 4, SampleState.ISSUED: 4}


async def test_a_call_that_is_cancelled_leaves_the_work_to_the_others(tmp_path: Path) -> None:
    changes = Changes(tmp_path)
    calls = [changes.issue(position) for position in range(3)]
    await asyncio.sleep(0)
    calls[0].cancel()  # it would have made the changes of all
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(outcome, asyncio.CancelledError) for outcome in outcomes] == [True, False, False]
    assert changes.ledger.counts() == {SampleState.ISSUED: 4} and changes.commits == 1


async def test_changes_wait_for_room_and_are_made_once(tmp_path: Path) -> None:
    changes = Changes(tmp_path)
    changes.ledger._db.execute("PRAGMA max_page_count = 1")  # SQLite takes the present size: it is full
    calls = [changes.issue(position, 2000) for position in range(3)]
    await changes.clock.advance(1)
    later = changes.issue(3)
    calls[1].cancel()
    await changes.clock.advance(1)
    assert not any(call.done() for call in (calls[0], calls[2], later)) and not changes.ledger.counts()
    changes.ledger._db.execute("PRAGMA max_page_count = 1000000")
    await changes.clock.advance(1)
    groups = await asyncio.gather(calls[0], calls[2], later)
    assert [g.group_id for g in groups] == ["p0000000-0", "p0000002-0", "p0000003-0"]
    assert changes.ledger.counts() == {SampleState.ISSUED: 4002}


async def test_an_error_of_the_database_reaches_the_calls(tmp_path: Path) -> None:
    changes = Changes(tmp_path)
    changes.ledger.close()
    outcomes = await asyncio.gather(changes.issue(0), changes.issue(1), return_exceptions=True)
    assert all(isinstance(outcome, sqlite3.ProgrammingError) for outcome in outcomes)
    with pytest.raises(sqlite3.ProgrammingError):
        await changes.issue(2)
