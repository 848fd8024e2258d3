"""Corrects the policy loss for the logprob mismatch between the engine that sampled and the trainer.

    k           loss tokens of a micro-batch, all trajectories one after another
    s           trajectories of the micro-batch; a "sample" below is a trajectory, with all its segments
    old o       [k]  log-probability under the trainer's policy before the step
    behavior u  [k]  log-probability that the engine reported when it sampled the token
    current p   [k]  log-probability under the policy as it is now, detached
    d           [k]  o - u
    segments    int64 [k]  trajectory of each token, 0 to s - 1

    kind                   weight, and which tokens are rejected

    tis                    clip(e^d, low, high): truncated importance sampling (Yao et al., 2025), whose low is 0
    icepop                 e^d; a token outside of [low, high] is rejected (IcePop; Ling team, arXiv 2510.18855)
    token-k3-mask          1; a token whose k3 of d is above high is rejected (verl)
    sequence-tis           clip(e^(sum d), low, high) for all tokens of a sample: verl's sequence level
    geometric-tis          clip(e^(mean d), low, high) for all tokens of a sample (AReaL)
    sequence-mask          1; a sample whose geometric mean e^(mean d) is outside of [low, high] is rejected
    sequence-mask-tis      e^d with that same rejection, and no other bound but that of d, +-20: OpenRLHF
    sequence-sum-mask      1; a sample whose e^(sum d) is outside of [low, high] is rejected
    sequence-sum-mask-tis  e^(sum d) with that same rejection: masked importance sampling, TRL's default
    sequence-k2-mask       1; a sample whose mean of d^2 / 2 is above high is rejected
    sequence-k3-mask       1; a sample whose mean of k3 of d is above high is rejected (verl)
    off-policy-mask        1; of a sample whose e^(mean of p - u) is below low, the tokens with A < 0 are rejected:
                           DeepSeek-V3.2, arXiv 2512.02556, whose delta is -log(low). It does not read high

A correction multiplies a token's policy loss by a weight, or rejects the token. A rejected token still counts in N and
B' (aggregation.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, assert_never

from fourfold.algorithm.kl import k2, k3
from fourfold.algorithm.ratios import clamp, segment_mean, segment_sum

if TYPE_CHECKING:
    from torch import Tensor

    from fourfold.algorithm.losses.base import LossInputs

Kind = Literal[
    "tis",
    "icepop",
    "token-k3-mask",
    "sequence-tis",
    "geometric-tis",
    "sequence-mask",
    "sequence-mask-tis",
    "sequence-sum-mask",
    "sequence-sum-mask-tis",
    "sequence-k2-mask",
    "sequence-k3-mask",
    "off-policy-mask",
]

OF_SINGLE_TOKENS: Final[tuple[Kind, ...]] = ("tis", "icepop", "token-k3-mask")
"""Corrections whose weight of a token does not depend on the other tokens of the sample."""

DEFAULT_BOUNDS: Final[dict[Kind, tuple[float, float]]] = {
    "tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    # These bound the geometric mean of a sample, which differs from 1 much less than a token's ratio.
    "sequence-mask": (0.999, 1.002),
    "sequence-mask-tis": (0.999, 1.002),
    "token-k3-mask": (0.0, 0.1),
    "sequence-tis": (0.0, 2.0),
    "geometric-tis": (0.0, 2.0),
    "sequence-sum-mask": (0.0, 3.0),
    "sequence-sum-mask-tis": (0.0, 3.0),
    "sequence-k2-mask": (0.0, 0.01),
    "sequence-k3-mask": (0.0, 0.01),
    "off-policy-mask": (0.6, 1.0),
}

UNREAD: Final[dict[Kind, Literal["low", "high"]]] = {
    "token-k3-mask": "low",
    "sequence-k2-mask": "low",
    "sequence-k3-mask": "low",
    "off-policy-mask": "high",
}
"""The bound that a kind does not read."""

FORMULAS: Final[dict[Kind, str]] = {
    "tis": "w = clip(exp(o - u), {low:g}, {high:g})",
    "icepop": "w = exp(o - u), and 0 for a token where that is outside of [{low:g}, {high:g}]",
    "sequence-mask": "w = 1, and 0 for a sample whose exp(mean of o - u) is outside of [{low:g}, {high:g}]",
    "sequence-mask-tis": "w = exp(o - u), and 0 for a sample whose exp(mean of o - u) is outside of [{low:g}, "
    "{high:g}]",
    "token-k3-mask": "w = 1, and 0 for a token whose k3 = exp(d) - 1 - d, d = o - u, is above {high:g}",
    "sequence-tis": "w = clip(exp(sum of o - u), {low:g}, {high:g}), the sum over the sample",
    "geometric-tis": "w = clip(exp(mean of o - u), {low:g}, {high:g}), the mean over the sample",
    "sequence-sum-mask": "w = 1, and 0 for a sample whose exp(sum of o - u) is outside of [{low:g}, {high:g}]",
    "sequence-sum-mask-tis": "w = exp(sum of o - u) over the sample, and 0 where that is outside of "
    "[{low:g}, {high:g}]",
    "sequence-k2-mask": "w = 1, and 0 for a sample whose mean of (o - u)^2 / 2 is above {high:g}",
    "sequence-k3-mask": "w = 1, and 0 for a sample whose mean of k3 = exp(d) - 1 - d, d = o - u, is above {high:g}",
    "off-policy-mask": "w = 1, and 0 for the tokens with A < 0 of a sample whose exp(mean of p - u) is below {low:g}",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Correction:
    """Factor of every token's policy loss: where(rejected, 0, weights * loss)."""

    weights: Tensor  # [k], detached, finite; exactly 0 where rejected
    rejected: Tensor  # bool [k]
    truncated: Tensor  # bool [k]: the weight is a bound in place of the ratio


