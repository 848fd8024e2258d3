"""A whole step on rows of data: its gradient is that of the weighted mean over tokens, however the step is split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fourfold import metrics as m
from fourfold.algorithm.state import AlgorithmState
from fourfold.config import Config
from fourfold.sample import Sample
from fourfold_trainer.service import metrics
from fourfold_trainer.step.batch import check_samples
from fourfold_trainer.step.train_step import train_step
from tests.fakes.toy_engine import ToyEngine
from tests.fakes.trainer_engine import sample


def recipe(*, ranks: int = 1, budget: int = 1000, mini_batches: int = 1, preset: str = "sft") -> Config:
    tables: dict[str, Any] = {
        "name": "toy",
        "steps": 10,
        "model": {"source": "toy", "max_context_tokens": 12},
        "data": {"train": {"path": "rows.jsonl"}},
        "batch": {"rows_per_step": 6, "tokens_per_micro_batch": budget, "mini_batches_per_step": mini_batches},
        "algorithm": {"preset": preset},
        "trainer": {"ranks": ranks, "learning_rate": 0.5},
    }
    return Config.model_validate(tables)


def rows() -> list[Sample]:
    """Return six rows of different lengths and weights; the first has a token that is not in the loss."""
    made = [sample(f"r{i}", group=f"g{i}", score=w, completion=2 + i) for i, w in enumerate([1, 1, 0.5, 2, 1, 0])]
    empty = np.empty(0, np.float32)
    found = [replace(s, behavior_logprobs=empty, version_spans=()) for s in made]
    loss = found[1].loss_mask.copy()
    loss[-1] = False
    found[1] = replace(found[1], loss_mask=loss)
    return found


def run(config: Config) -> tuple[ToyEngine, dict[str, float]]:
    engine = ToyEngine(config)
    check_samples(rows(), config, policy_version=0)
    result = train_step(engine, rows(), config, step=1, state=AlgorithmState())  # type: ignore[arg-type]
    return engine, metrics.summarise(result, config)


@pytest.mark.parametrize("preset", ["sft", "pretrain", "dft"])
def test_the_gradient_of_rows_does_not_depend_on_the_split(preset: str) -> None:
    whole, wanted = run(recipe(preset=preset))
    assert wanted[m.NLL] > 0
    assert not wanted.keys() & {m.MISMATCH_MEAN, m.MISMATCH_COVERED, m.ENTROPY, m.APPROX_KL, m.RATIO_MEAN, m.SCORE_MEAN}
    assert wanted.keys() <= m.METRICS.keys()
    for ranks, budget in ((1, 16), (2, 1000), (3, 20)):
        split, found = run(recipe(preset=preset, ranks=ranks, budget=budget))
        (one,), (other,) = whole.gradients, split.gradients
        assert float((one - other).norm()) <= 1e-12 * float(one.norm())
        assert found[m.NLL] == pytest.approx(wanted[m.NLL], rel=1e-6)


def test_rows_need_no_pass_before_several_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyEngine, "compute_logprobs", None)
    engine, found = run(recipe(mini_batches=2))
    assert len(engine.gradients) == 2 == found[m.UPDATES]
