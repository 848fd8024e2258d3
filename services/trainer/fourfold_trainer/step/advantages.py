"""Scores become advantages: once per step, over the whole batch, in float64. No model here.

    shape      scores -> outcomes: normalisation and length penalties                     [B]
    compare    outcomes -> relative to the other samples of the prompt                    [B]
    assign     token rewards, the KL penalty among them -> advantages and returns         [k]

    B   samples of the step
    k   their action tokens, all samples one after another: `packed`

The formulas are in algorithm/.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fourfold.arrays import Float32Array, Sample
from fourfold.config import AlgorithmConfig, Config
from fourfold_trainer.algorithm import advantages as estimators
from fourfold_trainer.algorithm import kl, rewards
from fourfold_trainer.algorithm.state import AlgorithmState

Float64Array = NDArray[np.float64]
Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """The samples of a step and where their action tokens are."""

    samples: Sequence[Sample]
    positions: list[Int64Array]
    """Of each sample, the positions of its action tokens."""
    lengths: Int64Array  # [B], action tokens
    gaps: Int64Array  # [k], distance to the next action token of the sample; 1 at its last
    selected: NDArray[np.bool_]  # [k], tokens that the loss sees

    @classmethod
    def of(cls, samples: Sequence[Sample], algorithm: AlgorithmConfig) -> Batch:
        """Find the tokens."""
        positions = [np.flatnonzero(s.action_mask) for s in samples]
        masked = [algorithm.shaping.mask_truncated and s.truncated for s in samples]
        seen = [s.loss_mask[p] & (not gone) for s, p, gone in zip(samples, positions, masked, strict=True)]
        return cls(
            samples=samples,
            positions=positions,
            lengths=np.array([len(p) for p in positions], np.int64),
            gaps=np.concatenate([np.diff(p, append=p[-1:] + 1) for p in positions]).astype(np.int64, copy=False),
            selected=np.concatenate(seen).astype(np.bool_, copy=False),
        )

    def gather(self, name: str) -> Float32Array:
        """Return a token-aligned array of every sample, packed."""
        parts = [getattr(s, name)[p] for s, p in zip(self.samples, self.positions, strict=True)]
        packed: Float32Array = np.concatenate(parts).astype(np.float32, copy=False)
        return packed

    def unpack(self, packed: NDArray[Any]) -> list[NDArray[Any]]:
        """Return a packed array sample by sample."""
        return np.split(packed, np.cumsum(self.lengths)[:-1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Credit:
    """What every token is trained on, and what it was made of; packed."""

    advantages: Float64Array  # [k]
    returns: Float64Array | None  # [k], with a critic
    values: Float32Array | None  # [k], with a critic
    old_logprobs: Float32Array | None  # [k], where they were looked up
    kl: Float64Array | None  # [k], estimated distance of the old policy to the reference, where it was needed


def shape(batch: Batch, config: Config, memory: AlgorithmState) -> tuple[Float64Array, AlgorithmState]:
    """Return each sample's score after normalisation and length penalties, float64 [B]."""
    shaping = config.algorithm.shaping
    scores: Float64Array = np.array([sample.score for sample in batch.samples], np.float64)
    if shaping.normalize:
        memory = replace(memory, scores=memory.scores.updated(scores))
        scores = memory.scores.normalise(scores)
    if shaping.overlong_buffer:
        longest = config.sampling.max_new_tokens
        scores = scores + rewards.overlong_penalty(
            batch.lengths,
            max_tokens=longest,
            buffer_tokens=shaping.overlong_buffer * longest,
            factor=shaping.overlong_penalty,
        )
    if shaping.truncated is not None:
        truncated = np.array([sample.truncated for sample in batch.samples], np.bool_)
        scores = rewards.stop_properly(scores, truncated, coef=shaping.truncated)
    return scores, memory


