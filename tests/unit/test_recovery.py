"""What a restore chooses, and what it does to the files of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fourfold.trainer.v1.trainer_service_pb2 import TrainerStatus
from fourfold_coordinator.ledger import Ledger
from fourfold_coordinator.recovery import cut_after, newest_checkpoint, rewrite_metrics


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """Four steps of three prompts each; a checkpoint after the second."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for step in range(1, 5):
        ledger.acknowledge(step, policy_version=step, skipped_reason="", data_position=3 * step)
        ledger.record_metrics(step, {"reward/mean": step / 10}, seconds=1.0)
        if step == 2:
            ledger.commit_checkpoint(step=2, data_position=6, policy_version=2)
    return ledger


@pytest.mark.parametrize(
    ("trainer_has", "chosen"),
    [
        (-1, (2, 6)),  # a trainer that does not say
        (2, (2, 6)),
        (4, (4, 12)),  # written before the coordinator died, and never committed
        (9, (2, 6)),  # of a step that the ledger does not know
    ],
)
def test_the_newest_checkpoint_that_both_sides_know(ledger: Ledger, trainer_has: int, chosen: tuple[int, int]) -> None:
    point = newest_checkpoint(ledger, TrainerStatus(checkpoint_step=trainer_has))
    assert (point.step, point.data_position) == chosen


def test_a_step_whose_numbers_are_not_known_is_no_checkpoint(ledger: Ledger) -> None:
    ledger.acknowledge(5, policy_version=5, skipped_reason="", data_position=15)
    assert newest_checkpoint(ledger, TrainerStatus(checkpoint_step=5)).step == 2


def test_without_a_checkpoint_the_run_begins_anew(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    assert newest_checkpoint(ledger, TrainerStatus(checkpoint_step=7)).step == 0


def test_lines_of_later_steps_and_torn_lines_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    whole = [json.dumps({"step": step, "text": "\u00e4"}, ensure_ascii=False) for step in (1, 1, 2, 3)]
    path.write_text("\n".join([*whole, '{"step": 2, "text": "to']), encoding="utf-8")
    cut_after(path, 2)
    assert path.read_text(encoding="utf-8").splitlines() == whole[:3]
    cut_after(path, 2)
    assert path.read_text(encoding="utf-8").splitlines() == whole[:3]
    cut_after(path, 0)
    assert path.read_text(encoding="utf-8") == ""
    cut_after(tmp_path / "missing.jsonl", 0)
    assert not (tmp_path / "missing.jsonl").exists()


def test_a_last_line_without_its_end_is_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"step": 1}\n{"step": 1}')
    cut_after(path, 5)
    assert path.read_text() == '{"step": 1}\n'


def test_metrics_are_written_again_as_the_ledger_has_them(tmp_path: Path, ledger: Ledger) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "reward/mean": 0.9}\n{"step": 7}\n{"st')
    ledger.restore(2)
    rewrite_metrics(path, ledger.steps())
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [{"step": 1, "reward/mean": 0.1}, {"step": 2, "reward/mean": 0.2}]
    assert not list(tmp_path.glob("*.new"))
