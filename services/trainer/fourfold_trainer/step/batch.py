"""Checks the samples of a training step and finds their action tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fourfold.arrays import BoolArray, Float32Array, Int64Array, Sample
from fourfold.config import AlgorithmConfig
from fourfold.errors import InvalidInput
from fourfold.rpc.codec import check_unique

_CHUNK_TOKENS: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepBatch:
    """The samples of a step and their action tokens.

    What can be derived from a sample is derived when it is needed: an array of 8 bytes per token takes almost as much
    memory as the sample.
    """

    samples: Sequence[Sample]
    left_out: BoolArray  # [B], samples whose tokens are not in the loss: truncated ones, if the recipe masks them
    lengths: Int64Array  # [B], action tokens of each sample
    loss_lengths: Int64Array  # [B], action tokens that are in the loss

    @classmethod
    def of(cls, samples: Sequence[Sample], algorithm: AlgorithmConfig) -> StepBatch:
        """Count the action tokens of the samples."""
        left_out = np.array([algorithm.shaping.mask_truncated and s.truncated for s in samples], np.bool_)
        counts = [np.count_nonzero(s.loss_mask & s.action_mask) for s in samples]
        return cls(
            samples=samples,
            left_out=left_out,
            lengths=np.array([np.count_nonzero(s.action_mask) for s in samples], np.int64),
            loss_lengths=np.where(left_out, 0, np.array(counts, np.int64)),
        )

    def positions(self, index: int) -> Int64Array:
        """Return the positions of a sample's action tokens."""
        return np.flatnonzero(self.samples[index].action_mask)

    def selected(self, index: int) -> BoolArray:
        """Return which action tokens of a sample are in the loss."""
        if self.left_out[index]:
            return np.zeros(int(self.lengths[index]), np.bool_)
        sample = self.samples[index]
        return sample.loss_mask[sample.action_mask]

    def loss_positions(self, index: int) -> Int64Array:
        """Return the positions of a sample's loss tokens."""
        return self.positions(index)[self.selected(index)]

    def chunks(self) -> Iterator[range]:
        """Yield the indices of all samples, about a million action tokens at a time."""
        ends, start = np.cumsum(self.lengths), 0
        while start < len(self.samples):
            most = (ends[start - 1] if start else 0) + _CHUNK_TOKENS
            stop = max(int(np.searchsorted(ends, most, side="right")), start + 1)
            yield range(start, stop)
            start = stop

    def gaps(self, members: Iterable[int]) -> Int64Array:
        """Return the distance to the next action token of the sample, packed; 1 at its last."""
        positions = [self.positions(i) for i in members]
        return np.concatenate([np.diff(p, append=p[-1:] + 1) for p in positions]).astype(np.int64, copy=False)

    def pack(self, name: str, members: Iterable[int]) -> Float32Array:
        """Return the token-aligned array `name` of the action tokens of some samples, packed: float32 [k]."""
        parts = [getattr(self.samples[i], name)[self.positions(i)] for i in members]
        packed: Float32Array = np.concatenate(parts).astype(np.float32, copy=False)
        return packed


def check_samples(samples: Sequence[Sample], algorithm: AlgorithmConfig, *, policy_version: int) -> None:
    """Refuse a batch that cannot be trained on.

    Fewer samples than ranks are no error: a batch may shrink on its way (lost groups, a filter), and ranks without
    samples run dummies. A recipe that asks for so few is refused when it is read.

    Raises:
        InvalidInput: names the sample, the value and the rule.
    """
    if not samples:
        raise InvalidInput("the batch has no experiences; send at least one")
    check_unique(sample.sample_id for sample in samples)
    for sample in samples:
        name = f"sample {sample.sample_id}"
        if sample.score is None:
            raise InvalidInput(f"{name} has no score; score it first, or leave it out of the batch")
        if sample.top_p < 1 or sample.top_k:
            raise InvalidInput(
                f"{name} was sampled with top_p = {sample.top_p:g}, top_k = {sample.top_k}; the engine's "
                f"log-probabilities are then renormalised and cannot be trained on: sample with temperature alone"
            )
        if algorithm.kl.coef > 0 and not len(sample.reference_logprobs):
            raise InvalidInput(
                f"{name} has no reference_logprobs; algorithm.kl.coef = {algorithm.kl.coef:g} needs them"
            )
        if algorithm.advantage.needs_greedy_sample and sample.baseline_score is None:
            kind = algorithm.advantage.kind
            raise InvalidInput(f"{name} has no baseline_score; algorithm.advantage.kind = `{kind}` needs it")
        if algorithm.correction.kind == "none":
            _check_behavior(sample)
        newest = max((span.policy_version for span in sample.version_spans), default=-1)
        if newest > policy_version:
            raise InvalidInput(
                f"{name} was sampled by policy version {newest}; the trainer is at {policy_version} and has not "
                f"published that one: restore the right checkpoint, or raise the policy version"
            )


def _check_behavior(sample: Sample) -> None:
    """Refuse a sampled token of probability 0: corrections reject it, but without one it would be trained on."""
    (impossible,) = np.nonzero(np.isneginf(sample.behavior_logprobs) & sample.loss_mask)
    if len(impossible):
        raise InvalidInput(
            f"sample {sample.sample_id}: behavior_logprobs[{impossible[0]}] is -inf: a token that was sampled has a "
            f"probability above 0; leave it out of loss_mask, or set algorithm.correction.kind = `tis`, which rejects "
            f"such tokens"
        )