def compare(batch: Batch, outcomes: Float64Array, algorithm: AlgorithmConfig) -> Float64Array:
    """Return each sample's outcome relative to the others of its group, float64 [B]."""
    groups = [sample.group_id for sample in batch.samples]
    match algorithm.advantage:
        case "grpo":
            return estimators.group_normalised(outcomes, groups, epsilon=algorithm.advantage_epsilon)
        case "reinforce-baseline" | "dr-grpo":
            return estimators.group_centred(outcomes, groups)
        case "rloo":
            return estimators.leave_one_out(outcomes, groups)
        case "opo":
            return estimators.length_weighted(outcomes, groups, batch.lengths)
        case "remax":
            return outcomes - np.array([sample.baseline_score for sample in batch.samples], np.float64)
        case "gae" | "reinforce":
            return outcomes


def assign(
    batch: Batch,
    outcomes: Float64Array,
    config: Config,
    *,
    old: Float32Array | None,
    values: Float32Array | None,
    kl_coef: float,
) -> Credit:
    """Turn outcomes into the advantage of every token, over the whole batch.

    Args:
        batch: of the step.
        outcomes: float64 [B], of `shape`.
        config: of the run.
        old: [k] old log-probabilities; needed for a KL term in the reward.
        values: [k] of the critic; needed for gae.
        kl_coef: of this step.
    """
    algorithm = config.algorithm
    stream = _token_rewards(batch)
    if stream is not None and algorithm.compares_samples:  # these compare whole samples
        outcomes = outcomes + np.array([part.sum() for part in batch.unpack(stream)])
        stream = None
    compared = compare(batch, outcomes, algorithm)
    if algorithm.shaping.clip:
        compared = compared.clip(-algorithm.shaping.clip, algorithm.shaping.clip)
    distance = _reference_kl(batch, old, algorithm)
    in_reward = distance if algorithm.kl.placement == "reward" else None
    token_rewards = rewards.token_rewards(compared, batch.lengths, stream=stream, kl=in_reward, kl_coef=kl_coef)
    gaps = batch.gaps if algorithm.hole_mode == "decay" else None
    returns: Float64Array | None = None
    if algorithm.needs_critic:
        assert values is not None, "a critic was asked"
        discounts = {"gamma": algorithm.gamma, "lam": algorithm.gae_lambda}
        advantages, returns = estimators.gae(token_rewards, values.astype(np.float64), batch.lengths, gaps, **discounts)
    else:
        advantages = estimators.discounted_returns(token_rewards, batch.lengths, gaps, gamma=algorithm.gamma)
    if algorithm.whiten != "off":
        advantages = estimators.whiten(advantages, batch.selected, scale=algorithm.whiten == "full")
    return Credit(advantages=advantages, returns=returns, values=values, old_logprobs=old, kl=distance)


def next_kl_coef(batch: Batch, credit: Credit, coef: float, config: Config) -> float | None:
    """Return the KL coefficient of the next step; None when it never moves."""
    settings = config.algorithm.kl
    if not settings.target:
        return None
    means = [part.mean() for part in batch.unpack(credit.kl) if len(part)] if credit.kl is not None else []
    if not means or not np.isfinite(means).all():  # a coefficient that is no number would stay so for good
        return coef
    return kl.adapted_coef(
        coef, float(np.mean(means)), target=settings.target, horizon=settings.horizon, sample_count=len(batch.samples)
    )


def _token_rewards(batch: Batch) -> Float64Array | None:
    """Return the scorer's rewards of single tokens, packed, or None when no sample has any."""
    if not any(len(s.token_rewards) for s in batch.samples):
        return None
    parts = [
        s.token_rewards[p] if len(s.token_rewards) else np.zeros(len(p))
        for s, p in zip(batch.samples, batch.positions, strict=True)
    ]
    return np.concatenate(parts).astype(np.float64)


def _reference_kl(batch: Batch, old: Float32Array | None, algorithm: AlgorithmConfig) -> Float64Array | None:
    """Return the distance of old and reference policy, packed, where something needs it."""
    if old is None or algorithm.kl.coef == 0:
        return None
    reference = torch.from_numpy(batch.gather("reference_logprobs"))
    estimate = kl.estimate(torch.from_numpy(old), reference, algorithm.kl.estimator)
    return estimate.numpy().astype(np.float64)
