"""The report of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fourfold_coordinator.reporting import report
from fourfold_coordinator.state.eval_results import EvalRow
from fourfold_coordinator.state.ledger import Ledger
from tests.fakes.toy import make_config


def evaluation(step: int, score: float) -> EvalRow:
    answers = [{"prompt": "2 * 3 =", "completion": "6", "answer": "6", "score": 1.0}]
    return EvalRow(step=step, score=score, half_width=0.1, answer_count=16, missing_count=0, answers=answers)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """Two steps, the second skipped, three evaluations."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for step, reason in ((1, ""), (2, "NO_ADVANTAGE")):
        ledger.acknowledge(step, policy_version=1, skipped_reason=reason, data_position=3 * step)
        ledger.record_metrics(step, {"reward/mean": step / 10}, seconds=2.0 * step)
    for step, score in ((0, 0.1), (1, 0.3), (2, 0.6)):
        ledger.add_eval(evaluation(step, score))
    return ledger


def build(root: Path, ledger: Ledger, **changes: Any) -> dict[str, Any]:
    memory = SimpleNamespace(peak_bytes=5, uncounted=["trainer-0"])
    totals: Any = SimpleNamespace(seconds=12.3456, memory=memory, restarts={"trainer-0": 2}, resumes=1, recoveries=[])
    return report.build(make_config(root, **changes), ledger, totals, model="/runs/toy/model")


def test_a_report_says_before_and_after(tmp_path: Path, ledger: Ledger) -> None:
    facts = build(tmp_path, ledger)
    assert facts["eval_before"] == {
        "step": 0,
        "score": 0.1,
        "half_width": 0.1,
        "interval": (0.0, 0.2),
        "n": 16,
        "missing": 0,
        "sets": [],
    }
    assert facts["eval_after"]["score"] == 0.6
    assert (facts["steps"], facts["seconds"], facts["seconds_per_step"], facts["seed"]) == (2, 12.346, 3.0, 3)
    assert (facts["restarts"], facts["resumes"]) == ({"trainer-0": 2}, 1)
    assert facts["peak_memory_without"] == ["trainer-0"]
    assert (facts["skipped_steps"], facts["policy_version"], facts["peak_memory_bytes"]) == (1, 1, 5)
    assert facts["answers_after"][0]["completion"] == "6"


def test_a_report_of_a_run_with_a_lag_sums_it_up(tmp_path: Path, ledger: Ledger) -> None:
    assert build(tmp_path, ledger)["asynchrony"] is None
    common = {"async/token_lag_max": 2.0, "async/lag_limit": 2.0, "async/rollout_wait_fraction": None}
    for step, seconds, wait in ((1, 10.0, 0.5), (2, 30.0, 0.1)):
        found = {"time/step": seconds, "async/trainer_wait_fraction": wait, "async/token_lag_mean": step / 2}
        found |= {"async/stale_token_fraction": 0.01 * step, "async/length_bias": -0.01 * step}
        ledger.record_metrics(
            step, common | found | {"lag_change": "limit 2 -> 1: why" if step > 1 else ""}, seconds=1.0
        )
    assert build(tmp_path, ledger, asynchrony={"max_policy_lag": 2})["asynchrony"] == {
        "max_policy_lag": 2,
        "lag_limit": 2.0,
        "token_lag_mean": 0.75,
        "token_lag_max": 2.0,
        "trainer_wait_fraction": pytest.approx((0.5 * 10 + 0.1 * 30) / 40),
        "rollout_wait_fraction": None,
        "stale_token_fraction": pytest.approx(0.015),
        "length_bias": -0.02,
        "lag_changes": [{"step": 2, "text": "limit 2 -> 1: why"}],
    }
    empty = build(tmp_path, Ledger(tmp_path / "empty.sqlite"), asynchrony={"max_policy_lag": 2})["asynchrony"]
    assert (empty["token_lag_mean"], empty["lag_limit"], empty["lag_changes"]) == (None, None, [])


def test_a_run_without_held_out_data_has_no_evaluation(tmp_path: Path) -> None:
    facts = build(tmp_path, Ledger(tmp_path / "empty.sqlite"))
    assert (facts["eval_before"], facts["eval_after"], facts["seconds_per_step"]) == (None, None, None)
