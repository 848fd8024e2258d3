"""Weights and rejections between the engine and the trainer, against plain Python."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from fourfold.algorithm.corrections import Correction, Kind, correct
from fourfold.algorithm.losses import LossInputs
from tests.support.tensors import F64, near

KINDS: tuple[Kind, ...] = get_args(Kind)
# Those that bound a ratio on both sides, and reject what is outside of it.
MASKS: tuple[Kind, ...] = (
    "icepop", "sequence-mask", "sequence-mask-tis", "sequence-sum-mask", "sequence-sum-mask-tis"
)  # fmt: skip
INF = math.inf


def inputs_of(
    o: Tensor, u: Tensor, segments: list[int], *, current: Tensor | None = None, advantages: list[float] | None = None
) -> LossInputs:
    """Return what a loss reads; p is o, and A is -1, unless they are given."""
    return LossInputs(
        logprobs=o if current is None else current,
        old_logprobs=o.detach(),
        behavior_logprobs=u,
        advantages=-torch.ones(len(o)) if advantages is None else torch.tensor(advantages),
        segments=torch.tensor(segments, dtype=torch.int64),
        segment_count=12,
    )


def corrected(
    differences: list[float],
    *,
    kind: Kind,
    low: float = 0.5,
    high: float = 2.0,
    segments: list[int] | None = None,
    dtype: torch.dtype = F64,
    advantages: list[float] | None = None,
) -> Correction:
    """Correct tokens whose o - u is as given; u is -1, o is exact, p is o, and A is -1 unless it is given."""
    d = torch.tensor(differences, dtype=dtype)
    u = torch.full_like(d, -1.0)
    inputs = inputs_of(u + d, u, segments or [0] * len(d), advantages=advantages)
    return correct(inputs, kind=kind, low=low, high=high)


def test_bounds_of_a_mask_need_not_be_reciprocal() -> None:
    # e^d is compared, not e^-d: 1.5 is within [0.9, 2] although 1 / 1.5 is not, and 0.6 is not
    d = [math.log(1.5), math.log(0.6)]
    for kind in MASKS:
        result = corrected(d, kind=kind, low=0.9, high=2.0, segments=[0, 1])
        assert result.rejected.tolist() == [False, True]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_log_probabilities_need_no_correction(kind: Kind) -> None:
    result = corrected([0.0, 0.0], kind=kind, low=1.0, high=1.0)
    assert result.weights.tolist() == [1, 1]
    assert not result.rejected.any()


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("extreme", [100.0, -100.0, -INF])
def test_an_extreme_ratio_is_cut_or_exactly_zero(extreme: float, dtype: torch.dtype) -> None:
    # In float32 exp(100) is infinite, and infinity times a mask of 0 is NaN.
    for kind in ("tis", "sequence-tis", "geometric-tis"):
        kept = corrected([extreme, 0.0], kind=kind, segments=[0, 1], dtype=dtype)
        assert kept.weights.tolist() == [2.0 if extreme > 0 else 0.5, 1.0]
        assert kept.truncated.tolist() == [True, False]
        assert not kept.rejected.any()
    for kind in (*MASKS, "token-k3-mask", "sequence-k2-mask", "sequence-k3-mask"):
        cut = corrected([extreme, 0.0], kind=kind, segments=[0, 1], dtype=dtype)
        assert cut.weights.tolist() == [0.0, 1.0]
        assert cut.rejected.tolist() == [True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_ratios_without_bounds_end_at_twenty_nats(kind: Kind) -> None:
    result = corrected([30.0, -30.0], kind=kind, low=0.0, high=INF, segments=[0, 1])
    weighs = kind == "icepop" or kind.endswith("tis")
    assert result.weights.tolist() == near([math.exp(20), math.exp(-20)] if weighs else [1, 1])
    assert not result.rejected.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unknown", [-INF, INF, math.nan])
def test_a_token_the_engine_cannot_vouch_for_is_rejected_alone(kind: Kind, unknown: float) -> None:
    # Its sample stays, and is judged without it: as if the token were not there.
    segments, d = [0, 0, 0, 1, 2], [0.0, math.log(1.5), 0.0, 0.0, 0.0]
    u = torch.tensor([-1.0, -1.0, unknown, unknown, -1.0], dtype=F64)
    o = -1.0 + torch.tensor(d, dtype=F64)
    bounds = {"kind": kind, "low": 0.5, "high": 1.6}
    inputs = inputs_of(o, u, segments)
    result = correct(inputs, **bounds)  # type: ignore[arg-type]
    alone = corrected([d[0], d[1], d[4]], segments=[0, 0, 2], **bounds)  # type: ignore[arg-type]
    assert result.rejected.tolist() == [False, False, True, True, False]
    assert result.weights.tolist() == near([*alone.weights.tolist()[:2], 0, 0, alone.weights.tolist()[2]])
    if kind in ("sequence-mask", "sequence-mask-tis"):  # the mean over the two others is log(1.5) / 2
        for factor, rejected in ((1.001, False), (0.999, True)):
            result = correct(inputs, kind=kind, low=0.5, high=math.sqrt(1.5) * factor)
            assert result.rejected.tolist() == [rejected, rejected, True, True, False]


def test_the_off_policy_mask_rejects_bad_samples_that_became_unlikely() -> None:
    # exp(mean of p - u): sample 0 0.5, sample 1 0.7; only A < 0 is rejected, and o is not read
    u, current = torch.full((4,), -1.0, dtype=F64), torch.tensor([0.4, 0.625, 0.7, 0.7], dtype=F64).log() - 1
    o = torch.full((4,), -9.0, dtype=F64)
    inputs = inputs_of(o, u, [0, 0, 1, 1], current=current, advantages=[-1.0, 2.0, -1.0, 0.0])
    result = correct(inputs, kind="off-policy-mask", low=0.6, high=1.0)
    assert result.rejected.tolist() == [True, False, False, False]
    assert result.weights.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_impossible_for_both_are_rejected(kind: Kind) -> None:
    impossible = torch.tensor([-INF, -1.0])
    result = correct(inputs_of(impossible, impossible, [0, 1]), kind=kind, low=0.5, high=2.0)
    assert result.weights.tolist() == [0, 1]
    assert result.rejected.tolist() == [True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_a_correction_has_no_gradient(kind: Kind) -> None:
    o = torch.tensor([-1.0, -2.0], requires_grad=True)
    result = correct(inputs_of(o, torch.tensor([-1.1, -1.9]), [0, 0]), kind=kind, low=0.5, high=2.0)
    assert not result.weights.requires_grad
    assert result.weights.dtype == torch.float32
    assert result.rejected.dtype == torch.bool


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens_no_correction(kind: Kind) -> None:
    result = corrected([], kind=kind)
    assert (len(result.weights), len(result.rejected)) == (0, 0)


def plain(d: list[float], segments: list[int], kind: Kind, low: float, high: float) -> list[float]:
    """Return the weights by the table of kinds, one token at a time; p is o, and A < 0."""
    weights = []
    for x, segment in zip(d, segments, strict=True):
        own = [y for y, s in zip(d, segments, strict=True) if s == segment]
        total, mean, ratio = math.fsum(own), math.fsum(own) / len(own), math.exp(x)
        mean_k2 = math.fsum(y * y / 2 for y in own) / len(own)
        mean_k3 = math.fsum(math.exp(y) - 1 - y for y in own) / len(own)
        weight, accepted = {
            "tis": (min(max(ratio, low), high), True),
            "icepop": (ratio, low <= ratio <= high),
            "token-k3-mask": (1.0, math.exp(x) - 1 - x <= high),
            "sequence-tis": (min(max(math.exp(total), low), high), True),
            "geometric-tis": (min(max(math.exp(mean), low), high), True),
            "sequence-mask": (1.0, low <= math.exp(mean) <= high),
            "sequence-mask-tis": (ratio, low <= math.exp(mean) <= high),
            "sequence-sum-mask": (1.0, low <= math.exp(total) <= high),
            "sequence-sum-mask-tis": (math.exp(total), low <= math.exp(total) <= high),
            "sequence-k2-mask": (1.0, mean_k2 <= high),
            "sequence-k3-mask": (1.0, mean_k3 <= high),
            "off-policy-mask": (1.0, low <= math.exp(mean)),
        }[kind]
        weights.append(weight if accepted else 0.0)
    return weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(10))
def test_random_batches_follow_the_table(kind: Kind, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    segments = torch.randint(0, 12, (30,), generator=generator)
    d: Tensor = 0.5 * torch.randn(30, generator=generator, dtype=F64)
    d[segments == 1] += 0.5
    u = -torch.rand(30, generator=generator, dtype=F64)
    low, high = (0.0, 0.1) if "k2" in kind or "k3" in kind else (0.7, 1.4)
    result = correct(inputs_of(u + d, u, segments.tolist()), kind=kind, low=low, high=high)
    by_hand = plain(d.tolist(), segments.tolist(), kind, low, high)
    assert result.weights.tolist() == near(by_hand)
    assert result.rejected.tolist() == [weight == 0 for weight in by_hand]
    assert len({weight == 0 for weight in by_hand}) == (1 if kind in ("tis", "sequence-tis", "geometric-tis") else 2)
