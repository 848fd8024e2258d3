"""The coordinator's part of the metrics endpoint: labels that peers cannot choose, and counts of the ledger."""

from __future__ import annotations

from pathlib import Path

from fourfold.metrics import REWARD_MEAN, STALE_TOKENS
from fourfold.service.exporter import Values
from fourfold_coordinator.reporting.metrics_source import RunSource
from fourfold_coordinator.state.faults import FaultLog
from fourfold_coordinator.state.ledger import Ledger
from fourfold_coordinator.state.run_board import RunBoard
from tests.fakes.clock import FakeClock


def readings(source: RunSource) -> dict[str, Values]:
    return {exported.name: values for exported, values in source.read()}


def test_peers_choose_no_labels(tmp_path: Path, clock: FakeClock) -> None:
    board, faults = RunBoard(name="r", step_count=4, clock=clock), FaultLog()
    board.add_step(1, {REWARD_MEAN: 0.5, "sent by a trainer": 1.0})
    for number in range(100):
        faults.record(f"rollout-{number}", "TIMEOUT", "late")
        faults.record("reward-0", f"id {number}", "hostile")
    shown = readings(RunSource(board, faults, tmp_path / "ledger.sqlite", clock=clock))
    assert shown["fourfold_run_metric"] == {REWARD_MEAN: 0.5}
    assert shown["fourfold_run_faults_total"] == {"TIMEOUT": 100, "OTHER": 100}


def test_the_queue_of_a_run_with_a_lag_is_exported(tmp_path: Path, clock: FakeClock) -> None:
    path = tmp_path / "ledger.sqlite"
    shown = readings(RunSource(RunBoard(name="r", step_count=4, clock=clock), FaultLog(), path, clock=clock))
    assert (shown["fourfold_run_groups"], shown["fourfold_run_lag_limit"]) == ({}, 0)
    board = RunBoard(name="r", step_count=4, max_policy_lag=4, clock=clock)
    board.set_queue(lag_limit=3, running=7, ready=2, needed=4)
    board.add_step(1, {STALE_TOKENS: 0.02})
    shown = readings(RunSource(board, FaultLog(), path, clock=clock))
    assert (shown["fourfold_run_groups"], shown["fourfold_run_lag_limit"]) == ({"running": 7, "ready": 2}, 3)
    assert shown["fourfold_run_metric"] == {STALE_TOKENS: 0.02}


async def test_samples_are_counted_every_few_seconds(tmp_path: Path, clock: FakeClock) -> None:
    path = tmp_path / "ledger.sqlite"
    source = RunSource(RunBoard(name="r", step_count=4, clock=clock), FaultLog(), path, clock=clock)
    await source.refresh()  # no ledger yet
    ledger = Ledger(path)
    group = ledger.issue(step=1, position=0, count=3)
    ledger.drop(group.sample_ids[:1], "NO_IDEA")
    await source.refresh()
    assert sum(number for number in as_numbers(readings(source)["fourfold_run_samples"])) == 0
    await clock.advance(10)
    await source.refresh()
    shown = readings(source)
    assert shown["fourfold_run_dropped_samples"] == {"NO_IDEA": 1}
    assert sorted(as_numbers(shown["fourfold_run_samples"])) == [0, 0, 0, 0, 0, 1, 2]
    ledger.close()


def as_numbers(values: Values) -> list[float]:
    assert isinstance(values, dict)
    return list(values.values())
