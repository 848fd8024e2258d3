"""The critic's loss: values and gradients against the equation, written out in plain Python."""

from __future__ import annotations

import pytest
import torch

from fourfold.algorithm.losses import value_loss
from fourfold.metrics import VALUE_CLIP_FRACTION
from tests.support.tensors import f64, leaf, near, slopes


@pytest.mark.parametrize(
    ("v", "old", "target", "loss", "slope", "clipped"),
    [  # clip 0.5; slope V - G, or 0 where the clipped term is larger and V has left the clip
        (1.2, 1.0, 3.0, 0.5 * 1.8**2, -1.8, 0.0),  # inside
        (1.8, 1.0, 3.0, 0.5 * 1.5**2, 0.0, 1.0),  # moved to 1.5 only: (1.5 - 3)^2 > (1.8 - 3)^2
        (0.2, 1.0, 3.0, 0.5 * 2.8**2, -2.8, 0.0),  # moved away: (0.5 - 3)^2 < (0.2 - 3)^2
        (0.2, 1.0, -1.0, 0.5 * 1.5**2, 0.0, 1.0),  # the same below: (0.5 + 1)^2 > (0.2 + 1)^2
        (1.8, 1.0, -1.0, 0.5 * 2.8**2, 2.8, 0.0),
        (1.8, 1.0, 1.0, 0.5 * 0.8**2, 0.8, 0.0),  # overshot the target
        (1.0, 1.0, 1.0, 0.0, 0.0, 0.0),
    ],
)
def test_the_value_loss_and_its_gradient(
    v: float, old: float, target: float, loss: float, slope: float, clipped: float
) -> None:
    values = leaf([v])
    result = value_loss(values, f64([old]), f64([target]), clip=0.5)
    assert result.loss.tolist() == near([loss])
    assert slopes(result.loss, values) == near([slope])
    assert result.means[VALUE_CLIP_FRACTION].tolist() == [clipped]


def test_a_value_loss_without_clip_is_half_the_square() -> None:
    values = leaf([1.8, 0.2])
    result = value_loss(values, f64([1.0, 1.0]), f64([3.0, 3.0]), clip=0.0)
    assert result.loss.tolist() == near([0.5 * 1.2**2, 0.5 * 2.8**2])
    assert slopes(result.loss, values) == near([-1.2, -2.8])
    assert result.means == {}


def test_rounding_is_not_counted_as_a_clipped_value() -> None:
    generator = torch.Generator().manual_seed(0)
    old = torch.rand(10_000, generator=generator) * 0.4
    values = torch.rand(10_000, generator=generator) * 0.04
    assert (old + (values - old) != values).any()
    result = value_loss(values, old, torch.randn(10_000, generator=generator), clip=0.5)
    assert result.means[VALUE_CLIP_FRACTION].sum() == 0


def test_the_value_loss_teaches_the_values_alone() -> None:
    values, old, returns = leaf([1.8, 0.9]), leaf([1.0, 1.0]), leaf([-3.0, 3.0])
    value_loss(values, old, returns, clip=0.5).loss.sum().backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None and values.grad.all()
    assert old.grad is None
    assert returns.grad is None


def test_an_empty_value_loss_keeps_its_graph() -> None:
    values = leaf([])
    total = value_loss(values, f64([]), f64([]), clip=0.5).loss.sum()
    assert total.item() == 0
    assert slopes(total, values) == []
