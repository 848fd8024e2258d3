"""Estimates the KL divergence of the policy to the reference, and controls its coefficient.

    current p    [k]  log-probability of each token under the policy; carries the gradient in the loss
    reference f  [k]  log-probability under the frozen reference policy
    d            [k]  p - f

Each token was sampled by the policy, so the mean over tokens estimates KL(policy || reference)
(Schulman, "Approximating KL divergence", 2020):

          value            slope in p    use
    k1    d                1             in the reward; useless as a loss, its expected gradient is 0
    k2    d^2 / 2          d             as a loss: its expected gradient is that of the KL divergence
    k3    e^-d - 1 + d     1 - e^-d      as a loss: at least 0, unbiased in value (GRPO, arXiv 2402.03300, eq. 4)

All three are estimates for samples of the current policy. For those of an older one, o, DeepSeek-V3.2 (arXiv
2512.02556) multiplies k3 by exp(p - o), whose gradient counts: the slope is exp(p - o) (k3 + 1 - e^-d) = exp(p - o) d.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Literal, assert_never

from fourfold.algorithm.ratios import MAX_LOG_RATIO, clamp

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["k1", "k2", "k3"]

FORMULAS: Final[dict[Kind, str]] = {
    "k1": "{p} - f",
    "k2": "({p} - f)^2 / 2",
    "k3": "exp(f - {p}) - 1 - (f - {p})",
}

# k3 grows exponentially where the policy has become less likely than the reference, and one such token can outweigh the
# whole batch: verl and OpenRLHF bound it. k1 and k2 grow slowly, and their slope leads back to the reference.
MAX_K3: Final = 10.0
MAX_ERROR: Final = 0.2
"""Largest relative change of the adaptive coefficient per horizon."""


def estimate(p: Tensor, f: Tensor, kind: Kind, *, k3_max: float = MAX_K3) -> Tensor:
    """Return the estimate of every token, [k]: d clamped to +-20, k3 to `k3_max`, gradient 0 outside and in f.

    With `k3_max` = 0 there is no such clamp: k3 has its slope everywhere, that at +-20 beyond.
    """
    d = clamp(p - f.detach())
    match kind:
        case "k1":
            return d
        case "k2":
            return k2(d)
        case "k3":
            return k3(-d).clamp(max=k3_max) if k3_max else _with_slope(k3(-d), -(-d).expm1(), p)
        case _:
            assert_never(kind)


def importance_weighted(p: Tensor, o: Tensor, f: Tensor, *, k3_max: float = MAX_K3) -> Tensor:
    """Return exp(p - o) k3 for each token, [k], with the slope exp(p - o) d; d, p - o clamped to +-20, k3 to `k3_max`.

    The clamp of k3 changes the value alone. In the slope it would leave exp(p - o) * k3_max, which leads away from the
    reference where the policy is far below it.
    """
    d, ratio = clamp(p.detach() - f.detach()), clamp(p.detach() - o.detach()).exp()
    return _with_slope(ratio * k3(-d).clamp(max=k3_max or math.inf), ratio * d, p)


def _with_slope(value: Tensor, slope: Tensor, p: Tensor) -> Tensor:
    """Return `value` with the gradient `slope` in p, [k]."""
    finite = p.masked_fill(p.isneginf(), 0.0)  # -inf less itself is not a number
    return value.detach() + slope.detach() * (finite - finite.detach())


def is_clamped(p: Tensor, f: Tensor, kind: Kind, *, k3_max: float = MAX_K3) -> Tensor:
    """Return for each token whether a bound of `estimate` replaces its value; bool [k]."""
    d = p.detach() - f
    beyond = d.abs() > MAX_LOG_RATIO
    return beyond | (k3(-clamp(d)) > k3_max) if kind == "k3" and k3_max else beyond


def k2(log_ratio: Tensor) -> Tensor:
    """Return x^2 / 2 for each x."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """Return exp(x) - 1 - x for each x, at least 0, without clamps: for metrics.

    `expm1` keeps small values exact, where exp(x) - 1 rounds them to 0.
    """
    return log_ratio.expm1() - log_ratio


def adapted_coef(coef: float, kl: float, *, target: float, horizon: int, sample_count: int) -> float:
    """Return the next KL coefficient: larger after a step with more KL than the target, smaller after less.

    arXiv 1909.08593, section 2.2: coef * (1 + clip(kl / target - 1, +-0.2) * sample_count / horizon).

    Args:
        coef: coefficient of this step.
        kl: mean over the samples of this step of each sample's mean per token.
        target: above 0.
        horizon: in samples; more than 0.2 * sample_count, or the coefficient could fall to 0.
        sample_count: samples of the step.
    """
    error = min(max(kl / target - 1, -MAX_ERROR), MAX_ERROR)
    return coef * (1 + error * sample_count / horizon)
