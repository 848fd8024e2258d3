"""Turns scores into advantages: once per step, over the whole batch, in float64, without a model.

    shape_rewards        scores -> outcomes: normalisation and length penalties                        [B]
    compute_advantages   outcomes and the KL penalty -> advantages and returns of every action token   [k]

    B   trajectories of the step, each of one or more samples
    k   their action tokens, packed: all samples one after another
    u   their turns

The formulas are in fourfold/algorithm/.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fourfold.algorithm import kl, rewards
from fourfold.algorithm.advantages.base import ScoredSamples
from fourfold.algorithm.comparison import ScoredTokens, ScoredTurns
from fourfold.algorithm.packed import PackedRewards, whiten
from fourfold.algorithm.state import AlgorithmState
from fourfold.arrays import Float32Array, Float64Array, Int64Array
from fourfold.config.algorithm import AlgorithmConfig
from fourfold.config.schema import Config
from fourfold.sample import ScoreTerm
from fourfold_trainer.step.batch import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelOutputs:
    """What passes before the updates computed: an array [n] of each sample's action tokens; None: not needed."""

    old_logprobs: Sequence[Float32Array] | None = None
    energies: Sequence[Float32Array] | None = None
    """Squared norm of the gradient of each old log-probability in the logits; NaN where a grammar forced the token."""
    values: Sequence[Float32Array] | None = None  # of the critic
    entropy: float | None = None  # nats: mean over all sampled tokens of the batch that no grammar forced


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenTargets:
    """Training targets of every action token, and the numbers that they were computed from: an array [n] per sample.

    An array of one number, as most algorithms give, takes the memory of that number.
    """

    advantages: Sequence[Float64Array]
    returns: Sequence[Float64Array] | None  # with a critic
    outputs: ModelOutputs
    kl: Sequence[Float64Array] | None  # estimated distance of the old policy to the reference, where it was needed


def shape_rewards(batch: TrainBatch, config: Config, state: AlgorithmState) -> tuple[Float64Array, AlgorithmState]:
    """Return each trajectory's score after normalisation and length penalties, float64 [B], and the next state."""
    shaping = config.algorithm.shaping
    scores: Float64Array = np.array(batch.values("score"), np.float64)
    if shaping.normalize:
        state = replace(state, scores=state.scores.updated(scores))
        scores = state.scores.normalise(scores)
    if shaping.overlong_buffer:
        longest = config.sampling.max_new_tokens
        scores = scores + rewards.overlong_penalty(
            batch.trajectory_lengths,
            max_tokens=longest,
            buffer_tokens=shaping.overlong_buffer * longest,
            factor=shaping.overlong_penalty,
        )
    if shaping.truncated is not None:
        scores = rewards.stop_properly(scores, batch.truncated, coef=shaping.truncated)
    return scores, state


