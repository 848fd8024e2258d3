"""Compares the tokens of trajectories at equal positions. numpy float64, over the whole batch.

B        trajectories, in groups of one prompt each
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
from fourfold.arrays import Float64Array, Int64Array


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
