"""Weights and rejections between the engine and the trainer, against plain Python."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from fourfold.algorithm.corrections import Correction, Kind, correct

F64 = torch.float64
KINDS: tuple[Kind, ...] = get_args(Kind)
INF = math.inf


def corrected(
    differences: list[float],
    *,
    kind: Kind,
    low: float = 0.5,
    high: float = 2.0,
    segments: list[int] | None = None,
    dtype: torch.dtype = F64,
) -> Correction:
    """Correct tokens whose o - u is as given; u is -1, and o is exact."""
    d = torch.tensor(differences, dtype=dtype)
    places = torch.tensor([0] * len(d) if segments is None else segments, dtype=torch.int64)
    u = torch.full_like(d, -1.0)
    return correct(u + d, u, places, 4, kind=kind, low=low, high=high)


def near(values: list[float]) -> object:
    return pytest.approx(values, rel=1e-12, abs=1e-12)


LOGS = [math.log(ratio) for ratio in (0.1, 0.6, 1.0, 1.9, 2.1, 50.0)]


def test_truncated_importance_sampling_clips_the_ratio() -> None:
    result = corrected(LOGS, kind="tis")
    assert result.weights.tolist() == near([0.5, 0.6, 1.0, 1.9, 2.0, 2.0])
    assert not result.rejected.any()


def test_truncation_has_no_lower_bound_at_zero() -> None:
    result = corrected(LOGS, kind="tis", low=0.0)
    assert result.weights.tolist() == near([0.1, 0.6, 1.0, 1.9, 2.0, 2.0])


def test_icepop_rejects_tokens_outside_of_its_bounds() -> None:
    result = corrected(LOGS, kind="icepop")
    assert result.weights.tolist() == near([0, 0.6, 1.0, 1.9, 0, 0])
    assert result.rejected.tolist() == [True, False, False, False, True, True]
    result = corrected(LOGS, kind="icepop", low=0.0, high=INF)
    assert result.weights.tolist() == near([0.1, 0.6, 1.0, 1.9, 2.1, 50.0])
    assert not result.rejected.any()


# Geometric means: sample 0 sqrt(8 / 8) = 1, sample 1 (mixed in) 2.5, sample 3 sqrt(0.1 * 0.9) = 0.3; sample 2 is empty
RATIOS = [8.0, 2.5, 1 / 8, 0.1, 0.9]
SEGMENTS = [0, 1, 0, 3, 3]
RATIO_LOGS = [math.log(ratio) for ratio in RATIOS]


def test_a_sequence_mask_looks_at_the_geometric_mean_alone() -> None:
    result = corrected(RATIO_LOGS, kind="sequence-mask", segments=SEGMENTS)
    assert result.weights.tolist() == [1, 0, 1, 0, 0]
    assert result.rejected.tolist() == [False, True, False, True, True]
    result = corrected(RATIO_LOGS, kind="sequence-mask", segments=SEGMENTS, low=0.29, high=2.51)
    assert result.weights.tolist() == [1] * 5
    result = corrected(RATIO_LOGS, kind="sequence-mask", segments=SEGMENTS, low=0.31, high=2.49)
    assert result.weights.tolist() == [1, 0, 1, 0, 0]


def test_a_masked_sequence_keeps_its_token_ratios_unbounded() -> None:
    result = corrected(RATIO_LOGS, kind="sequence-mask-tis", segments=SEGMENTS)
    assert result.weights.tolist() == near([8, 0, 1 / 8, 0, 0])
    assert result.rejected.tolist() == [False, True, False, True, True]


def test_bounds_of_a_mask_need_not_be_reciprocal() -> None:
    # e^d is compared, not e^-d: 1.5 is within [0.9, 2] although 1 / 1.5 is not, and 0.6 is not
    d = [math.log(1.5), math.log(0.6)]
    for kind in KINDS[1:]:
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
    kept = corrected([extreme, 0.0], kind="tis", segments=[0, 1], dtype=dtype)
    assert kept.weights.tolist() == [2.0 if extreme > 0 else 0.5, 1.0]
    assert not kept.rejected.any()
    for kind in KINDS[1:]:
        cut = corrected([extreme, 0.0], kind=kind, segments=[0, 1], dtype=dtype)
        assert cut.weights.tolist() == [0.0, 1.0]
        assert cut.rejected.tolist() == [True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_ratios_without_bounds_end_at_twenty_nats(kind: Kind) -> None:
    result = corrected([30.0, -30.0], kind=kind, low=0.0, high=INF, segments=[0, 1])
    assert result.weights.tolist() == near([1, 1] if kind == "sequence-mask" else [math.exp(20), math.exp(-20)])
    assert not result.rejected.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unknown", [-INF, INF, math.nan])
def test_a_token_the_engine_cannot_vouch_for_is_rejected_alone(kind: Kind, unknown: float) -> None:
    # Its sample stays, and is judged by the mean over the two others, log(1.5) / 2: just inside of the first bound,
    # just outside of the second.
    o = torch.tensor([-1.0, -1.0 + math.log(1.5), -1.0, -1.0, -1.0], dtype=F64)
    u = torch.tensor([-1.0, -1.0, unknown, unknown, -1.0], dtype=F64)
    high = 1.6 if kind in ("tis", "icepop") else math.sqrt(1.5) * 1.001
    result = correct(o, u, torch.tensor([0, 0, 0, 1, 2]), 3, kind=kind, low=0.5, high=high)
    assert result.rejected.tolist() == [False, False, True, True, False]
    second = 1.0 if kind == "sequence-mask" else 1.5
    assert result.weights.tolist() == near([1, second, 0, 0, 1])
    if kind.startswith("sequence"):
        tight = math.sqrt(1.5) * 0.999
        result = correct(o, u, torch.tensor([0, 0, 0, 1, 2]), 3, kind=kind, low=0.5, high=tight)
        assert result.rejected.tolist() == [True, True, True, True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_impossible_for_both_are_rejected(kind: Kind) -> None:
    impossible = torch.tensor([-INF, -1.0])
    result = correct(impossible, impossible, torch.tensor([0, 1]), 2, kind=kind, low=0.5, high=2.0)
    assert result.weights.tolist() == [0, 1]
    assert result.rejected.tolist() == [True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_a_correction_has_no_gradient(kind: Kind) -> None:
    o = torch.tensor([-1.0, -2.0], requires_grad=True)
    u = torch.tensor([-1.1, -1.9], requires_grad=True)
    result = correct(o, u, torch.tensor([0, 0]), 1, kind=kind, low=0.5, high=2.0)
    assert not result.weights.requires_grad
    assert result.weights.dtype == torch.float32
    assert result.rejected.dtype == torch.bool


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens_no_correction(kind: Kind) -> None:
    result = corrected([], kind=kind)
    assert (len(result.weights), len(result.rejected)) == (0, 0)


def plain(d: list[float], segments: list[int], kind: Kind, low: float, high: float) -> list[float]:
    """Return the weights by the table of kinds, one token at a time."""
    weights = []
    for difference, segment in zip(d, segments, strict=True):
        own = [x for x, s in zip(d, segments, strict=True) if s == segment]
        judged = math.exp(difference if kind == "icepop" else math.fsum(own) / len(own))
        ratio = math.exp(difference)
        if kind == "tis":
            weights.append(min(max(ratio, low), high))
        elif not low <= judged <= high:
            weights.append(0.0)
        else:
            weights.append(1.0 if kind == "sequence-mask" else ratio)
    return weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(10))
def test_random_batches_follow_the_table(kind: Kind, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    segments = torch.randint(0, 4, (30,), generator=generator).tolist()
    d: Tensor = 0.8 * torch.randn(30, generator=generator, dtype=F64)
    d[torch.tensor(segments) == 1] += 0.5
    u = -torch.rand(30, generator=generator, dtype=F64)
    result = correct(u + d, u, torch.tensor(segments), 4, kind=kind, low=0.7, high=1.4)
    by_hand = plain(d.tolist(), segments, kind, 0.7, 1.4)
    assert result.weights.tolist() == near(by_hand)
    assert result.rejected.tolist() == [weight == 0 for weight in by_hand]
