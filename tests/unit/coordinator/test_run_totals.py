"""Tests the totals of a run over all of its coordinator processes, and its recoveries."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold_coordinator.reporting.run_totals import RunTotals
from fourfold_coordinator.routing.registry import Member, MemberChange
from fourfold_coordinator.state.ledger import Ledger
from tests.fakes.clock import FakeClock


def totals(ledger: Ledger, clock: FakeClock) -> RunTotals:
    return RunTotals(ledger, clock=clock)


def member(name: str, incarnation: str) -> Member:
    return Member(
        member_id=name, incarnation=incarnation * 32, role=Role.ROLE_ROLLOUT, target="x:1", tokenizer_sha256=b""
    )


async def test_time_is_kept_without_a_checkpoint_and_survives_a_restore(tmp_path: Path) -> None:
    ledger, clock = Ledger(tmp_path / "ledger.sqlite"), FakeClock()
    first = totals(ledger, clock)
    assert first.resumes == 0
    first.save()
    keeping = asyncio.ensure_future(first.run())
    for _ in range(8):  # then it is killed: no farewell, no checkpoint
        await clock.advance(5)
    keeping.cancel()
    second = totals(ledger, clock)
    ledger.restore(0)
    await clock.advance(7)
    assert second.continued and not first.continued
    assert second.add_recovery(0, "", trainer_kept=False) == ""
    assert (second.seconds, second.resumes) == (47.0, 1)
    second.save()
    third = totals(ledger, clock)
    third.add_recovery(2, "", trainer_kept=False)
    assert (third.seconds, third.resumes) == (47.0, 2)
    ledger.close()


def test_a_coordinator_in_place_of_a_dead_one_is_counted_as_a_restart_with_its_cause(tmp_path: Path) -> None:
    ledger, clock = Ledger(tmp_path / "ledger.sqlite"), FakeClock()
    totals(ledger, clock).save()
    restarted = RunTotals(ledger, clock=clock, coordinator="coordinator-0", death="killed by SIGKILL")
    assert restarted.add_recovery(3, "", trainer_kept=True) == "coordinator-0 died (killed by SIGKILL)"
    assert restarted.add_recovery(2, "trainer-0 is new", trainer_kept=False) == "trainer-0 is new"
    restarted.save()
    by_hand = RunTotals(ledger, clock=clock)
    assert by_hand.add_recovery(4, "", trainer_kept=True) == "a new coordinator took over"
    assert (by_hand.resumes, by_hand.restarts) == (0, {"coordinator-0": 1, "coordinator": 1})
    assert [(row["step"], row["trainer_kept"]) for row in by_hand.recoveries] == [(3, True), (2, False), (4, True)]
    ledger.close()


def test_a_process_that_takes_anothers_place_is_counted(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    first = totals(ledger, FakeClock())
    for name, incarnation, change in (
        ("rollout-0", "a", MemberChange.JOINED),
        ("trainer-0", "a", MemberChange.JOINED),
        ("rollout-0", "a", MemberChange.EXPIRED),
        ("rollout-0", "a", MemberChange.JOINED),  # it was only slow
        ("trainer-0", "a", MemberChange.REPLACED),
        ("trainer-0", "b", MemberChange.JOINED),
        ("trainer-0", "b", MemberChange.LEFT),
        ("trainer-0", "c", MemberChange.JOINED),
    ):
        first.on_member(member(name, incarnation), change)
    assert dict(first.restarts) == {"trainer-0": 2}
    first.save()
    second = totals(ledger, FakeClock())
    second.on_member(member("trainer-0", "d"), MemberChange.JOINED)  # of the resumed run: it has no other one's place
    assert dict(second.restarts) == {"trainer-0": 2}
    ledger.close()


def test_names_from_other_processes_do_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold_coordinator.reporting.run_totals._MAX_NAMES", 3)
    ledger = Ledger(tmp_path / "ledger.sqlite")
    kept = totals(ledger, FakeClock())
    for number in range(10):
        for incarnation in "ab":
            kept.on_member(member(f"rollout-{number}", incarnation), MemberChange.JOINED)
    assert len(kept.restarts) == 3
    ledger.close()
