"""Tests the record of faults of services: counts, first texts, bounds, and counts of an earlier coordinator."""

from __future__ import annotations

from pathlib import Path

from fourfold_coordinator.state.faults import FaultLog
from fourfold_coordinator.state.ledger import Ledger


def test_the_first_text_of_each_kind_is_kept() -> None:
    faults = FaultLog()
    faults.record("reward-1", "TIMEOUT", "10 s")
    faults.record("reward-0", "RAISED", "KeyError: 'answer' (scorer.py:7)")
    faults.record("reward-0", "RAISED", "ValueError", count=2)
    assert faults.rows() == [
        {"peer": "reward-0", "kind": "RAISED", "count": 3, "first": "KeyError: 'answer' (scorer.py:7)"},
        {"peer": "reward-1", "kind": "TIMEOUT", "count": 1, "first": "10 s"},
    ]
    assert faults.first_of({"RAISED": 3, "FILTERED": 2}) == (
        "the first RAISED came from reward-0: KeyError: 'answer' (scorer.py:7)"
    )


def test_a_service_that_invents_reasons_fills_no_memory() -> None:
    faults = FaultLog()
    for number in range(1000):
        faults.record("reward-0", f"R{number}", "x" * 10_000)
    faults.record("reward-1", "RAISED", "y")
    rows = faults.rows()
    assert len(rows) == 66 and sum(row["count"] for row in rows) == 1001
    assert max(len(row["first"]) for row in rows) == 1000
    assert next(row["count"] for row in rows if row["kind"] == "OTHER") == 936


def test_counts_go_on_after_a_restart(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    before, after = FaultLog(), FaultLog()
    before.record("reward-0", "RAISED", "first", count=2)
    before.save(ledger)
    after.load(ledger)
    after.record("reward-0", "RAISED", "second")
    assert after.rows() == [{"peer": "reward-0", "kind": "RAISED", "count": 3, "first": "first"}]
    ledger.close()
