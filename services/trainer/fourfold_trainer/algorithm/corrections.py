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
from typing import Literal, assert_never

import torch
from torch import Tensor

from fourfold_trainer.algorithm.ratios import clamp, segment_mean

Kind = Literal["tis", "icepop", "sequence-mask", "sequence-mask-tis"]


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
    truncated = torch.zeros_like(known)
    match kind:
        case "tis":
            kept = known
            weights = weights.clamp(low, high)
            truncated = known & ~_within(d, low, high)
        case "icepop":
            kept = known & _within(d, low, high)
        case "sequence-mask":
            kept = known & _within(segment_mean(d, segments, segment_count, known), low, high)[segments]
            weights = torch.ones_like(d)
        case "sequence-mask-tis":
            kept = known & _within(segment_mean(d, segments, segment_count, known), low, high)[segments]
        case _:
            assert_never(kind)
    return Correction(weights=torch.where(kept, weights, 0.0), rejected=~kept, truncated=truncated)


def _within(log_ratio: Tensor, low: float, high: float) -> Tensor:
    return (log_ratio >= (math.log(low) if low > 0 else -math.inf)) & (log_ratio <= math.log(high))
