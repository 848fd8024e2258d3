"""Turns scores into advantages: once per step, over the whole batch, in float64, without a model.

    shape_rewards        scores -> outcomes: normalisation and length penalties                        [B]
    compute_advantages   outcomes and the KL penalty -> advantages and returns of every action token   [k]

    B   samples of the step
    k   their action tokens, packed: all samples one after another

The formulas are in fourfold/algorithm/.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from fourfold.algorithm import kl, rewards
from fourfold.algorithm.advantages import ScoredSamples
from fourfold.algorithm.packed import PackedRewards, whiten
from fourfold.algorithm.state import AlgorithmState
from fourfold.arrays import Float32Array, Float64Array
from fourfold.config import AlgorithmConfig, Config
from fourfold_trainer.step.batch import PackedBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenTargets:
    """Training targets of every action token, and the numbers that they were computed from; packed."""

    advantages: Float64Array  # [k]
    returns: Float64Array | None  # [k], with a critic
    values: Float32Array | None  # [k], with a critic
    old_logprobs: Float32Array | None  # [k], where they were computed
    kl: Float64Array | None  # [k], estimated distance of the old policy to the reference, where it was needed


def shape_rewards(batch: PackedBatch, config: Config, state: AlgorithmState) -> tuple[Float64Array, AlgorithmState]:
    """Return each sample's score after normalisation and length penalties, float64 [B], and the next state."""
    shaping = config.algorithm.shaping
    scores: Float64Array = np.array([sample.score for sample in batch.samples], np.float64)
    if shaping.normalize:
        state = replace(state, scores=state.scores.updated(scores))
        scores = state.scores.normalise(scores)
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
    return scores, state


def compute_advantages(
    batch: PackedBatch,
    outcomes: Float64Array,
    config: Config,
    *,
    old: Float32Array | None,
    values: Float32Array | None,
    kl_coef: float,
) -> TokenTargets:
    """Turn outcomes into the advantage of every token, over the whole batch.

    Args:
        outcomes: float64 [B], of `shape_rewards`.
        old: [k] old log-probabilities; needed for a KL term in the reward.
        values: [k] of the critic, where the estimator needs one.
        kl_coef: of this step.
    """
    algorithm = config.algorithm
    stream = _token_rewards(batch)
    if stream is not None and algorithm.compares_samples:  # whole samples are compared
        outcomes = outcomes + np.array([part.sum() for part in batch.unpack(stream)])
        stream = None
    relative = algorithm.advantage.compare(
        ScoredSamples(
            scores=outcomes,
            groups=[sample.group_id for sample in batch.samples],
            lengths=batch.lengths,
            greedy_scores=np.array([sample.baseline_score for sample in batch.samples], np.float64)
            if algorithm.advantage.needs_greedy_sample
            else None,
        )
    )
    if algorithm.shaping.clip:
        relative = relative.clip(-algorithm.shaping.clip, algorithm.shaping.clip)
    distance = _reference_kl(batch, old, algorithm)
    in_reward = distance if algorithm.kl.placement == "reward" else None
    advantages, returns = algorithm.advantage.spread(
        PackedRewards(
            rewards=rewards.token_rewards(relative, batch.lengths, stream=stream, kl=in_reward, kl_coef=kl_coef),
            values=None if values is None else values.astype(np.float64),
            lengths=batch.lengths,
            gaps=batch.gaps,
        )
    )
    if algorithm.whiten != "off":
        advantages = whiten(advantages, batch.selected, scale=algorithm.whiten == "full")
    return TokenTargets(advantages=advantages, returns=returns, values=values, old_logprobs=old, kl=distance)


def next_kl_coef(batch: PackedBatch, distance: Float64Array | None, coef: float, config: Config) -> float | None:
    """Return the KL coefficient of the next step, after `coef`; None when it never moves.

    `distance`, [k], is that of the old policy to the reference.
    """
    settings = config.algorithm.kl
    if not settings.target:
        return None
    means = [part.mean() for part in batch.unpack(distance) if len(part)] if distance is not None else []
    if not means or not np.isfinite(means).all():  # a coefficient that is not a number would stay so for good
        return coef
    return kl.adapted_coef(
        coef, float(np.mean(means)), target=settings.target, horizon=settings.horizon, sample_count=len(batch.samples)
    )


def _token_rewards(batch: PackedBatch) -> Float64Array | None:
    """Return the scorer's rewards of single tokens, packed, or None when no sample has any."""
    if not any(len(s.token_rewards) for s in batch.samples):
        return None
    parts = [
        s.token_rewards[p] if len(s.token_rewards) else np.zeros(len(p))
        for s, p in zip(batch.samples, batch.positions, strict=True)
    ]
    return np.concatenate(parts).astype(np.float64)


def _reference_kl(batch: PackedBatch, old: Float32Array | None, algorithm: AlgorithmConfig) -> Float64Array | None:
    """Return the distance of the old policy to the reference, packed, where something needs it."""
    if old is None or algorithm.kl.coef == 0:
        return None
    reference = torch.from_numpy(batch.pack("reference_logprobs"))
    estimate = kl.estimate(torch.from_numpy(old), reference, algorithm.kl.estimator)
    return estimate.numpy().astype(np.float64)
