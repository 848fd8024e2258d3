"""What a run took over all of its coordinator processes, and who came back."""

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
    assert (second.seconds, second.resumes) == (47.0, 1)
    second.save()
    third = totals(ledger, clock)
    assert (third.seconds, third.resumes) == (47.0, 2)
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
