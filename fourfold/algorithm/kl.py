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
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, assert_never

from fourfold.algorithm.ratios import clamp

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["k1", "k2", "k3"]

FORMULAS: Final[dict[Kind, str]] = {
    "k1": "{p} - f",
    "k2": "({p} - f)^2 / 2",
    "k3": "exp(f - {p}) - 1 - (f - {p})",
}

# Without a bound, one token that is impossible under the reference would outweigh the whole batch.
_MAX_KL: Final = 10.0
MAX_ERROR: Final = 0.2
"""Largest relative change of the adaptive coefficient per horizon."""


def estimate(p: Tensor, f: Tensor, kind: Kind) -> Tensor:
    """Return the estimate of every token, [k]: d clamped to +-20, the value to +-10, gradient 0 outside and in f."""
    d = clamp(p - f.detach())
    match kind:
        case "k1":
            value = d
        case "k2":
            value = d.square() / 2
        case "k3":
            value = k3(-d)
        case _:
            assert_never(kind)
    return value.clamp(-_MAX_KL, _MAX_KL)


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
