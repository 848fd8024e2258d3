"""Joins the segments of each trajectory of a training step, and finds the action tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from fourfold.algorithm.advantages.base import group_members
from fourfold.arrays import BoolArray, Float32Array, Int64Array
from fourfold.config.algorithm import AlgorithmConfig
from fourfold.sample import Sample
from fourfold.sample.columns import Samples

Number = TypeVar("Number", np.int64, np.float64)

_CHUNK_TOKENS: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainBatch:
    """The trajectories of a step, their samples and action tokens: B trajectories of one or more samples, S in total.

    Each sample is a segment of a trajectory. Weights, scores, advantages and statistics are those of trajectories.

    Derived values of a sample are computed when they are needed: an array of 8 bytes per token takes almost as much
    memory as the sample.
    """

    samples: Samples  # S; the segments of a trajectory are neighbours, in their order
    bounds: Int64Array  # [B + 1]: trajectory j has the samples bounds[j] to bounds[j + 1] - 1
    left_out: BoolArray  # [S], samples whose tokens are not in the loss: those of truncated trajectories, if so asked
    lengths: Int64Array  # [S], action tokens of each sample
    free_lengths: Int64Array  # [S], those of them that no grammar forced; 0 for a sample that is not trained on
    loss_lengths: Int64Array  # [S], action tokens that are in the loss

    @classmethod
    def of(cls, found: Iterable[Sample], algorithm: AlgorithmConfig) -> TrainBatch:
        """Order samples by trajectory, in the order of their first samples, and count their action tokens.

        A loss of scores reads one number of each sample: its last token is then its only action token. With labelled
        steps it reads one at the end of each, and these are the loss tokens.
        """
        samples = Samples.of(found)
        if algorithm.loss.trains == "scores" and algorithm.loss.reads != "steps":
            samples = samples.with_last_tokens("action_mask", "loss_mask")
        members = group_members(samples.trajectories)
        if algorithm.loss.reads != "trajectories":  # the samples of a group are neighbours, as those of a pair are read
            groups = group_members([samples.values["group_id"][part[0]] for part in members])
            members = [members[j] for group in groups for j in group]
        order = [i for part in members for i in sorted(part, key=samples.values["segment_index"].__getitem__)]
        if order != list(range(len(samples))):
            samples = Samples.of([samples[i] for i in order])
        bounds = np.cumsum([0, *map(len, members)], dtype=np.int64)
        truncated = _any_truncated(samples, bounds)
        left_out = np.repeat(truncated & algorithm.shaping.mask_truncated, np.diff(bounds))
        actions = [samples.array("action_mask", i) for i in range(len(samples))]
        free = [np.count_nonzero(samples.array("loss_mask", i) & mask) for i, mask in enumerate(actions)]
        return cls(
            samples=samples,
            bounds=bounds,
            left_out=left_out,
            lengths=np.array([np.count_nonzero(mask) for mask in actions], np.int64),
            free_lengths=np.array(free, np.int64),
            loss_lengths=np.where(left_out, 0, free),
        )

    def values(self, name: str) -> list[Any]:
        """Return a field of the first segment of each trajectory, [B]: it has the score and the group of all."""
        column = self.samples.values[name]
        return [column[i] for i in self.bounds[:-1]]

    @property
    def group_bounds(self) -> Int64Array:
        """The first sample of each run of samples of one group, and S, [G + 1]; one run per group for `SampleLoss`."""
        ids = self.samples.values["group_id"]
        starts = [i for i in range(len(ids)) if i == 0 or ids[i] != ids[i - 1]]
        return np.array([*starts, len(ids)], np.int64)

    @property
    def trajectory_of(self) -> Int64Array:
        """The trajectory of each sample, [S]."""
        return np.repeat(np.arange(len(self.bounds) - 1), np.diff(self.bounds))

    @property
    def truncated(self) -> BoolArray:
        """Trajectories of which a budget ended a segment, [B]."""
        return _any_truncated(self.samples, self.bounds)

    @property
    def trajectory_lengths(self) -> Int64Array:
        """Action tokens of each trajectory, [B]."""
        return self.total(self.lengths)

    @property
    def turn_counts(self) -> Int64Array:
        """Turns of each trajectory, [B]: runs of action tokens without other text between; a segment ends one."""
        masks = [self.samples.array("action_mask", i) for i in range(len(self.samples))]
        starts = [np.count_nonzero(mask[1:] & ~mask[:-1]) for mask in masks]
        return self.total(np.array(starts, np.int64))

    def total(self, values: NDArray[Number]) -> NDArray[Number]:
        """Return the sum over the samples of each trajectory, [B], of a number per sample, [S]."""
        sums: NDArray[Number] = np.add.reduceat(values, self.bounds[:-1])
        return sums

    def positions(self, index: int) -> Int64Array:
        """Return the positions of a sample's action tokens."""
        return np.flatnonzero(self.samples.array("action_mask", index))

    def free(self, index: int) -> BoolArray:
        """Return which action tokens of a sample no grammar forced."""
        free: BoolArray = self.samples.array("loss_mask", index)[self.samples.array("action_mask", index)]
        return free

    def selected(self, index: int) -> BoolArray:
        """Return which action tokens of a sample are in the loss."""
        if self.left_out[index]:
            return np.zeros(int(self.lengths[index]), np.bool_)
        return self.free(index)

    def loss_positions(self, index: int) -> Int64Array:
        """Return the positions of a sample's loss tokens."""
        return self.positions(index)[self.selected(index)]

    def chunks(self) -> Iterator[tuple[range, range]]:
        """Yield all trajectories, about a million action tokens at a time, and with them their samples."""
        ends, start = np.cumsum(self.trajectory_lengths), 0
        while start < len(ends):
            most = (ends[start - 1] if start else 0) + _CHUNK_TOKENS
            stop = max(int(np.searchsorted(ends, most, side="right")), start + 1)
            yield range(start, stop), range(int(self.bounds[start]), int(self.bounds[stop]))
            start = stop

    def gaps(self, members: Iterable[int]) -> Int64Array:
        """Return the distance to the next action token of the sample, packed.

        At its last, the distance to the next sample's first action, by their positions in the two samples, and at least
        2: a new segment begins with a new turn. So the actions of a trajectory have the same distances in one segment
        as in several, if each repeats the history. At the last action of a trajectory, the number has no meaning.
        """
        positions = [p for p in map(self.positions, members) if len(p)]
        parts = [np.diff(p, append=p[-1:]) for p in positions]
        for part, this, following in zip(parts, positions, positions[1:], strict=False):
            part[-1] = max(following[0] - this[-1], 2)
        packed: Int64Array = np.concatenate([np.empty(0, np.int64), *parts])
        return packed

    def pack(self, name: str, members: Iterable[int]) -> Float32Array:
        """Return the token column `name` of the action tokens of some samples, packed: float32 [k]."""
        parts = [self.samples.array(name, i)[self.positions(i)] for i in members]
        packed: Float32Array = np.concatenate(parts).astype(np.float32, copy=False)
        return packed


def _any_truncated(samples: Samples, bounds: Int64Array) -> BoolArray:
    found: BoolArray = np.logical_or.reduceat(np.array(samples.values["truncated"], np.bool_), bounds[:-1])
    return found
