"""One rank's part of a step on a toy policy, the learning rate, and the metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fourfold import metrics
from fourfold.config import AlgorithmConfig, TrainerConfig
from fourfold.nn.batching import TokenBatch
from fourfold.wire import Sample
from fourfold_trainer import step
from fourfold_trainer.batching import split_step
from fourfold_trainer.engine import UpdateSettings, UpdateSums
from tests.fakes.trainer_engine import VOCABULARY, group_of, sample

GRPO = AlgorithmConfig()


class ToyPolicy:
    """A table of logits, one row for all tokens: log-probabilities do not depend on the context."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).requires_grad_()
        self.gradient = torch.zeros(VOCABULARY, dtype=torch.float64)
        self.ends: list[bool] = []

    def logprobs(self, batch: TokenBatch) -> Tensor:
        table = torch.log_softmax(self.logits, 0)
        return table[torch.from_numpy(batch.targets).long()].float()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.ends.append(last)
        self.gradient += torch.autograd.grad(loss, self.logits)[0]

    def update(self, learning_rate: float) -> float:
        return float(self.gradient.norm())


def settings(token_count: int, rank_count: int = 1, kl_coef: float = 0.0) -> UpdateSettings:
    return UpdateSettings(
        learning_rate=1e-3, token_count=token_count, rank_count=rank_count, clip_low=0.2, clip_high=0.2, kl_coef=kl_coef
    )


def run(samples: Sequence[Sample], *, ranks: int, budget: int, kl_coef: float = 0.0) -> tuple[Tensor, UpdateSums]:
    """Return the gradient, averaged over ranks as DeepSpeed does, and the sums of all ranks."""
    plan = step.prepare(samples, AlgorithmConfig(kl_coef=kl_coef))
    shares = split_step(
        [samples[i] for i in plan.trained],
        [float(plan.advantages[i]) for i in plan.trained],
        rank_count=ranks,
        max_tokens=budget,
        with_reference=kl_coef > 0,
    )
    total = UpdateSums()
    gradient = torch.zeros(VOCABULARY, dtype=torch.float64)
    for share in shares:
        policy = ToyPolicy()
        total.add(step.train(policy, share, settings(plan.token_count, ranks, kl_coef)))  # type: ignore[arg-type]
        assert policy.ends == [False] * (len(share) - 1) + [True]
        gradient += policy.gradient / ranks
    return gradient, total


def batch() -> list[Sample]:
    useful = group_of([0, 1, 3], group="a", reference=True)
    longer = group_of([2, 0], group="b", completion=7, reference=True)
    return [*useful, *group_of([1, 1], group="c", completion=5, reference=True), *longer]


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize(("ranks", "budget"), [(1, 12), (2, 100), (2, 12), (3, 20), (9, 12)])
def test_gradient_and_loss_do_not_depend_on_ranks_and_micro_batches(ranks: int, budget: int, kl_coef: float) -> None:
    whole, sums = run(batch(), ranks=1, budget=1000, kl_coef=kl_coef)
    split, split_sums = run(batch(), ranks=ranks, budget=budget, kl_coef=kl_coef)
    torch.testing.assert_close(split, whole, atol=1e-7, rtol=1e-5)
    assert split_sums.loss == pytest.approx(sums.loss, abs=1e-7)
    assert split_sums.reference_kl == pytest.approx(sums.reference_kl, rel=1e-6)
    assert split_sums.token_count == sums.token_count
    assert sorted(split_sums.mismatches) == pytest.approx(sorted(sums.mismatches))


def test_the_gradient_is_the_formula_over_all_tokens() -> None:
    samples = batch()
    gradient, sums = run(samples, ranks=1, budget=1000)
    plan = step.prepare(samples, GRPO)
    logits = ToyPolicy().logits
    table = torch.log_softmax(logits, 0)
    token_count = sum(int(s.loss_mask.sum()) for s in samples)
    assert token_count == plan.token_count == 3 * 2 + 2 * 5 + 2 * 7
    loss = -sum(
        float(advantage) * table[int(token)] / token_count
        for advantage, one in zip(plan.advantages, samples, strict=True)
        for token in one.token_ids[one.loss_mask]
    )
    (wanted,) = torch.autograd.grad(torch.as_tensor(loss), logits)
    torch.testing.assert_close(gradient, wanted, atol=1e-7, rtol=1e-5)
    expected = -sum(a * s.loss_mask.sum() for a, s in zip(plan.advantages, samples, strict=True)) / token_count
    assert sums.loss == pytest.approx(expected, abs=1e-6)


def test_a_behavior_logprob_that_is_not_finite_is_left_out_of_the_mismatch() -> None:
    samples = group_of([0, 1])
    behavior = samples[0].behavior_logprobs.copy()
    behavior[-1] = -math.inf
    samples[0] = replace(samples[0], behavior_logprobs=behavior)
    _, sums = run(samples, ranks=1, budget=100)
    assert (sums.token_count, len(sums.mismatches)) == (4, 3)
    assert np.isfinite(sums.mismatches).all() and math.isfinite(sums.mismatch_kl)


@pytest.mark.parametrize(
    ("schedule", "warmup", "rates"),
    [
        ("constant", 0, [1, 1, 1, 1]),
        ("constant", 2, [0.5, 1, 1, 1]),
        ("linear", 0, [1, 0.75, 0.5, 0.25]),
        ("linear", 2, [0.5, 1, 1, 0.5]),
        ("cosine", 0, [1, 0.853553, 0.5, 0.146447]),
    ],
)
def test_the_learning_rate_warms_up_and_falls(schedule: str, warmup: int, rates: list[float]) -> None:
    config = TrainerConfig.model_validate({"learning_rate": 2.0, "schedule": schedule, "warmup_steps": warmup})
    found = [step.learning_rate(config, n, 4) / 2 for n in range(1, 5)]
    assert found == pytest.approx(rates, abs=1e-6)
    if schedule != "constant":
        assert step.learning_rate(config, 5, 4) == pytest.approx(0, abs=1e-12)
        assert step.learning_rate(config, 50, 4) == pytest.approx(0, abs=1e-12)


def test_metrics_of_a_batch() -> None:
    samples = [
        *group_of([0, 1], group="a", version=3),
        *group_of([1, 1], group="b", version=5),
        *group_of([0, 0], group="c", completion=4, version=5),
        replace(sample("x", group="d", score=0.5, completion=0), truncated=True),
    ]
    found = step.summarise_batch(samples, 5)
    assert found[metrics.USEFUL_GROUPS] == 0.25
    assert found[metrics.GROUPS_ALL_MAX] == 0.25
    assert found[metrics.GROUPS_ALL_MIN] == 0.25
    assert found[metrics.REWARD_MEAN] == pytest.approx(3.5 / 7)
    assert found[metrics.RESPONSE_LENGTH] == pytest.approx((4 * 2 + 2 * 4) / 7)
    assert found[metrics.TRUNCATION_RATE] == pytest.approx(1 / 7)
    assert found[metrics.POLICY_LAG_MAX] == 2
    assert found[metrics.POLICY_LAG_MEAN] == pytest.approx(4 / 6)  # nobody sampled x
