"""KL estimates with their gradients, and the controller of the coefficient."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch

from fourfold.algorithm.kl import Kind, adapted_coef, estimate, importance_weighted, is_clamped, k3
from fourfold.config import AlgorithmConfig
from fourfold_trainer.step.optimizer_step import reference_kl
from tests.support.tensors import F64, slopes

KINDS: tuple[Kind, ...] = get_args(Kind)


@pytest.mark.parametrize("d", [-3.0, -2.2, -0.1, -1e-3, 0.0, 0.5, 2.0, 4.0])
def test_the_estimates_and_their_gradients(d: float) -> None:
    # d = p - f.  k1 d, slope 1;  k2 d^2 / 2, slope d;  k3 exp(-d) - 1 + d, slope 1 - exp(-d)
    by_hand = {"k1": (d, 1.0), "k2": (d * d / 2, d), "k3": (math.exp(-d) - 1 + d, 1 - math.exp(-d))}
    if d == -3.0:
        by_hand["k3"] = (10.0, 0.0)  # exp(3) - 4 = 16.1
    for kind in KINDS:
        p = torch.tensor([-5.0 + d], dtype=F64, requires_grad=True)
        result = estimate(p, torch.tensor([-5.0], dtype=F64), kind)
        number, slope = by_hand[kind]
        assert result.tolist() == pytest.approx([number], rel=1e-12, abs=1e-12)
        assert slopes(result, p) == pytest.approx([slope], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("kind", "d", "value", "slope"),
    [  # d ends at +-20, and k3 alone at 10: exp(2.6) - 3.6 = 9.9
        ("k1", 11.0, 11.0, 1.0),
        ("k1", -19.0, -19.0, 1.0),
        ("k1", 25.0, 20.0, 0.0),
        ("k1", -100.0, -20.0, 0.0),
        ("k2", 11.0, 60.5, 11.0),
        ("k2", -19.0, 180.5, -19.0),
        ("k2", 25.0, 200.0, 0.0),
        ("k2", -100.0, 200.0, 0.0),
        ("k3", 9.0, 8.0 + math.exp(-9), 1 - math.exp(-9)),
        ("k3", 11.5, 10.0, 0.0),
        ("k3", -2.6, math.exp(2.6) - 3.6, 1 - math.exp(2.6)),
        ("k3", -2.7, 10.0, 0.0),
        ("k3", 100.0, 10.0, 0.0),
        ("k3", -100.0, 10.0, 0.0),
    ],
)
def test_bounds_and_the_tokens_that_are_at_them(kind: Kind, d: float, value: float, slope: float) -> None:
    p, f = torch.tensor([-5.0 + d], dtype=F64, requires_grad=True), torch.tensor([-5.0], dtype=F64)
    result = estimate(p, f, kind)
    assert result.item() == pytest.approx(value, rel=1e-12)
    assert slopes(result, p) == pytest.approx([slope], rel=1e-12)
    assert is_clamped(p, f, kind).tolist() == [slope == 0]


@pytest.mark.parametrize("d", [-30.0, -20.0, -12.0, -2.62, -2.6, 0.5, 15.0, 30.0])
def test_k3_without_a_bound_leads_back_from_everywhere(d: float) -> None:
    p, f = torch.tensor([-5.0 + d], dtype=F64, requires_grad=True), torch.tensor([-5.0], dtype=F64)
    result, bounded = estimate(p, f, "k3", k3_max=0), max(-20.0, min(20.0, d))
    assert result.item() == pytest.approx(math.expm1(-bounded) + bounded, rel=1e-12)
    assert slopes(result, p) == pytest.approx([-math.expm1(-bounded)], rel=1e-12)
    assert is_clamped(p, f, "k3", k3_max=0).tolist() == [abs(d) > 20]
    weighted = importance_weighted(p, p.detach(), f, k3_max=0)
    assert weighted.item() == pytest.approx(result.item(), rel=1e-12)


@pytest.mark.parametrize(
    ("algorithm", "slope"),
    [  # p is 3 nats below f: exp(3) - 4 = 16.1 is past the bound of 10
        ({"preset": "grpo-paper"}, 1 - math.exp(3)),
        ({"preset": "trl-grpo", "kl": {"coef": 0.04}}, 1 - math.exp(3)),
        ({"preset": "verl-grpo"}, 0.0),
        ({"kl": {"coef": 0.04}}, 0.0),
        ({"kl": {"coef": 0.04, "k3_max": 17.0}}, 1 - math.exp(3)),
        ({"kl": {"coef": 0.04, "importance_weighted": True}}, -3.0),
    ],
)
def test_the_bound_of_k3_is_that_of_the_recipe(algorithm: dict[str, Any], slope: float) -> None:
    config = AlgorithmConfig.model_validate(algorithm).kl
    p = torch.tensor([-4.0], dtype=F64, requires_grad=True)
    result = reference_kl(p, p.detach(), torch.tensor([-1.0], dtype=F64), config)
    assert slopes(result, p) == pytest.approx([slope], rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_policy_finds_impossible_stays_finite(kind: Kind) -> None:
    p = torch.tensor([-1.0, -math.inf], requires_grad=True)
    result = estimate(p, torch.tensor([-math.inf, -1.0]), kind)
    assert result.tolist() == {"k1": [20, -20], "k2": [200, 200], "k3": [10, 10]}[kind]
    assert slopes(result, p) == [0.0, 0.0]
    assert is_clamped(p, torch.tensor([-math.inf, -1.0]), kind).tolist() == [True, True]
    p = torch.tensor([-1.0, -math.inf], requires_grad=True)
    f = torch.tensor([-math.inf, -1.0])
    for result in (estimate(p, f, "k3", k3_max=0), importance_weighted(p, torch.tensor([-1.0, -1.0]), f)):
        assert result.isfinite().all() and torch.tensor(slopes(result, p)).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_gets_no_gradient(kind: Kind) -> None:
    p = torch.tensor([-1.0, -2.0], requires_grad=True)
    f = torch.tensor([-1.5, -1.5], requires_grad=True)
    estimate(p, f, kind).sum().backward()  # type: ignore[no-untyped-call]
    assert p.grad is not None and p.grad.all()
    assert f.grad is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_precision_and_empty_batches(kind: Kind, dtype: torch.dtype) -> None:
    assert estimate(torch.zeros(3, dtype=dtype), torch.zeros(3, dtype=dtype), kind).dtype == dtype
    assert estimate(torch.zeros(0, dtype=dtype), torch.zeros(0, dtype=dtype), kind).tolist() == []


def test_the_importance_weighted_estimate_has_the_slope_of_the_log_ratio() -> None:
    # d = p - f, r = exp(p - o); beyond k3 = 10 the value stays, and the slope still leads back to the reference
    d = torch.tensor([-15.0, -2.0, 0.5, 3.0, 30.0, -30.0], dtype=F64)
    old = torch.tensor([-1.5, -2.5, -2.0, -2.0, -2.0, -2.0], dtype=F64)
    p = torch.full((6,), -2.0, dtype=F64, requires_grad=True)
    f = p.detach() - d
    result = importance_weighted(p, old, f)
    ratio = [math.exp(-2.0 - o) for o in old.tolist()]
    bounded = [max(-20.0, min(20.0, x)) for x in d.tolist()]
    assert result.tolist() == pytest.approx(
        [r * min(10.0, math.exp(-x) - 1 + x) for r, x in zip(ratio, bounded, strict=True)], rel=1e-12
    )
    assert slopes(result, p) == pytest.approx([r * x for r, x in zip(ratio, bounded, strict=True)], rel=1e-12)
    p, f = torch.tensor([-2.1, -1.9], dtype=F64, requires_grad=True), torch.full((2,), -2.2, dtype=F64)
    product = (p - old[:2]).exp() * k3(f - p)  # nothing is clamped: automatic differentiation has the same slope
    weighted = importance_weighted(p, old[:2], f)
    assert weighted.tolist() == pytest.approx(product.tolist(), rel=1e-12)
    assert slopes(weighted, p) == pytest.approx(slopes(product, p), rel=1e-10)
    assert torch.autograd.gradcheck(lambda current: importance_weighted(current, old[:2], f), (p,))


def test_k3_keeps_small_differences_in_float32() -> None:
    # x^2 / 2 to leading order; exp(x) - 1 - x in float32 is off by more than its value at 1e-4
    small = torch.tensor([1e-4, -1e-4, 1e-3])
    assert k3(small).tolist() == pytest.approx([5e-9, 5e-9, 5e-7], rel=2e-2)
    assert k3(torch.zeros(1)).item() == 0
    p = torch.tensor([-1e-3])
    assert estimate(p, torch.zeros(1), "k3").tolist() == pytest.approx([math.expm1(1e-3) - 1e-3], rel=1e-3)


def test_k3_for_metrics_has_no_clamps() -> None:
    x = torch.tensor([-30.0, 5.0, 25.0], dtype=F64)
    by_hand = [math.exp(v) - 1 - v for v in (-30.0, 5.0, 25.0)]
    assert k3(x).tolist() == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize(
    ("kl", "factor"),
    [  # target 6; the error is clipped to +-0.2, then * 500 / 10000 = 0.05
        (6.0, 1.0),
        (6.6, 1 + 0.1 * 0.05),
        (5.4, 1 - 0.1 * 0.05),
        (60.0, 1 + 0.2 * 0.05),
        (0.0, 1 - 0.2 * 0.05),
        (-3.0, 1 - 0.2 * 0.05),
    ],
)
def test_the_coefficient_follows_the_target(kl: float, factor: float) -> None:
    result = adapted_coef(0.02, kl, target=6.0, horizon=10_000, sample_count=500)
    assert result == pytest.approx(0.02 * factor, rel=1e-12)
