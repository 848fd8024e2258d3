"""Losses with other trust regions than PPO's clip: GMPO, DPPO and VESPO, against their formulas in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fourfold.algorithm.losses import DppoLoss, GmpoLoss, LossInputs, PolicyLoss, TokenLoss, VespoLoss
from fourfold.metrics import CLIP_FRACTION_HIGH, CLIP_FRACTION_LOW
from tests.support.tensors import F64, f64, leaf, near, slopes

SEGMENTS = [0, 1, 0, 3, 1, 0]  # samples of 3, 2 and 1 tokens, and one without tokens


def compute(
    loss: PolicyLoss, p: Tensor, advantages: list[float], *, old: list[float] | None = None,
    behavior: list[float] | None = None, segments: list[int] | None = None,
) -> TokenLoss:  # fmt: skip
    """Compute a loss; what is not given is 5 nats from what it compares with, so that reading it would show."""
    wrong = (p.detach() - 5).tolist()
    inputs = LossInputs(
        logprobs=p,
        old_logprobs=f64(wrong if old is None else old),
        behavior_logprobs=f64(wrong if behavior is None else behavior),
        advantages=f64(advantages),
        segments=torch.tensor([0] * len(p) if segments is None else segments),
        segment_count=4,
    )
    return loss.compute(inputs)


# GMPO

DISTANCES = [0.7, -0.2, -0.5, -0.9, 0.1, 0.3]  # p - o


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gmpo_is_the_geometric_mean_of_ratios_that_are_clipped_on_one_side(sign: float) -> None:
    # d is at most 0.4 where A > 0 and at least -0.3 where A < 0
    advantages = [sign * a for a in (1.0, 2.0, 1.0, 3.0, 2.0, 1.0)]
    clipped = [min(d, 0.4) if sign > 0 else max(d, -0.3) for d in DISTANCES]
    members = {s: [d for d, t in zip(clipped, SEGMENTS, strict=True) if s == t] for s in SEGMENTS}
    ratio = {s: math.exp(math.fsum(own) / len(own)) for s, own in members.items()}
    p = leaf([-1.0 + d for d in DISTANCES])
    result = compute(GmpoLoss(clip_low=0.3, clip_high=0.4), p, advantages, old=[-1.0] * 6, segments=SEGMENTS)
    assert result.loss.tolist() == near([-ratio[s] * a for s, a in zip(SEGMENTS, advantages, strict=True)])
    # d / dp_t of the sample's sum: -s A for each of its n tokens, / n, and 0 where the token is clipped
    by_hand = [
        0.0 if d != c else -ratio[s] * a for d, c, s, a in zip(DISTANCES, clipped, SEGMENTS, advantages, strict=True)
    ]
    assert slopes(result.loss, p) == near(by_hand)
    assert result.means[CLIP_FRACTION_HIGH].tolist() == [float(sign > 0 and d > 0.4) for d in DISTANCES]
    assert result.means[CLIP_FRACTION_LOW].tolist() == [float(sign < 0 and d < -0.3) for d in DISTANCES]
    assert sum(by_hand) != 0 and 0.0 in by_hand


# DPPO


@pytest.mark.parametrize(
    ("now", "engine", "advantage", "kept"),
    [  # probabilities; at most 0.2 up where A > 0, at most 0.1 down where A <= 0
        (0.30, 0.15, 2.0, True),  # twice as likely, which PPO would clip
        (0.95, 0.74, 2.0, False),  # 1.28 times, which PPO's upper clip of 1.3 would keep
        (0.74, 0.95, 2.0, True),  # away from A: not left out
        (0.05, 0.14, -2.0, True),
        (0.05, 0.16, -2.0, False),
        (0.90, 0.10, -2.0, True),
        (0.0001, 0.0002, -2.0, True),
    ],
)
def test_dppo_leaves_out_tokens_whose_probability_moved_too_far(
    now: float, engine: float, advantage: float, kept: bool
) -> None:
    p = leaf([math.log(now)])
    result = compute(DppoLoss(clip_low=0.1, clip_high=0.2), p, [advantage], behavior=[math.log(engine)])
    assert result.loss.tolist() == near([-now / engine * advantage if kept else 0.0])
    assert slopes(result.loss, p) == near([-now / engine * advantage if kept else 0.0])
    assert result.means[CLIP_FRACTION_HIGH].tolist() == [float(not kept and advantage > 0)]
    assert result.means[CLIP_FRACTION_LOW].tolist() == [float(not kept and advantage < 0)]


def test_dppo_with_a_bound_weighs_the_log_likelihood() -> None:
    p = leaf([math.log(0.30), math.log(0.15)])
    result = compute(DppoLoss(ratio_max=1.5), p, [2.0, -1.0], behavior=[math.log(0.15), math.log(0.12)])
    assert result.loss.tolist() == near([-1.5 * 2.0 * math.log(0.30), 1.25 * math.log(0.15)])
    assert slopes(result.loss, p) == near([-1.5 * 2.0, 1.25])


@pytest.mark.parametrize("unknown", [math.nan, -math.inf, math.inf])
def test_tokens_that_the_engine_cannot_vouch_for_are_left_out(unknown: float) -> None:
    p = leaf([-1.0, -1.0])
    for bound in (0.0, 2.0):
        result = compute(DppoLoss(ratio_max=bound), p, [1.0, -1.0], behavior=[unknown, -1.0])
        assert result.loss.isfinite().all()
        assert slopes(result.loss, p) == near([0.0, 1.0])
    weighed = compute(VespoLoss(), p, [1.0, 1.0], behavior=[unknown, -1.0])  # w = 1: the other token alone
    assert slopes(weighed.loss, p) == near([-1.0, -1.0])


# VESPO


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_vespo_weighs_a_sample_by_a_function_of_its_whole_ratio(sign: float) -> None:
    loss = VespoLoss(power_positive=2.0, rate_positive=3.0, power_negative=1.5, rate_negative=0.5)
    power, rate = (2.0, 3.0) if sign > 0 else (1.5, 0.5)
    advantages = [sign * a for a in (1.0, 2.0, 1.0, 3.0, 2.0, 1.0)]
    ratio = {s: math.exp(math.fsum(d for d, t in zip(DISTANCES, SEGMENTS, strict=True) if s == t)) for s in SEGMENTS}
    weight = {s: w**power * math.exp(rate - rate * w) for s, w in ratio.items()}
    p = leaf([-1.0 + d for d in DISTANCES])
    result = compute(loss, p, advantages, behavior=[-1.0] * 6, segments=SEGMENTS)
    by_hand = [-weight[s] * a for s, a in zip(SEGMENTS, advantages, strict=True)]
    assert slopes(result.loss, p) == near(by_hand)
    assert result.loss.tolist() == near([c * q for c, q in zip(by_hand, p.tolist(), strict=True)])


def test_the_weight_of_vespo_falls_to_zero_on_both_sides() -> None:
    p = torch.tensor([-30.0, -1.0, -1.0, -1.0], dtype=F64, requires_grad=True)
    result = compute(VespoLoss(), p, [1.0] * 4, behavior=[-1.0, -1.0, -2.5, -900.0], segments=[0, 1, 2, 3])
    far_below, same, above, far_above = slopes(result.loss, p)
    assert same == pytest.approx(-1)
    assert -1e-10 < far_below < 0 and -0.01 < above < 0 and far_above == 0
