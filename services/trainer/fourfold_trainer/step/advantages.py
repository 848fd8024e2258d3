"""Turns scores into advantages: once per step, over the whole batch, in float64, without a model.

    shape_rewards        scores -> outcomes: normalisation and length penalties                        [B]
    compute_advantages   outcomes and the KL penalty -> advantages and returns of every action token   [k]
                         compare -> rewards of tokens -> spread -> whiten

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
        outputs: old log-probabilities are needed for a KL term in the reward and for `reads_reference`, the others by
            some estimators.
        kl_coef: of this step.
    """
    algorithm = config.algorithm
    distances = _reference_kl(batch, outputs.old_logprobs, algorithm)
    penalties = distances if algorithm.kl.placement == "reward" or algorithm.distills else None
    turns = _compare_turns(batch, outcomes, algorithm) if algorithm.advantage.compares_turns else None
    if algorithm.distills:
        kl_coef = 1.0  # the estimator has its own coefficient
    if turns is None and not algorithm.distills:
        parts = _compare(batch, outcomes, penalties, algorithm, kl_coef=kl_coef)
    else:
        parts = _RewardParts(scores=np.zeros_like(outcomes), token_rewards=False, penalties=penalties)
    spread, returns = _spread(batch, parts, turns, outputs.values, algorithm, kl_coef=kl_coef)
    compared = spread if outputs.energies is None else _compare_tokens(batch, spread, outputs.energies, algorithm)
    advantages = compared if algorithm.whiten == "off" else _whiten(batch, compared, algorithm)
    return TokenTargets(advantages=advantages, returns=returns or None, outputs=outputs, kl=distances)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _RewardParts:
    """What the reward of every token is made of; see `rewards.token_rewards`."""

    scores: Float64Array  # of trajectories, [B]
    token_rewards: bool  # whether the scorer's rewards of single tokens are a part
    penalties: Sequence[Float64Array] | None  # KL of each sample's action tokens; None: not a part


def _compare(
    batch: TrainBatch,
    outcomes: Float64Array,
    penalties: Sequence[Float64Array] | None,
    algorithm: AlgorithmConfig,
    *,
    kl_coef: float,
) -> _RewardParts:
    """Compare trajectories. Token rewards and penalties whose sums are compared are no parts of the result."""
    advantage = algorithm.advantage
    has_token_rewards = bool(batch.samples.present["token_rewards"].any())
    compares_token_rewards = has_token_rewards and algorithm.compares_samples and not advantage.compares_tokens
    reward_sums = _sum_token_rewards(batch) if compares_token_rewards else np.zeros_like(outcomes)
    if penalties is not None and advantage.compares_kl:
        sums = reward_sums - kl_coef * batch.total(np.array([part.sum() for part in penalties], np.float64))
    else:
        sums = reward_sums
    terms = weights = None
    if advantage.compares_terms:
        terms, weights = _terms(batch, outcomes, sums)
    greedy = np.array(batch.values("baseline_score"), np.float64) if advantage.needs_greedy_sample else None
    relative = advantage.compare(
        ScoredSamples(
            scores=outcomes + sums,
            groups=batch.values("group_id"),
            lengths=batch.trajectory_lengths,
            greedy_scores=greedy,
            terms=terms,
            weights=weights,
        )
    )
    return _RewardParts(
        scores=_clipped(relative, algorithm),
        token_rewards=has_token_rewards and not compares_token_rewards,
        penalties=None if advantage.compares_kl else penalties,
    )


def _pack_rewards(
    batch: TrainBatch,
    parts: _RewardParts,
    trajectories: range,
    members: range,
    *,
    values: Sequence[Float32Array] | None = None,
    kl_coef: float = 0.0,
) -> PackedRewards:
    """Return the rewards of some trajectories, whose samples are `members`."""
    lengths, chunk = batch.trajectory_lengths[trajectories], slice(members.start, members.stop)
    return PackedRewards(
        rewards=rewards.token_rewards(
            parts.scores[trajectories],
            lengths,
            stream=_token_rewards(batch, members) if parts.token_rewards else None,
            kl=np.concatenate(parts.penalties[chunk]) if parts.penalties is not None else None,
            kl_coef=kl_coef,
        ),
        values=None if values is None else np.concatenate(values[chunk]).astype(np.float64),
        lengths=lengths,
        gaps=batch.gaps(members),
    )


