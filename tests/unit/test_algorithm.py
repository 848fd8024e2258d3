"""The formulas of GRPO against values worked out by hand, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fourfold_trainer.algorithm import clipped_loss, group_advantages, k3, reference_kl

F64 = torch.float64


def advantages(scores: list[float], groups: str, epsilon: float = 1e-6) -> list[float]:
    return [float(a) for a in group_advantages(np.array(scores, np.float64), list(groups), epsilon=epsilon)]


def slope_of(loss: Tensor, logprobs: Tensor) -> list[float]:
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    return [float(value) for value in gradient]


def test_a_group_is_centred_and_divided_by_its_unbiased_deviation() -> None:
    # mean 2, deviations -2 -1 0 3, squares 4+1+0+9 = 14, s = sqrt(14/3)
    s = math.sqrt(14 / 3)
    assert advantages([0, 1, 2, 5], "aaaa", 0.0) == pytest.approx([-2 / s, -1 / s, 0, 3 / s], abs=1e-15)
    assert advantages([0, 1, 2, 5], "aaaa", 0.5) == pytest.approx([-2 / (s + 0.5), -1 / (s + 0.5), 0, 3 / (s + 0.5)])


def test_a_pair_gives_plus_and_minus_one_over_root_two() -> None:
    assert advantages([3, 7], "aa", 0.0) == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)], abs=1e-15)


def test_groups_are_found_by_id_wherever_their_samples_are() -> None:
    mixed = advantages([0, 10, 1, 30], "abab", 0.0)
    assert mixed == pytest.approx([-1 / math.sqrt(2), -1 / math.sqrt(2), 1 / math.sqrt(2), 1 / math.sqrt(2)])


@pytest.mark.parametrize(("value", "count"), [(0.1, 8), (0.3, 6), (0.7, 16), (1e6, 3), (0.0, 2)])
def test_a_constant_group_is_exactly_zero(value: float, count: int) -> None:
    # The mean of eight 0.1 is not 0.1: dividing would give every member the same large advantage.
    assert advantages([value] * count, "a" * count, 0.0) == [0.0] * count


def test_a_group_of_one_is_zero() -> None:
    assert advantages([5, 1, 2], "abb", 0.0)[0] == 0.0


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 3)), min_size=1, max_size=20))
def test_advantages_are_finite_and_sum_to_zero_in_every_group(rows: list[tuple[float, int]]) -> None:
    groups = [str(g) for _, g in rows]
    result = group_advantages(np.array([r for r, _ in rows], np.float64), groups, epsilon=1e-6)
    assert np.isfinite(result).all()
    for group in set(groups):
        assert abs(sum(a for a, g in zip(result, groups, strict=True) if g == group)) < 1e-3


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [  # clip to [0.8, 1.3]; slope is d loss / d logprob = -ratio * A where nothing is clipped
        (1.0, 2.0, -2.0, -2.0),
        (1.0, -2.0, 2.0, 2.0),
        (1.2, 2.0, -2.4, -2.4),
        (1.5, 2.0, -2.6, 0.0),  # too good already
        (1.5, -2.0, 3.0, 3.0),  # must come back: not clipped
        (0.5, 2.0, -1.0, -1.0),
        (0.5, -2.0, 1.6, 0.0),  # too bad already
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_the_clipped_loss_and_its_gradient(ratio: float, advantage: float, loss: float, slope: float) -> None:
    old = torch.tensor([-1.0], dtype=F64)
    logprobs = (old + math.log(ratio)).requires_grad_()
    result = clipped_loss(logprobs, old, torch.tensor([advantage], dtype=F64), clip_low=0.2, clip_high=0.3)
    assert result.loss.item() == pytest.approx(loss, abs=1e-12)
    assert slope_of(result.loss, logprobs) == pytest.approx([slope], abs=1e-12)
    assert result.log_ratio.item() == pytest.approx(math.log(ratio), abs=1e-12)


def test_clipped_tokens_are_counted_on_the_side_that_stops_learning() -> None:
    old = torch.zeros(4, dtype=F64)
    logprobs = torch.tensor([0.5, 1.5, 0.5, 1.5], dtype=F64).log()
    result = clipped_loss(logprobs, old, torch.tensor([1.0, 1.0, -1.0, -1.0]), clip_low=0.2, clip_high=0.2)
    assert result.clipped_low.tolist() == [False, False, True, False]
    assert result.clipped_high.tolist() == [False, True, False, False]


def test_the_first_update_of_a_batch_is_reinforce() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0], dtype=F64, requires_grad=True)
    result = clipped_loss(logprobs, logprobs.detach(), torch.tensor([1.0, -2.0, 0.5]), clip_low=0.2, clip_high=0.2)
    assert slope_of(result.loss, logprobs) == [-1.0, 2.0, -0.5]


def test_a_huge_ratio_is_finite_and_has_no_gradient() -> None:
    logprobs = torch.tensor([100.0], dtype=torch.float32, requires_grad=True)
    result = clipped_loss(logprobs, torch.zeros(1), torch.tensor([-1.0]), clip_low=0.2, clip_high=0.2)
    assert result.loss.item() == pytest.approx(math.exp(20), rel=1e-6)
    assert slope_of(result.loss, logprobs) == [0.0]


@pytest.mark.parametrize("difference", [-3.0, -0.1, 0.0, 0.5, 2.0])
def test_the_kl_loss_and_its_gradient(difference: float) -> None:
    # d = f - p: exp(d) - 1 - d, and d/dp of it is 1 - exp(d)
    logprobs = torch.tensor([-2.0], dtype=F64, requires_grad=True)
    kl = reference_kl(logprobs, torch.tensor([-2.0 + difference], dtype=F64))
    assert kl.item() == pytest.approx(math.exp(difference) - 1 - difference, abs=1e-12)
    assert slope_of(kl, logprobs) == pytest.approx([1 - math.exp(difference)], abs=1e-12)


@pytest.mark.parametrize("difference", [5.0, 50.0])
def test_the_kl_loss_is_clamped_to_ten_without_gradient(difference: float) -> None:
    logprobs = torch.tensor([-60.0], requires_grad=True)
    kl = reference_kl(logprobs, torch.tensor([-60.0 + difference]))
    assert kl.item() == 10
    assert slope_of(kl, logprobs) == [0.0]


def test_k3_keeps_small_differences_in_float32() -> None:
    small = torch.tensor([1e-4, -1e-4])
    assert k3(small).tolist() == pytest.approx([5e-9, 5e-9], rel=0.05)
    assert k3(torch.zeros(1)).item() == 0