def compute_advantages(
    batch: TrainBatch,
    outcomes: Float64Array,
    config: Config,
    outputs: ModelOutputs,
    *,
    kl_coef: float,
) -> TokenTargets:
    """Turn outcomes into the advantage of every token.

    Args:
        outcomes: float64 [B], of `shape_rewards`.
        outputs: old log-probabilities are needed for a KL term in the reward, the others by some estimators.
        kl_coef: of this step.
    """
    algorithm, lengths, compared_turns = config.algorithm, batch.trajectory_lengths, 0
    streams = bool(batch.samples.present["token_rewards"].any())
    relative, turns, sums = outcomes, np.empty(0, np.float64), np.zeros_like(outcomes)
    distances, in_reward = _reference_kl(batch, outputs.old_logprobs, algorithm), algorithm.kl.placement == "reward"
    if algorithm.advantage.compares_turns:
        turns, relative, streams = _compare_turns(batch, outcomes, algorithm), np.zeros_like(outcomes), False
    else:
        whole = algorithm.compares_samples and not algorithm.advantage.compares_tokens
        if streams and whole:  # trajectories are compared by their sums
            parts = [_token_rewards(batch, [i]).sum() for i in range(len(batch.samples))]
            sums, streams = batch.total(np.array(parts, np.float64)), False
        if distances is not None and in_reward and algorithm.advantage.compares_kl:
            penalties = np.array([part.sum() for part in distances], np.float64)
            sums, in_reward = sums - kl_coef * batch.total(penalties), False
        relative = _clipped(_compare(batch, outcomes, sums, algorithm), algorithm)
    advantages, returns = list[Float64Array](), list[Float64Array]()
    for trajectories, members in batch.chunks():
        counts, chunk = batch.lengths[members], slice(members.start, members.stop)
        packed = PackedRewards(
            rewards=rewards.token_rewards(
                relative[trajectories],
                lengths[trajectories],
                stream=_token_rewards(batch, members) if streams else None,
                kl=np.concatenate(distances[chunk]) if distances is not None and in_reward else None,
                kl_coef=kl_coef,
            ),
            values=None if outputs.values is None else np.concatenate(outputs.values[chunk]).astype(np.float64),
            lengths=lengths[trajectories],
            gaps=batch.gaps(members),
        )
        advantage, target = algorithm.advantage.spread(packed)
        if algorithm.advantage.compares_turns:
            following = compared_turns + len(packed.turn_ends())
            advantage = advantage + packed.repeat_turns(turns[compared_turns:following])
            compared_turns = following
        advantages += unpack(advantage, counts)
        returns += unpack(target, counts) if target is not None else []
    if outputs.energies is not None:
        advantages = _compare_tokens(batch, advantages, outputs.energies, algorithm)
    if algorithm.whiten != "off":
        selected = np.concatenate([batch.selected(i) for i in range(len(batch.samples))])
        white = whiten(np.concatenate(advantages), selected, scale=algorithm.whiten == "full")
        advantages = unpack(white, batch.lengths)
    return TokenTargets(advantages=advantages, returns=returns or None, outputs=outputs, kl=distances)


def _compare(
    batch: TrainBatch, outcomes: Float64Array, streams: Float64Array, algorithm: AlgorithmConfig
) -> Float64Array:
    """Return the score of each trajectory relative to others, [B]; `streams`: the sum of its token rewards, [B]."""
    terms = weights = None
    if algorithm.advantage.compares_terms:
        terms, weights = _terms(batch, outcomes, streams)
    return algorithm.advantage.compare(
        ScoredSamples(
            scores=outcomes + streams,
            groups=batch.values("group_id"),
            lengths=batch.trajectory_lengths,
            greedy_scores=np.array(batch.values("baseline_score"), np.float64)
            if algorithm.advantage.needs_greedy_sample
            else None,
            terms=terms,
            weights=weights,
        )
    )