def _spread(
    batch: TrainBatch,
    parts: _RewardParts,
    turns: Float64Array | None,
    values: Sequence[Float32Array] | None,
    algorithm: AlgorithmConfig,
    *,
    kl_coef: float,
) -> tuple[list[Float64Array], list[Float64Array]]:
    """Return the advantages of each sample's action tokens, and their returns; no returns without a critic.

    `turns`: the advantage of each turn, [u], if turns are compared.
    """
    advantages, returns, first_turn = list[Float64Array](), list[Float64Array](), 0
    for trajectories, members in batch.chunks():
        packed = _pack_rewards(batch, parts, trajectories, members, values=values, kl_coef=kl_coef)
        advantage, target = algorithm.advantage.spread(packed)
        if turns is not None:
            next_turn = first_turn + len(packed.turn_ends())
            advantage = advantage + packed.repeat_turns(turns[first_turn:next_turn])
            first_turn = next_turn
        advantages += unpack(advantage, batch.lengths[members])
        returns += unpack(target, batch.lengths[members]) if target is not None else []
    return advantages, returns


def _whiten(batch: TrainBatch, advantages: Sequence[Float64Array], algorithm: AlgorithmConfig) -> list[Float64Array]:
    selected = np.concatenate([batch.selected(i) for i in range(len(batch.samples))])
    return unpack(whiten(np.concatenate(advantages), selected, scale=algorithm.whiten == "full"), batch.lengths)


def _terms(batch: TrainBatch, outcomes: Float64Array, sums: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Return the terms of each trajectory's score, NaN where there is none, and their weights, both [B, K].

    A score without terms counts as one term; `sums`, those that `_compare` adds, are one more. Both weigh 1.
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
    if sums.any():
        terms, weights = np.column_stack([terms, sums]), np.column_stack([weights, np.ones(len(sums))])
    return terms, weights


def _compare_turns(batch: TrainBatch, outcomes: Float64Array, algorithm: AlgorithmConfig) -> Float64Array:
    """Return the advantage of each turn of all trajectories, [u]."""
    parts = _RewardParts(scores=outcomes, token_rewards=True, penalties=None)
    sums, counts = list[Float64Array](), list[Int64Array]()
    for trajectories, members in batch.chunks():
        packed = _pack_rewards(batch, parts, trajectories, members)
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


def _sum_token_rewards(batch: TrainBatch) -> Float64Array:
    """Return the sum of the rewards of each trajectory's tokens, [B]."""
    sums = [_token_rewards(batch, [i]).sum() for i in range(len(batch.samples))]
    return batch.total(np.array(sums, np.float64))


def _reference_kl(
    batch: TrainBatch, old: Sequence[Float32Array] | None, algorithm: AlgorithmConfig
) -> list[Float64Array] | None:
    """Return the distance of the old policy to the reference for each sample's action tokens, where something needs it.

    It is 0 for tokens that a grammar forced: the policy did not choose them, so that its log-probability estimates no
    distance there. A forced token that is less likely than under the reference would even reward the tokens before it.
    """
    if old is None or not (algorithm.kl.coef or algorithm.distills):
        return None
    term = algorithm.kl
    estimator: kl.Kind = "k1" if algorithm.distills else term.estimator
    distances = list[Float64Array]()
    for _, members in batch.chunks():
        current = torch.from_numpy(np.concatenate(old[members.start : members.stop]))
        reference = torch.from_numpy(batch.pack("reference_logprobs", members))
        found = kl.estimate(current, reference, estimator, k3_max=term.k3_max)
        estimate = found.numpy().astype(np.float64)
        free = np.concatenate([batch.free(i) for i in members])
        distances += unpack(np.where(free, estimate, 0.0), batch.lengths[members])
    return distances
