"""Advantages: how much better than expected. numpy float64, over the whole batch before any split.

    B          samples, in groups of one prompt each; groups may differ in size
    k          action tokens of all samples, packed: one sample after another
    n_i        action tokens of sample i, may be 0
    score r    [B]
    reward R   [k]  see rewards.py
    value V    [k]  the critic's estimate of the state before the token
    lengths    [B]  n_i
    gaps       [k]  positions to the next action of the same sample: 1 + length of the hole between

Group baselines give one number per sample, the time recursions one per token. A *hole* is text that
the policy did not write, between two of its actions. There are two ways across:

    skip   (gaps is None)  holes are invisible: the next action is one step away
    decay  (gaps given)    R and V are 0 in a hole, but gamma and lambda keep multiplying: OpenRLHF's

They agree at gamma = lambda = 1. What has no baseline, a group of one or of equal scores, is
exactly 0: dividing would blow rounding errors of the mean up to full size (3 scores of 0.1, whose
mean is not 0.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from fourfold_trainer.algorithm.packed import BoolArray, Float64Array, Int64Array, last_to_first, last_tokens

_MIN_VARIANCE: Final = 1e-8


def group_members(groups: Sequence[str]) -> list[list[int]]:
    """Return the indices of each group's samples, groups in the order of their first sample."""
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    return list(members.values())


def _differing(scores: Float64Array, groups: Sequence[str]) -> Iterator[tuple[list[int], Float64Array]]:
    """Yield indices and scores of each group whose scores differ: a group of one never does."""
    for members in group_members(groups):
        group = scores[members]
        if group.min() != group.max():
            yield members, group


def group_normalised(scores: Float64Array, groups: Sequence[str], *, epsilon: float) -> Float64Array:
    """Return (r - mean) / (std + epsilon), float64 [B], with the unbiased std of the group.

    GRPO, arXiv 2402.03300, section 4.1.2.

    Args:
        scores: float64 [B].
        groups: group of each sample, [B].
        epsilon: added to the standard deviation.
    """
    advantages = np.zeros(len(scores), np.float64)
    for members, group in _differing(scores, groups):
        scale = group.std(ddof=1) + epsilon
        if scale > 0:  # the squares of tiny differences can all be 0
            advantages[members] = (group - group.mean()) / scale
    return advantages


def group_centred(scores: Float64Array, groups: Sequence[str]) -> Float64Array:
    """Return r - mean of the group, float64 [B].

    Dr. GRPO, arXiv 2503.20783, section 3.2; REINFORCE++-baseline, arXiv 2501.03262, before its whitening.
    """
    advantages = np.zeros(len(scores), np.float64)
    for members, group in _differing(scores, groups):
        advantages[members] = group - group.mean()
    return advantages


def leave_one_out(scores: Float64Array, groups: Sequence[str]) -> Float64Array:
    """Return r - mean of the other members, float64 [B].

    RLOO, arXiv 2402.14740. With n members that is n / (n - 1) * (r - mean of all).
    """
    advantages = np.zeros(len(scores), np.float64)
    for members, group in _differing(scores, groups):
        advantages[members] = (group - group.mean()) * (len(group) / (len(group) - 1))
    return advantages


def length_weighted(scores: Float64Array, groups: Sequence[str], lengths: Int64Array) -> Float64Array:
    """Return r - sum of n_j r_j / sum of n_j over the group, float64 [B].

    OPO, arXiv 2505.23585: the baseline of least variance when a token's gradient has the same size everywhere.
    """
    advantages = np.zeros(len(scores), np.float64)
    for members, group in _differing(scores, groups):
        tokens = lengths[members]
        if tokens.any():
            advantages[members] = group - (tokens * group).sum() / tokens.sum()
    return advantages


def discounted_returns(
    rewards: Float64Array, lengths: Int64Array, gaps: Int64Array | None, *, gamma: float
) -> Float64Array:
    """Return G_t = R_t + gamma^gap * G_next, float64 [k]; 0 follows a sample's last action.

    REINFORCE++, arXiv 2501.03262, and REINFORCE with discount.

    Args:
        rewards: R, float64 [k].
        lengths: int64 [B].
        gaps: int64 [k], or None to skip holes; what it holds at a last action does not matter.
        gamma: discount per step.
    """
    return _decaying_sum(rewards, lengths, gamma ** _steps(lengths, gaps))


def gae(
    rewards: Float64Array,
    values: Float64Array,
    lengths: Int64Array,
    gaps: Int64Array | None,
    *,
    gamma: float,
    lam: float,
) -> tuple[Float64Array, Float64Array]:
    """Return advantages A and returns A + V, both float64 [k], not whitened.

    Generalised advantage estimation, arXiv 1506.02438, eq. 16, as a recursion:

        A_t = R_t + gamma V_next - V_t + gamma lam A_next

    Across a hole of g - 1 positions, in which R and V are 0, the recursion runs g - 1 times more:

        A_t = R_t + (gamma lam)^(g-1) gamma V_next - V_t + (gamma lam)^g A_next

    After the last action V and A are 0: the sample has ended there.

    Args:
        rewards: R, float64 [k].
        values: V, float64 [k].
        lengths: int64 [B].
        gaps: int64 [k], or None to skip holes; what it holds at a last action does not matter.
        gamma: discount per step.
        lam: lambda, from 0 (one step ahead) to 1 (the whole return).
    """
    steps = _steps(lengths, gaps)
    next_values = np.zeros_like(values)
    next_values[:-1] = values[1:]
    next_values[last_tokens(lengths)] = 0
    surprises = rewards + (gamma * lam) ** (steps - 1) * gamma * next_values - values
    advantages = _decaying_sum(surprises, lengths, (gamma * lam) ** steps)
    return advantages, advantages + values


def _steps(lengths: Int64Array, gaps: Int64Array | None) -> Float64Array:
    """Return how many steps away the next action is, float64 [k]; 1 at a last action."""
    steps = np.ones(int(lengths.sum()), np.float64)
    if gaps is not None:
        steps[:] = gaps
        steps[last_tokens(lengths)] = 1
    return steps


def _decaying_sum(terms: Float64Array, lengths: Int64Array, factors: Float64Array) -> Float64Array:
    """Return S_t = term_t + factor_t * S_next, float64 [k], within each sample."""
    sums = np.zeros_like(terms)
    following = np.zeros(len(lengths), np.float64)
    for at in last_to_first(lengths):  # one token of every sample at a time
        following = terms[at] + factors[at] * following[: len(at)]
        sums[at] = following
    return sums


def whiten(advantages: Float64Array, selected: BoolArray, *, scale: bool) -> Float64Array:
    """Return (A - mean) / std over the selected tokens, float64 [k], and 0 at all others.

    OpenRLHF's: population variance, at least 1e-8. Every token weighs the same, so long samples
    weigh more. Fewer than two tokens have no spread: they stay as they are.

    Args:
        advantages: A, float64 [k].
        selected: bool [k]; the tokens that count. What A is elsewhere does not matter.
        scale: False leaves the division out.
    """
    result = np.zeros(len(advantages), np.float64)
    chosen = advantages[selected]
    if len(chosen) < 2:
        result[selected] = chosen
    elif chosen.min() != chosen.max():
        centred = chosen - chosen.mean()
        std = np.sqrt(max(np.square(centred).mean(), _MIN_VARIANCE)) if scale else 1.0
        result[selected] = centred / std
    return result
