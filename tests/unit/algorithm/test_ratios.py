"""The clamp and the mean over samples that losses and corrections share."""

from __future__ import annotations

import math

import pytest
import torch

from fourfold.algorithm.ratios import clamp, segment_mean

F64 = torch.float64


def test_a_log_ratio_ends_at_twenty_and_so_does_its_gradient() -> None:
    d = torch.tensor([-math.inf, -21.0, -19.0, 0.0, 19.0, 21.0, math.inf], dtype=F64, requires_grad=True)
    result = clamp(d)
    assert result.tolist() == [-20, -20, -19, 0, 19, 20, 20]
    (gradient,) = torch.autograd.grad(result.sum(), d)
    assert gradient.tolist() == [0, 0, 1, 1, 1, 0, 0]


def test_means_are_of_each_sample_and_zero_without_tokens() -> None:
    # sample 0: (1 + 3) / 2, sample 1: none, sample 2: (6 + 0 + 3) / 3
    values = torch.tensor([6.0, 1.0, 0.0, 3.0, 3.0], dtype=F64, requires_grad=True)
    result = segment_mean(values, torch.tensor([2, 0, 2, 0, 2]), 3)
    assert result.tolist() == [2, 0, 3]
    (gradient,) = torch.autograd.grad((result * torch.tensor([1.0, 1.0, 2.0], dtype=F64)).sum(), values)
    assert gradient.tolist() == pytest.approx([2 / 3, 1 / 2, 2 / 3, 1 / 2, 2 / 3])


@pytest.mark.parametrize("nonsense", [math.inf, -math.inf, math.nan])
def test_what_is_not_selected_is_no_part_of_the_mean(nonsense: float) -> None:
    # sample 0: 4 alone, sample 1: nothing is left
    values, segments = torch.tensor([4.0, nonsense, nonsense]), torch.tensor([0, 0, 1])
    result = segment_mean(values, segments, 2, torch.tensor([True, False, False]))
    assert result.tolist() == [4, 0]


def test_sums_are_made_in_float64() -> None:
    # 1 + 2^-24 is 1 in float32
    values = torch.tensor([1.0, 2.0**-24, 2.0**-24, 2.0**-24])
    result = segment_mean(values, torch.zeros(4, dtype=torch.int64), 1)
    assert result.dtype == F64
    assert result.item() == (1 + 3 * 2.0**-24) / 4
