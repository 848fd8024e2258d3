"""Computes on packed arrays: numbers of the action tokens of all trajectories, one after another. numpy.

    B        trajectories, the tokens of their segments in order
    n_i      action tokens of trajectory i, may be 0
    k        sum of n_i
    u        turns of all trajectories
    lengths  int64 [B]: n_i

A trajectory without actions takes no place, and nothing is padded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from fourfold.arrays import BoolArray, Float64Array, Int64Array

_MIN_VARIANCE: Final = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedRewards:
    """The rewards of all action tokens, and the sums of an estimator over the tokens of each trajectory.

    A hole is text that the policy did not write, between two of its actions. A turn is a run of actions without a hole;
    a segment ends one.
    """

    rewards: Float64Array  # R, [k]
    values: Float64Array | None  # V, [k]; None without a critic
    lengths: Int64Array  # [B]
    gaps: Int64Array
    """Positions to the next action of the trajectory, [k]: 1 + length of the hole. At a last action, any number."""

    def turn_ends(self) -> Int64Array:
        """Return the packed index of the last action of every turn, [u]."""
        ends = self.gaps > 1
        ends[last_tokens(self.lengths)] = True
        return np.flatnonzero(ends)

    def turn_counts(self) -> Int64Array:
        """Return the number of turns of each trajectory, [B]."""
        ends = np.searchsorted(self.turn_ends(), np.cumsum(self.lengths), side="left")
        return np.diff(ends, prepend=0).astype(np.int64, copy=False)

    def turn_sums(self) -> Float64Array:
        """Return the sum of the rewards of every turn, [u]."""
        ends = self.turn_ends()
        sums: Float64Array = np.add.reduceat(self.rewards, np.append(0, ends[:-1] + 1)) if len(ends) else self.rewards
        return sums

    def repeat_turns(self, values: Float64Array) -> Float64Array:
        """Return a number of every turn, [u], for each of its tokens, [k]."""
        return np.repeat(values, np.diff(self.turn_ends(), prepend=-1))

    def totals(self) -> Float64Array:
        """Return the sum of all rewards of a trajectory for each of its tokens, [k]."""
        alive = self.lengths[self.lengths > 0]
        if not len(alive):
            return self.rewards
        return np.repeat(np.add.reduceat(self.rewards, np.cumsum(alive) - alive), alive)

    def turn_factors(self, discount: float) -> Float64Array:
        """Return the discount of what follows an action, [k]: `discount` at the end of a turn, 1 within it."""
        factors = np.ones(len(self.rewards), np.float64)
        factors[self.turn_ends()] = discount
        return factors

    def steps(self, *, across_holes: bool = False) -> Float64Array:
        """Return the steps to the next action, [k]: 1, or with `across_holes` its distance; 1 at a last action."""
        steps = np.ones(int(self.lengths.sum()), np.float64)
        if across_holes:
            steps[:] = self.gaps
            steps[last_tokens(self.lengths)] = 1
        return steps

    def next_values(self) -> Float64Array:
        """Return V of the next action of the trajectory, [k]; 0 at a last action, where the trajectory has ended."""
        assert self.values is not None, "there is a critic"
        following = np.zeros_like(self.values)
        following[:-1] = self.values[1:]
        following[last_tokens(self.lengths)] = 0
        return following

    def sum_to_come(self, terms: Float64Array, factors: Float64Array) -> Float64Array:
        """Return S_t = term_t + factor_t * S_next, [k], within each trajectory; 0 follows a last action."""
        sums = np.zeros_like(terms)
        following = np.zeros(len(self.lengths), np.float64)
        for at in last_to_first(self.lengths):  # one token of every trajectory at a time
            following = terms[at] + factors[at] * following[: len(at)]
            sums[at] = following
        return sums


def last_tokens(lengths: Int64Array) -> Int64Array:
    """Return the packed index of the last action of every trajectory that has one, in their order."""
    last: Int64Array = (np.cumsum(lengths) - 1)[lengths > 0]
    return last


def last_to_first(lengths: Int64Array) -> Iterator[Int64Array]:
    """Yield packed indices: the last action of every sample, then the last but one, and so on to the first.

    Samples are ordered by length, longest first, so that the samples of an item are the first ones of the item before:
    a recursion keeps its state in an array and cuts it to the length of the item. Every index comes exactly once.
    """
    order = np.argsort(-lengths, kind="stable")
    last = (np.cumsum(lengths) - 1)[order]
    longest = int(lengths.max(initial=0))
    shorter = np.searchsorted(lengths[order[::-1]], np.arange(longest), side="right")  # samples with n_i <= back
    for back in range(longest):
        yield last[: len(lengths) - shorter[back]] - back


def whiten(advantages: Float64Array, selected: BoolArray, *, scale: bool) -> Float64Array:
    """Return (A - mean) / std over the selected tokens, float64 [k], and 0 at all others.

    As in OpenRLHF: population variance, at least 1e-8. Every token weighs the same, so long trajectories weigh more.
    Fewer than two tokens have no spread: they stay as they are. Without `scale`, nothing is divided.
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
