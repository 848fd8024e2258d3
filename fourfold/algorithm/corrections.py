"""Corrects the policy loss for the logprob mismatch between the engine that sampled and the trainer.

    k           loss tokens of a micro-batch, all trajectories one after another
    s           trajectories of the micro-batch; a "sample" below is a trajectory, with all its segments
    old o       [k]  log-probability under the trainer's policy before the step
    behavior u  [k]  log-probability that the engine reported when it sampled the token
    d           [k]  o - u
    segments    int64 [k]  trajectory of each token, 0 to s - 1

A correction multiplies a token's policy loss by a weight, or rejects the token. A rejected token still counts in N and
B' (aggregation.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, assert_never

from fourfold.algorithm.ratios import clamp, segment_mean

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["tis", "icepop", "sequence-mask", "sequence-mask-tis"]

OF_WHOLE_SAMPLES: Final[tuple[Kind, ...]] = ("sequence-mask", "sequence-mask-tis")
"""Corrections whose weight of a token depends on the other tokens of the sample."""

DEFAULT_BOUNDS: Final[dict[Kind, tuple[float, float]]] = {
    "tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    # These bound the geometric mean of a sample, which differs from 1 much less than a token's ratio.
    "sequence-mask": (0.999, 1.002),
    "sequence-mask-tis": (0.999, 1.002),
}

FORMULAS: Final[dict[Kind, str]] = {
    "tis": "w = clip(exp(o - u), {low:g}, {high:g})",
    "icepop": "w = exp(o - u), and 0 for a token where that is outside of [{low:g}, {high:g}]",
    "sequence-mask": "w = 1, and 0 for a sample whose exp(mean of o - u) is outside of [{low:g}, {high:g}]",
    "sequence-mask-tis": "w = exp(o - u), and 0 for a sample whose exp(mean of o - u) is outside of [{low:g}, "
    "{high:g}]",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Correction:
    """Factor of every token's policy loss: where(rejected, 0, weights * loss)."""

    weights: Tensor  # [k], detached, finite; exactly 0 where rejected
    rejected: Tensor  # bool [k]
    truncated: Tensor  # bool [k]: the weight is a bound in place of the ratio


def correct(
    o: Tensor, u: Tensor, segments: Tensor, segment_count: int, *, kind: Kind, low: float, high: float
) -> Correction:
    """Return weights and rejected tokens.

        tis                clip(e^d, low, high): truncated importance sampling (Yao et al., 2025); the paper's low is 0
        icepop             e^d; a token outside of [low, high] is rejected (IcePop; Ling team, arXiv 2510.18855)
        sequence-mask      1; a sample whose geometric mean e^(mean d) is outside of [low, high] is rejected
        sequence-mask-tis  e^d with that same rejection, and no other bound but that of d, +-20

    The last is OpenRLHF's seq-mask-tis. A token whose u is not finite is rejected alone, and left out of its sample's
    mean.

    `low` and `high` bound the ratio; 0 and inf are no bounds.
    """
    o, u = o.detach(), u.detach()
    known = u.isfinite()
    d = o - u  # NaN where both are infinite, but only known tokens are selected
    weights = clamp(d).exp()
    truncated = known.new_zeros(known.shape)
    match kind:
        case "tis":
            kept = known
            weights = weights.clamp(low, high)
            truncated = known & ~_within(d, low, high)
        case "icepop":
            kept = known & _within(d, low, high)
        case "sequence-mask":
            kept = known & _within(segment_mean(d, segments, segment_count, known), low, high)[segments]
            weights = d.new_ones(d.shape)
        case "sequence-mask-tis":
            kept = known & _within(segment_mean(d, segments, segment_count, known), low, high)[segments]
        case _:
            assert_never(kind)
    # A selection, not a product with a mask: a rejected weight may be infinite, and inf * 0 is NaN.
    return Correction(weights=weights.masked_fill(~kept, 0.0), rejected=~kept, truncated=truncated)


def _within(log_ratio: Tensor, low: float, high: float) -> Tensor:
    return (log_ratio >= (math.log(low) if low > 0 else -math.inf)) & (log_ratio <= math.log(high))
