"""Checks the samples of a training step and packs their action tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.arrays import BoolArray, Float32Array, Int64Array, Sample
from fourfold.config import AlgorithmConfig
from fourfold.errors import InvalidInput
from fourfold.rpc.codec import check_unique


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """The samples of a step and the positions of their action tokens."""

    samples: Sequence[Sample]
    positions: list[Int64Array]  # positions of each sample's action tokens
    lengths: Int64Array  # [B], action tokens of each sample
    gaps: Int64Array  # [k], distance to the next action token of the sample; 1 at its last
    selected: BoolArray  # [k], action tokens that are in the loss

    @classmethod
    def of(cls, samples: Sequence[Sample], algorithm: AlgorithmConfig) -> PackedBatch:
        """Find the action tokens of the samples."""
        positions = [np.flatnonzero(s.action_mask) for s in samples]
        masked = [algorithm.shaping.mask_truncated and s.truncated for s in samples]
        selected = [s.loss_mask[p] & (not left_out) for s, p, left_out in zip(samples, positions, masked, strict=True)]
        return cls(
            samples=samples,
            positions=positions,
            lengths=np.array([len(p) for p in positions], np.int64),
            gaps=np.concatenate([np.diff(p, append=p[-1:] + 1) for p in positions]).astype(np.int64, copy=False),
            selected=np.concatenate(selected).astype(np.bool_, copy=False),
        )

    def pack(self, name: str) -> Float32Array:
        """Return the token-aligned array `name` of every sample, packed: float32 [k]."""
        parts = [getattr(s, name)[p] for s, p in zip(self.samples, self.positions, strict=True)]
        packed: Float32Array = np.concatenate(parts).astype(np.float32, copy=False)
        return packed

    def unpack(self, packed: NDArray[Any]) -> list[NDArray[Any]]:
        """Return a packed array sample by sample."""
        return np.split(packed, np.cumsum(self.lengths)[:-1])


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