def _terms(batch: TrainBatch, outcomes: Float64Array, streams: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Return the terms of each trajectory's score, NaN where there is none, and their weights, both [B, K].

    A score without terms counts as one term; the sum of token rewards, less a KL penalty, is one more. Both weigh 1.
    """
    columns: dict[str, int] = {}
    found: list[tuple[ScoreTerm, ...]] = batch.values("terms")
    for parts in found:
        for name in [term.name for term in parts] or [""]:  # no scorer has an empty name
            columns.setdefault(name, len(columns))
    shape = len(outcomes), len(columns)
    terms, weights = np.full(shape, np.nan, np.float64), np.zeros(shape, np.float64)
    for row, parts in enumerate(found):
        for term in parts:
            if term.weight:
                terms[row, columns[term.name]], weights[row, columns[term.name]] = term.score, term.weight
        if not parts:
            terms[row, columns[""]], weights[row, columns[""]] = outcomes[row], 1.0
    if streams.any():
        terms, weights = np.column_stack([terms, streams]), np.column_stack([weights, np.ones(len(streams))])
    return terms, weights


def _compare_turns(batch: TrainBatch, outcomes: Float64Array, algorithm: AlgorithmConfig) -> Float64Array:
    """Return the advantage of each turn of all trajectories, [u]."""
    lengths = batch.trajectory_lengths
    sums, counts = list[Float64Array](), list[Int64Array]()
    for trajectories, members in batch.chunks():
        stream = _token_rewards(batch, members)
        packed = PackedRewards(
            rewards=rewards.token_rewards(
                outcomes[trajectories], lengths[trajectories], stream=stream, kl=None, kl_coef=0
            ),
            values=None,
            lengths=lengths[trajectories],
            gaps=batch.gaps(members),
        )
        sums.append(packed.turn_sums())
        counts.append(packed.turn_counts())
    turns = ScoredTurns(
        rewards=np.concatenate(sums),
        counts=np.concatenate(counts),
        groups=batch.values("group_id"),
    )
    return _clipped(algorithm.advantage.compare_turns(turns), algorithm)


def _compare_tokens(
    batch: TrainBatch,
    returns: Sequence[Float64Array],
    energies: Sequence[Float32Array],
    algorithm: AlgorithmConfig,
) -> list[Float64Array]:
    """Return the advantages of each sample's action tokens, from their returns."""
    found = np.concatenate(energies).astype(np.float64)
    tokens = ScoredTokens(
        returns=np.concatenate(returns),
        energies=np.where(np.isfinite(found), found, 0.0),  # a token that a grammar forced has no gradient
        lengths=batch.trajectory_lengths,
        groups=batch.values("group_id"),
    )
    return unpack(algorithm.advantage.compare_tokens(tokens), batch.lengths)


def _clipped(relative: Float64Array, algorithm: AlgorithmConfig) -> Float64Array:
    bounds = algorithm.shaping.bounds
    return relative.clip(*bounds) if bounds else relative


def unpack(packed: Float64Array, lengths: Int64Array) -> list[Float64Array]:
    """Return a packed array sample by sample; an array of one number does not keep the packed one in memory."""
    return [_constant(part) for part in np.split(packed, np.cumsum(lengths)[:-1])]


def _constant(part: Float64Array) -> Float64Array:
    bits = part.view(np.int64)
    return np.broadcast_to(part[:1].copy(), part.shape) if len(part) and (bits == bits[0]).all() else part


def next_kl_coef(
    batch: TrainBatch, distance: Sequence[Float64Array] | None, coef: float, config: Config
) -> float | None:
    """Return the KL coefficient of the next step, after `coef`; None when it never moves.

    `distance` is that of the old policy to the reference, for the action tokens of each sample. Every trajectory weighs
    the same, by its mean over the tokens that no grammar forced.
    """
    settings = config.algorithm.kl
    if not settings.target:
        return None
    lengths = batch.total(batch.free_lengths)
    if distance is None or not lengths.any():
        return coef
    sums = batch.total(np.array([part.sum() for part in distance], np.float64))
    means = sums[lengths > 0] / lengths[lengths > 0]
    if not np.isfinite(means).all():  # a coefficient that is not a number would stay so for good
        return coef
    return kl.adapted_coef(
        coef, float(np.mean(means)), target=settings.target, horizon=settings.horizon, sample_count=len(lengths)
    )


def _token_rewards(batch: TrainBatch, members: Iterable[int]) -> Float64Array:
    """Return the scorer's rewards of single tokens, packed; 0 for a sample without any."""
    return batch.pack("token_rewards", members).astype(np.float64)


def _reference_kl(
    batch: TrainBatch, old: Sequence[Float32Array] | None, algorithm: AlgorithmConfig
) -> list[Float64Array] | None:
    """Return the distance of the old policy to the reference for each sample's action tokens, where something needs it.

    It is 0 for tokens that a grammar forced: the policy did not choose them, so that its log-probability estimates no
    distance there. A forced token that is less likely than under the reference would even reward the tokens before it.
    """
    if old is None or algorithm.kl.coef == 0:
        return None
    distances = list[Float64Array]()
    for _, members in batch.chunks():
        current = torch.from_numpy(np.concatenate(old[members.start : members.stop]))
        reference = torch.from_numpy(batch.pack("reference_logprobs", members))
        term = algorithm.kl
        found = kl.estimate(current, reference, term.estimator, k3_max=term.k3_max)
        estimate = found.numpy().astype(np.float64)
        free = np.concatenate([batch.free(i) for i in members])
        distances += unpack(np.where(free, estimate, 0.0), batch.lengths[members])
    return distances
