"""Compares the turns of trajectories, or their tokens at equal positions. numpy float64, over the whole batch.

B        trajectories, in groups of one prompt each

u        turns of all trajectories, one trajectory after another
R        [u]  rewards of a turn: the sum of its tokens' rewards, and in a trajectory's last turn also the score
G        [u]  return of a turn: its own rewards and those of later turns, discounted
counts   [B]  turns of each trajectory, may be 0

k        action tokens of all trajectories, one trajectory after another; t counts those of one trajectory
G        [k]  return of a token: its reward and those of later tokens
w        [k]  energy of a token: squared norm of the gradient of its log-probability in the logits
lengths  [B]  action tokens of each trajectory, may be 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fourfold.algorithm.advantages.base import group_members
from fourfold.algorithm.packed import last_to_first
from fourfold.arrays import Float64Array, Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredTurns:
    """The rewards of all turns, with the groups of the trajectories that they are compared in."""

    rewards: Float64Array  # R, [u]
    counts: Int64Array  # [B]
    groups: Sequence[str]  # [B]

    def returns(self, discount: float) -> Float64Array:
        """Return G_j = R_j + discount * G_(j + 1) of every turn, [u]."""
        returns = self.rewards.copy()
        following = np.zeros(len(self.counts), np.float64)
        for at in last_to_first(self.counts):  # one turn of every trajectory at a time
            following = self.rewards[at] + discount * following[: len(at)]
            returns[at] = following
        return returns

    def compare(self, values: Float64Array, *, same_turn: bool, epsilon: float) -> Float64Array:
        """Return (value - mean) / (std + epsilon) of every turn within its group, [u]; 0 without another to compare.

        Args:
            values: a number per turn, [u].
            same_turn: compare the first turns of a group with each other, the second turns, and so on. Otherwise all
                turns of a group are compared; a trajectory with many turns weighs as much as one with few.
        """
        result = np.zeros(len(values), np.float64)
        starts = np.cumsum(self.counts) - self.counts
        for members in group_members(self.groups):
            alive = [i for i in members if self.counts[i]]
            if same_turn:
                for turn in range(max((int(self.counts[i]) for i in alive), default=0)):
                    peers = np.array([starts[i] + turn for i in alive if self.counts[i] > turn])
                    result[peers] = _relative(values[peers], np.ones(len(peers)), len(peers), epsilon)
            elif alive:
                turns = np.concatenate([starts[i] + np.arange(self.counts[i]) for i in alive])
                weights = np.concatenate([np.full(self.counts[i], 1 / self.counts[i]) for i in alive])
                result[turns] = _relative(values[turns], weights, len(alive), epsilon)
        return result


def _relative(values: Float64Array, weights: Float64Array, count: int, epsilon: float) -> Float64Array:
    """Return (value - mean) / (std + epsilon), [n], of `count` trajectories; `weights` are 1 for each in total."""
    # Equal values have no advantage, but their mean may differ from them in the last digit, which a division enlarges.
    if count < 2 or values.min() == values.max():
        return np.zeros(len(values), np.float64)
    centred = values - (weights * values).sum() / count
    scale = np.sqrt((weights * np.square(centred)).sum() / (count - 1)) + epsilon
    return centred / scale if scale > 0 else np.zeros(len(values), np.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredTokens:
    """The returns of all action tokens, with the groups of the trajectories that they are compared in."""

    returns: Float64Array  # G, [k]
    energies: Float64Array  # w, [k]; 0 for a token without a gradient
    lengths: Int64Array  # [B]
    groups: Sequence[str]  # [B]

    def compare(self) -> Float64Array:
        """Return G_t - b_t, b_t = sum(W_t G_t) / sum(W_t) over the group, W_t = w_1 + ... + w_t: [k].

        Exactly 0 where no other trajectory of the group has a token t, all returns there are equal, or no W is above 0.
        """
        result = np.zeros(len(self.returns), np.float64)
        starts = np.cumsum(self.lengths) - self.lengths
        for members in group_members(self.groups):
            counts = self.lengths[members]
            inside = np.arange(int(counts.max())) < counts[:, None]  # [n, longest]
            if not inside.any():
                continue
            tokens = np.concatenate([np.arange(starts[i], starts[i] + self.lengths[i]) for i in members])
            returns, energies = np.zeros(inside.shape, np.float64), np.zeros(inside.shape, np.float64)
            returns[inside], energies[inside] = self.returns[tokens], self.energies[tokens]
            sums = np.where(inside, np.cumsum(energies, 1), 0.0)
            # The weighted mean of equal returns may differ from them in the last digit.
            differ = returns.max(0, where=inside, initial=-np.inf) > returns.min(0, where=inside, initial=np.inf)
            total = sums.sum(0)
            baselines = np.divide((sums * returns).sum(0), total, out=np.zeros_like(total), where=total > 0)
            result[tokens] = np.where(differ & (total > 0), returns - baselines, 0.0)[inside]
        return result
