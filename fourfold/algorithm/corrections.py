"""Corrections: the engine that sampled is not the policy that learns. torch, inside the update.

    k           tokens of a micro-batch, all samples one after another
    s           samples of it
    old o       [k]  log-probability under the trainer's policy when the update began
    behavior u  [k]  the same as the engine reported it when it sampled
    d           [k]  o - u: how much likelier the token is for the trainer
    segments    int64 [k]  sample of each token, 0 to s - 1

A correction multiplies a token's policy loss with a weight, or rejects the token. What is rejected
still counts in N and B' (aggregation.py). Comparisons are made on the logs; nothing is a product
with a mask, because a rejected weight may be infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, assert_never

from fourfold.algorithm.ratios import clamp, segment_mean

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["tis", "icepop", "sequence-mask", "sequence-mask-tis"]

DEFAULT_BOUNDS: Final[dict[Kind, tuple[float, float]]] = {
    "tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    # Of the geometric mean of a whole sample, which moves much less than a token's ratio.
    "sequence-mask": (0.999, 1.002),
    "sequence-mask-tis": (0.999, 1.002),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Correction:
    """What the policy loss of every token is multiplied with: where(rejected, 0, weights * loss)."""

    weights: Tensor
    """[k], detached, finite; exactly 0 where rejected."""
    rejected: Tensor
    """bool [k]."""
    truncated: Tensor
    """bool [k]: kept with another weight than its ratio, because of the bounds."""


def correct(
    o: Tensor, u: Tensor, segments: Tensor, segment_count: int, *, kind: Kind, low: float, high: float
) -> Correction:
    """Return weights and rejected tokens.

        tis                clip(e^d, low, high): truncated importance sampling (Yao et al., 2025); the paper's low is 0
        icepop             e^d; a token outside of [low, high] is rejected (IcePop; Ling team, arXiv 2510.18855)
        sequence-mask      1; a sample whose geometric mean e^(mean d) is outside of [low, high] is rejected
        sequence-mask-tis  e^d with that same rejection, and no other bound but that of d, +-20

    The last is OpenRLHF's seq-mask-tis. A token whose u is not finite is rejected by itself, and is no
    part of its sample's mean.

    Args:
        o: [k].
        u: [k].
        segments: int64 [k].
        segment_count: s.
        kind: see above.
        low: bounds of the ratio itself; 0 for no lower one,
        high: and inf for no upper one.
    """
    o, u = o.detach(), u.detach()
    known = u.isfinite()
    d = o - u  # not a number where both are infinite, but only known tokens are selected
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
    return Correction(weights=weights.masked_fill(~kept, 0.0), rejected=~kept, truncated=truncated)


def formula(kind: Kind, low: float, high: float) -> str:
    """Return the weight w of a token as plain text."""
    inside = f"[{low:g}, {high:g}]"
    match kind:
        case "tis":
            return f"w = clip(exp(o - u), {low:g}, {high:g})" if low else f"w = min(exp(o - u), {high:g})"
        case "icepop":
            return f"w = exp(o - u), and 0 for a token where that is outside of {inside}"
        case "sequence-mask":
            return f"w = 1, and 0 for a sample whose exp(mean of o - u) is outside of {inside}"
        case "sequence-mask-tis":
            return f"w = exp(o - u), and 0 for a sample whose exp(mean of o - u) is outside of {inside}"


def _within(log_ratio: Tensor, low: float, high: float) -> Tensor:
    return (log_ratio >= (math.log(low) if low > 0 else -math.inf)) & (log_ratio <= math.log(high))