def correct(inputs: LossInputs, *, kind: Kind, low: float, high: float) -> Correction:
    """Return weights and rejected tokens of what a loss reads, by the table above.

    A token whose u is not finite is rejected alone, and left out of the sum and the mean of its sample. The sum is
    clamped to +-20, as d is.

    `low` and `high` bound a ratio, or a k2 or k3 in nats; for a ratio, 0 and inf are no bounds.
    """
    p, o, u = inputs.logprobs.detach(), inputs.old_logprobs, inputs.behavior_logprobs
    segments, segment_count = inputs.segments, inputs.segment_count
    known = u.isfinite()
    d = o - u  # NaN where both are infinite, but only known tokens are selected

    def mean(values: Tensor) -> Tensor:
        return segment_mean(values, segments, segment_count, known)

    weights = d.new_ones(d.shape)
    truncated = known.new_zeros(known.shape)
    kept = known
    match kind:
        case "tis":
            weights = clamp(d).exp().clamp(low, high)
            truncated = known & ~_within(d, low, high)
        case "icepop":
            weights = clamp(d).exp()
            kept = known & _within(d, low, high)
        case "token-k3-mask":
            kept = known & (k3(clamp(d)) <= high)
        case "sequence-tis" | "geometric-tis":
            of_sample = mean(d) if kind == "geometric-tis" else segment_sum(d, segments, segment_count, known)
            weights = clamp(of_sample).exp().clamp(low, high).to(d.dtype)[segments]
            truncated = known & ~_within(of_sample, low, high)[segments]
        case "sequence-mask" | "sequence-mask-tis":
            weights = weights if kind == "sequence-mask" else clamp(d).exp()
            kept = known & _within(mean(d), low, high)[segments]
        case "sequence-sum-mask" | "sequence-sum-mask-tis":
            total = segment_sum(d, segments, segment_count, known)
            weights = weights if kind == "sequence-sum-mask" else clamp(total).exp().to(d.dtype)[segments]
            kept = known & _within(total, low, high)[segments]
        case "sequence-k2-mask":
            kept = known & (mean(k2(d)) <= high)[segments]
        case "sequence-k3-mask":
            kept = known & (mean(k3(clamp(d))) <= high)[segments]
        case "off-policy-mask":
            kept = known & ((inputs.advantages >= 0) | _within(mean(p - u), low, math.inf)[segments])
        case _:
            assert_never(kind)
    # A selection, not a product with a mask: a rejected weight may be infinite, and inf * 0 is NaN.
    return Correction(weights=weights.masked_fill(~kept, 0.0), rejected=~kept, truncated=truncated)


def _within(log_ratio: Tensor, low: float, high: float) -> Tensor:
    return (log_ratio >= (math.log(low) if low > 0 else -math.inf)) & (log_ratio <= math.log(high))
