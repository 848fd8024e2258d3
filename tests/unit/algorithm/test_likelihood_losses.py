"""Losses of the tokens of data: values and gradients written out in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from fourfold import metrics
from fourfold.algorithm.advantages import Constant, ScoredSamples
from fourfold.algorithm.losses import DftLoss, LossInputs, NllLoss, PolicyLoss, TokenLoss
from fourfold.algorithm.packed import PackedRewards
from tests.support.tensors import f64, leaf, near, slopes


def compute(loss: PolicyLoss, p: torch.Tensor, weights: list[float]) -> TokenLoss:
    """Compute the loss of tokens that no engine sampled: there is no number to compare with."""
    nothing = f64([math.nan] * len(p)).to(p.dtype)
    return loss.compute(
        LossInputs(
            logprobs=p,
            old_logprobs=nothing,
            behavior_logprobs=nothing,
            advantages=f64(weights).to(p.dtype),
            segments=torch.zeros(len(p), dtype=torch.int64),
            segment_count=1,
        )
    )


def test_nll_is_the_weighted_negative_log_likelihood() -> None:
    p = leaf([math.log(0.5), math.log(0.1), -3.0])
    result = compute(NllLoss(), p, [1.0, 1.0, 0.25])
    assert result.loss.tolist() == near([math.log(2), math.log(10), 0.75])
    assert slopes(result.loss, p) == near([-1.0, -1.0, -0.25])


def test_dft_weighs_a_token_by_its_own_probability_without_a_gradient_through_it() -> None:
    p = leaf([math.log(0.5), math.log(0.1), -3.0])
    result = compute(DftLoss(), p, [1.0, 2.0, 1.0])
    assert result.loss.tolist() == near([0.5 * math.log(2), 0.2 * math.log(10), 3 * math.exp(-3)])
    assert slopes(result.loss, p) == near([-0.5, -0.2, -math.exp(-3)])


@pytest.mark.parametrize("loss", [NllLoss(), DftLoss()], ids=lambda loss: str(loss.kind))
def test_they_report_the_likelihood_without_weights_and_read_nothing_but_p(loss: PolicyLoss) -> None:
    result = compute(loss, leaf([-1.0, -2.0]), [5.0, 0.0])
    assert result.means[metrics.NLL].tolist() == [1.0, 2.0] and not result.means[metrics.NLL].requires_grad
    assert loss.token_wise
    assert not loss.compares_with_old and not loss.trains_without_advantage and not loss.reports_entropy


@pytest.mark.parametrize("loss", [NllLoss(), DftLoss()], ids=lambda loss: str(loss.kind))
def test_a_token_that_the_policy_cannot_produce_changes_nothing(loss: PolicyLoss) -> None:
    p = leaf([-math.inf, -1e4], torch.float32)
    result = compute(loss, p, [1.0, 1.0])
    assert result.loss.isfinite().all()
    assert all(math.isfinite(slope) for slope in slopes(result.loss, p))


def test_the_constant_advantage_is_the_score_of_the_sample() -> None:
    scores = f64([0.1, 1.0, -2.0]).numpy()
    lengths = torch.tensor([3, 0, 2]).numpy()
    estimator = Constant()
    compared = estimator.compare(ScoredSamples(scores=scores, groups=["a", "a", "b"], lengths=lengths))
    assert compared.tolist() == [0.1, 1.0, -2.0]
    # A score is the reward of the last token; those of turns count by their sum.
    packed = PackedRewards(
        rewards=f64([0.0, 0.0, 0.1, 0.5, -2.0]).numpy(), values=None, lengths=lengths, gaps=torch.ones(5).long().numpy()
    )
    advantages, returns = estimator.spread(packed)
    assert advantages.tolist() == [0.1, 0.1, 0.1, -1.5, -1.5] and returns is None
    empty = PackedRewards(
        rewards=f64([]).numpy(), values=None, lengths=torch.zeros(2).long().numpy(), gaps=torch.zeros(0).long().numpy()
    )
    assert estimator.spread(empty)[0].tolist() == []
