"""GRPO: what the trainer minimises, as pure functions.

    B   samples of a step, in groups of one prompt each
    k   loss tokens of a micro-batch: those that the loss mask selects, all samples one after another
    N   loss tokens of the whole step, over all ranks and also those of samples without advantage

    score r        [B]  raw number of the scorer
    advantage A    [B]  credit of a sample; each of its tokens gets it: [k]
    current p      [k]  log-probability under the policy that is updated; carries the gradient
    old o          [k]  the same at the start of the step, detached
    behavior u     [k]  the same as the engine reported it when it sampled
    reference f    [k]  the same under the frozen reference policy

One step minimises

    L = 1/N * sum over tokens of ( clip(p, o, A) + kl_coef * k3(p, f) )

All sums are divided by the same N, known before the first backward pass, so that the gradient
does not depend on how the step is split over micro-batches and ranks (token mean, DAPO,
arXiv 2503.14476, eq. 8). With one update per batch o is p itself: the ratio is 1 and the
gradient is that of REINFORCE with a group baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Float64Array = NDArray[np.float64]

# exp of a larger log-ratio says nothing any more; outside the gradient is 0.
_MAX_LOG_RATIO: Final = 20.0
_MAX_KL: Final = 10.0


def group_advantages(scores: Float64Array, groups: Sequence[str], *, epsilon: float) -> Float64Array:
    """Return each sample's advantage in its group: (r - mean) / (std + epsilon).

    GRPO, arXiv 2402.03300, section 4.1.2, with the unbiased standard deviation. A group of one
    has no baseline, and a group of equal scores has nothing to compare: both get exactly 0.
    (Dividing a constant group would blow rounding errors of its mean up to full size.)

    Args:
        scores: float64 [B].
        groups: group of each sample, [B]; groups may differ in size.
        epsilon: added to the standard deviation.

    Returns:
        float64 [B].
    """
    advantages = np.zeros(len(scores), np.float64)
    for members in group_members(groups):
        group = scores[members]
        if group.min() == group.max():  # a group of one, too
            continue
        advantages[members] = (group - group.mean()) / (group.std(ddof=1) + epsilon)
    return advantages


def group_members(groups: Sequence[str]) -> list[list[int]]:
    """Return the indices of each group's samples, groups in the order of their first sample."""
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    return list(members.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedLoss:
    """PPO's clipped surrogate, token by token."""

    loss: Tensor
    """[k] float32: -min(ratio * A, clip(ratio) * A)."""
    log_ratio: Tensor
    """[k] float32, detached, not clamped: p - o."""
    clipped_low: Tensor
    """[k] bool: A < 0 and the ratio is below 1 - clip_low."""
    clipped_high: Tensor
    """[k] bool: A > 0 and the ratio is above 1 + clip_high."""


def clipped_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> ClippedLoss:
    """Return the policy loss of every token (PPO, arXiv 1707.06347, eq. 7, negated).

    Args:
        logprobs: p, [k].
        old_logprobs: o, [k]; its gradient is cut.
        advantages: A, [k].
        clip_low: the ratio is clipped from below at 1 - clip_low,
        clip_high: and from above at 1 + clip_high.
    """
    log_ratio = logprobs - old_logprobs.detach()
    ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    low, high = 1 - clip_low, 1 + clip_high
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    with torch.no_grad():
        clipped_low = (advantages < 0) & (ratio < low)
        clipped_high = (advantages > 0) & (ratio > high)
    return ClippedLoss(
        loss=-surrogate, log_ratio=log_ratio.detach(), clipped_low=clipped_low, clipped_high=clipped_high
    )


def k3(log_ratio: Tensor) -> Tensor:
    """Return exp(d) - 1 - d for each d, at least 0: the k3 estimate of a KL divergence, without clamps.

    `expm1` keeps small values exact, where exp(d) - 1 has lost them.
    """
    return torch.expm1(log_ratio) - log_ratio


def reference_kl(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return the KL loss of every token, [k]: k3 at d = f - p (GRPO, arXiv 2402.03300, eq. 4).

    d is clamped to +-20 and the value to 10: a token that the reference finds impossible would
    otherwise outweigh the whole batch. Outside of the clamps the gradient is 0.

    Args:
        logprobs: p, [k].
        reference_logprobs: f, [k].
    """
    difference = (reference_logprobs.detach() - logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return k3(difference).clamp(max=_MAX_KL)
