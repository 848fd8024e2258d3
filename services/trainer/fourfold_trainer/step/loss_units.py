"""Makes the micro-batches of a loss of whole answers, with weights that are known before the first pass.

A unit is a pair of trajectories of one group, or a trajectory with a label. It stays in one micro-batch, and counts if
each of its trajectories has a loss token. Labelled steps are units, too: each has one loss token and weighs as much as
every other one of the optimizer step, so that a trajectory may have any number of them.

With `selection.kind = "all-pairs"`, a group has all pairs of its trajectories whose scores differ; they stay together,
and each trajectory has one pass for all of its pairs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fourfold.algorithm.losses.units import SampleLoss
from fourfold.algorithm.selection import pairs_of
from fourfold.arrays import EMPTY_FLOATS, Float32Array, Int64Array
from fourfold.config.schema import Config
from fourfold_trainer import batches
from fourfold_trainer.batches import UnitBatch
from fourfold_trainer.engine import TrainerEngine
from fourfold_trainer.step.batch import TrainBatch
from fourfold_trainer.step.micro_batches import (
    MicroBatches,
    compute_as_updates,
    fill,
    pack_tokens,
    policy_shares,
    unit_of,
)
from fourfold_trainer.work import Work


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossUnits:
    """The units of a step's samples."""

    config: Config
    batch: TrainBatch
    loss: SampleLoss

    def to_train(self, members: Sequence[int]) -> list[int]:
        """Return the members whose unit has loss tokens on every side, and a label."""
        trajectories = self._trajectories(members)
        lengths, scores = self.batch.total(self.batch.loss_lengths), self.batch.values("score")
        units = unit_of(self.batch, self.config)
        empty = {int(units[self.batch.bounds[j]]) for j in trajectories if not lengths[j] or scores[j] is None}
        return [i for i in members if int(units[i]) not in empty and self.batch.loss_lengths[i]]

    def micro_batches(self, members: Sequence[int]) -> list[MicroBatches[UnitBatch]]:
        """Return each rank's micro-batches of the members that `to_train` returned, which make one optimizer step."""
        reads_pairs, several = self.loss.reads == "pairs", self.config.algorithm.selection.kind == "all-pairs"
        pairs = self._pairs(members) if reads_pairs else []
        by_chosen: dict[int, list[int]] = {}
        for chosen, rejected in pairs if several else ():
            by_chosen.setdefault(chosen, []).append(rejected)
        steps = int(self.batch.loss_lengths[list(members)].sum()) if self.loss.reads == "steps" else 0
        unit_weight = 1 / (len(pairs) if reads_pairs else steps or len(self._trajectories(members)))
        preferred = Counter(chosen for chosen, _ in pairs if self.config.algorithm.sft_coef)
        lengths = self.batch.total(self.batch.loss_lengths)
        tokens = sum(count * int(lengths[j]) for j, count in preferred.items())
        nll_weights = {j: count / max(tokens, 1) for j, count in preferred.items()}

        def make(found: Sequence[int]) -> UnitBatch:
            return self._unit_batch(found, unit_weight, nll_weights, by_chosen)

        dummy = batches.dummy_unit_batch(
            pairs=reads_pairs, with_reference=self.loss.needs_reference, with_factors=self.loss.tail_weight != 1
        )
        return fill(policy_shares(self.batch, self.config, members), make, dummy)

    def together(self, members: Sequence[int]) -> UnitBatch:
        """Return the members that `to_train` returned as one batch, on which no pass is made."""
        return self._unit_batch(members, 1.0, {}, {})

    def distance(self, engine: TrainerEngine, members: Sequence[int], work: Work) -> float:
        """Return the mean over the trajectories without a label of the sum of p - f; 0 if the loss measures none.

        p are the current log-probabilities, f those of the reference. The pass is added to `work`.
        """
        asked = self.measured(members)
        if not asked:
            return 0.0
        work.add(
            self.batch.samples.lengths[asked].tolist(), rows=int(self.batch.free_lengths[asked].sum()), backward=False
        )
        rows = compute_as_updates(engine.compute_logprobs, self.batch, self.config, [asked])
        differences = [rows[i].astype(np.float64) - self._aligned("reference_logprobs", i) for i in asked]
        return math.fsum(float(d.sum()) for d in differences) / len(self._trajectories(asked))

    def measured(self, members: Sequence[int]) -> list[int]:
        """Return the members on which the loss measures its distance."""
        if not self.loss.measures_distance:
            return []
        scores = self.batch.samples.values["score"]
        return [i for i in members if scores[i] is None and self.batch.loss_lengths[i]]

    def _trajectories(self, members: Sequence[int]) -> list[int]:
        return list(dict.fromkeys(self.batch.trajectory_of[list(members)].tolist()))

    def _pairs(self, members: Sequence[int]) -> list[tuple[int, int]]:
        """Return the pairs of the members' groups as trajectories, the preferred one first."""
        groups: dict[int, list[int]] = {}
        units, scores = unit_of(self.batch, self.config), self.batch.values("score")
        for j in self._trajectories(members):
            groups.setdefault(int(units[self.batch.bounds[j]]), []).append(j)
        margin = self.config.algorithm.selection.min_margin
        return [
            (group[a], group[b]) for group in groups.values() for a, b in pairs_of([scores[j] for j in group], margin)
        ]

    def _unit_batch(
        self,
        members: Sequence[int],
        unit_weight: float,
        nll_weights: Mapping[int, float],
        by_chosen: Mapping[int, Sequence[int]],
    ) -> UnitBatch:
        """Return a micro-batch; `by_chosen` has the other trajectories of all pairs, if a trajectory is in several."""
        # Per micro-batch, nothing here takes Python time for the other samples of the step.
        numbers, scores = self.batch.trajectory_of[list(members)], self.batch.samples.values["score"]
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))  # of the trajectories, whose segments are neighbours
        counts: Int64Array = np.add.reduceat(self.batch.loss_lengths[list(members)], starts)
        labels = np.array([scores[members[at]] for at in starts], np.float64)
        if self.loss.reads == "steps":  # each is a sample of one loss token
            labels = np.concatenate([self._aligned("token_rewards", i) for i in members]).astype(np.float64)
            counts = np.ones(len(labels), np.int64)
        reference = [self._aligned("reference_logprobs", i) for i in members] if self.loss.needs_reference else []
        place = {j: i for i, j in enumerate(numbers[starts].tolist())}
        pairs = np.array([(place[a], place[b]) for a in place for b in by_chosen.get(a, ())], np.int64).ravel()
        units = len(pairs) // 2 or len(counts) // (2 if self.loss.reads == "pairs" else 1)
        return UnitBatch(
            tokens=pack_tokens(self.batch.samples, self.batch.loss_positions, members),
            counts=counts,
            labels=labels,
            unit_weights=np.full(units, unit_weight, np.float64),
            pairs=pairs,
            nll_weights=np.array([nll_weights.get(j, 0.0) for j in numbers[starts].tolist()], np.float64),
            reference_logprobs=np.concatenate(reference) if reference else EMPTY_FLOATS,
            factors=tail_factors(counts, self.loss.tail_weight),
        )

    def _aligned(self, name: str, index: int) -> Float32Array:
        """Return the token column `name` of a sample at its loss tokens."""
        values: Float32Array = self.batch.samples.array(name, index)[self.batch.loss_positions(index)]
        return values


def tail_factors(counts: Int64Array, weight: float) -> Float32Array:
    """Return the factor of each token in the sums, [k]: `weight` beyond the shorter of two answers, else 1.

    [0] if the weight is 1. `counts` are those of the loss tokens of each answer, both of a pair one after the other.
    """
    if weight == 1:
        return EMPTY_FLOATS
    shorter = np.repeat(counts.reshape(-1, 2).min(1), 2)
    parts = [np.where(np.arange(n) < least, 1.0, weight) for n, least in zip(counts, shorter, strict=True)]
    factors: Float32Array = np.concatenate(parts).astype(np.float32)
    return factors
