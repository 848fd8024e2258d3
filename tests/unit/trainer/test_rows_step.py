"""A whole step on rows of data: its gradient is that of the weighted mean over tokens, however the step is split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fourfold import metrics as m
from fourfold.algorithm.state import AlgorithmState
from fourfold.config import Config
from fourfold.errors import InvalidInput
from fourfold.sample import Sample
from fourfold_trainer.service import metrics
from fourfold_trainer.step.sample_checks import check_samples
from fourfold_trainer.step.train_step import train_step
from tests.fakes.toy_engine import ToyEngine
from tests.fakes.trainer_engine import VOCABULARY, sample


def recipe(*, ranks: int = 1, budget: int = 1000, mini_batches: int = 1, preset: str = "sft") -> Config:
    tables: dict[str, Any] = {
        "name": "toy",
        "steps": 10,
        "model": {"source": "toy", "max_context_tokens": 12},
        "data": {"train": {"path": "rows.jsonl"}},
        "batch": {"rows_per_step": 6, "tokens_per_micro_batch": budget, "mini_batches_per_step": mini_batches},
        "algorithm": {"preset": preset, **({"loss": {"top_k": 3}, "sft_coef": 0.3} if preset == "distill" else {})},
        "reference": {"source": "teacher" if preset == "distill" else ""},
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
    return [replace(s, **teacher_of(s)) for s in found]


def teacher_of(sample: Sample) -> dict[str, Any]:
    """Return three likely tokens of a teacher in place of each token, with probabilities of 0.6, 0.2 and 0.1."""
    ids = (sample.token_ids[:, None] + np.array([1, 0, 2], np.int32)) % VOCABULARY
    logprobs = np.tile(np.log(np.array([0.6, 0.2, 0.1], np.float32)), (len(ids), 1))
    return {"teacher_ids": ids, "teacher_logprobs": logprobs}


def run(config: Config) -> tuple[ToyEngine, dict[str, float]]:
    engine = ToyEngine(config)
    check_samples(rows(), config, policy_version=0)
    result = train_step(engine, rows(), config, step=1, state=AlgorithmState())  # type: ignore[arg-type]
    return engine, metrics.summarise(result, config)


@pytest.mark.parametrize("preset", ["sft", "pretrain", "dft", "distill"])
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


def test_the_gradient_of_distillation_is_that_of_the_divergence_at_each_token() -> None:
    engine, found = run(recipe(preset="distill"))
    table = ToyEngine(recipe()).policy.detach().requires_grad_()
    p = table.log_softmax(0)
    total, count = torch.zeros((), dtype=torch.float64), 0
    q = torch.tensor([0.6, 0.2, 0.1, 0.1], dtype=torch.float64)
    for one in rows():
        for token in one.token_ids[one.loss_mask].tolist():
            likely = [(token + step) % VOCABULARY for step in (1, 0, 2)]
            top = p[likely]
            outcomes = torch.cat([top, (1 - top.exp().sum())[None].log()])
            total = total + float(one.score or 0) * ((q * (q.log() - outcomes)).sum() - 0.3 * p[token])
            count += 1
    (wanted,) = torch.autograd.grad(total / count, table)
    torch.testing.assert_close(engine.gradients[0], wanted, rtol=1e-6, atol=1e-8)  # the teacher's numbers are float32
    assert found[m.TEACHER_MASS] == pytest.approx(0.9) and found[m.TEACHER_KL] > 0


def test_samples_without_as_many_tokens_of_a_teacher_are_refused() -> None:
    config = recipe(preset="distill")
    bare = [replace(s, teacher_ids=np.empty(0, np.int32), teacher_logprobs=np.empty(0, np.float32)) for s in rows()]
    with pytest.raises(InvalidInput, match=r"sample r0 has 0 of a teacher's tokens.*top_k = 3.*needs as many"):
        check_samples(bare, config, policy_version=0)
    two = [replace(s, teacher_ids=s.teacher_ids[:, :2], teacher_logprobs=s.teacher_logprobs[:, :2]) for s in rows()]
    with pytest.raises(InvalidInput, match="sample r0 has 2 of a teacher's tokens"):
        check_samples(two, config, policy_version=0)


def test_rows_need_no_pass_before_several_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyEngine, "compute_logprobs", None)
    engine, found = run(recipe(mini_batches=2))
    assert len(engine.gradients) == 2 == found[m.UPDATES]
