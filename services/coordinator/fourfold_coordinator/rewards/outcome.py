"""Defines the result of scoring one sample with one scorer, and mixes the results of several scorers into a score.

    score = sum of weight * (score of the scorer), over the scorers of the sample

- A scorer with `gate` is asked first. If its score is below the gate, the other scorers are not asked, and only the
  scorers with a gate are in the sum.
- A scorer that abstains drops the sample, or, with abstain = "omit", is left out of the sum.
- A scorer without a result drops the sample. No path turns a missing score into a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from google.rpc import code_pb2

from fourfold.arrays import EMPTY_FLOATS, Float32Array
from fourfold.config.reward import RewardConfig
from fourfold.errors import FourfoldError, InvalidInput, Unavailable
from fourfold.reward.v1 import reward_service_pb2 as pb
from fourfold.rpc.codec import read_floats
from fourfold.sample import Sample, ScoreTerm
from fourfold.sample.sample import shortest

from ..state.samples import Trajectory

# Errors of a sample that are the service's fault. A time-out counts as the sample's fault: a function that hangs on a
# sample hangs on it again, and each try costs the whole time limit.
_SERVICE_ERRORS: Final = (code_pb2.UNAVAILABLE,)
_MAX_SCORER: Final = 200  # most characters of the names of all scorers of a sample
_NO_NUMBERS: Final[Mapping[str, float]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of scoring one sample with one scorer: a score, or the reason why there is none."""

    score: float | None = None
    scorer: str = ""  # name@version
    components: Mapping[str, float] = field(default_factory=lambda: _NO_NUMBERS)  # for the logs
    token_rewards: Float32Array | None = None  # [n], in addition to the score
    cost_usd: float = 0.0
    reason: str = ""
    abstained: bool = False
    error: FourfoldError | None = None


def to_outcome(score: pb.SampleScore, scorer: str, sample: Sample) -> Outcome:
    """Return the outcome that a service sent for segment 0 of a sample."""
    match score.WhichOneof("outcome"):
        case "score":
            rewards, fault = None, ""
            if score.token_rewards or score.turn_rewards:
                rewards, fault = _token_rewards(score, sample)
            if fault:
                error = InvalidInput(f"sample {sample.sample_id}: {scorer}: {fault}", reason="BAD_REWARDS")
                return Outcome(scorer=scorer, reason=error.reason, error=error, cost_usd=score.cost_usd)
            return Outcome(
                score=shortest(score.score),
                scorer=scorer,
                components=dict(score.components) if score.components else _NO_NUMBERS,
                token_rewards=rewards,
                cost_usd=score.cost_usd,
            )
        case "abstain_reason":
            return Outcome(scorer=scorer, reason=score.abstain_reason, abstained=True, cost_usd=score.cost_usd)
    reason = score.error.reason
    error_class = Unavailable if score.error.code in _SERVICE_ERRORS else InvalidInput
    text = f"sample {score.sample_id}: {score.error.message or reason}"
    failure = error_class(text, reason=reason)
    return Outcome(scorer=scorer, reason=reason, error=failure, cost_usd=score.cost_usd)


def _token_rewards(score: pb.SampleScore, sample: Sample) -> tuple[Float32Array | None, str]:
    """Return the rewards of tokens and turns, float32 [n], or an error text."""
    mask, rewards = sample.action_mask, np.zeros(len(sample.action_mask), np.float32)
    if score.token_rewards:
        if len(score.token_rewards) != 4 * len(mask):
            return None, f"token_rewards has {len(score.token_rewards)} bytes; {len(mask)} tokens need {4 * len(mask)}"
        rewards += read_floats(score.token_rewards)
        if not np.isfinite(rewards).all() or rewards[~mask].any():
            return None, "token_rewards must be finite, and 0 where action_mask is 0"
    if score.turn_rewards:
        ends = np.flatnonzero(mask & ~np.append(mask[1:], False))
        if len(score.turn_rewards) != len(ends):
            return None, f"turn_rewards has {len(score.turn_rewards)} numbers for {len(ends)} turns"
        rewards[ends] += np.array(score.turn_rewards, np.float32)
        if not np.isfinite(rewards).all():
            return None, "turn_rewards must be finite"
    return rewards, ""


def passes_gates(outcomes: Sequence[tuple[RewardConfig, Outcome]]) -> bool:
    """Return whether the scorers without a gate count, from the outcomes of those with a gate."""
    return all(
        outcome.score is not None and outcome.score >= table.gate
        for table, outcome in outcomes
        if table.gate is not None and not (outcome.abstained and table.abstain == "omit")
    )


def mix(trajectory: Trajectory, outcomes: Sequence[tuple[RewardConfig, Outcome]]) -> Trajectory:
    """Return a trajectory with its score and terms, or dropped with the reason.

    `outcomes` has the outcome of each scorer that was asked, with its table, in order.
    """
    counted = [(table, o) for table, o in outcomes if not (o.abstained and table.abstain == "omit")]
    for table, outcome in counted:
        if outcome.score is None:
            prefix = "" if len(outcomes) == 1 else table.drop_prefix
            return trajectory.with_drop_reason(f"{prefix}{outcome.reason}"[:63], abstained=outcome.abstained)
    if not counted:
        reason = outcomes[0][1].reason if outcomes else "NO_SCORER"
        return trajectory.with_drop_reason(reason, abstained=bool(outcomes))
    terms = tuple(
        ScoreTerm(name=table.name, scorer=o.scorer, score=o.score, weight=table.weight)
        for table, o in counted
        if o.score is not None
    )
    if len(terms) == 1 and terms[0].weight == 1:
        score, scorer = terms[0].score, terms[0].scorer
    else:
        score = shortest(math.fsum(term.weight * term.score for term in terms))
        scorer = " + ".join(term.scorer for term in terms)[:_MAX_SCORER]
    scored = trajectory.with_values(score=score, scorer=scorer, terms=terms)
    rewards = [(table.weight, o.token_rewards) for table, o in counted if o.token_rewards is not None]
    components = {
        f"{table.name}/{name}": value for table, o in counted if o.components for name, value in o.components.items()
    }
    return _with_token_rewards(replace(scored, components=components) if components else scored, rewards)


def _with_token_rewards(trajectory: Trajectory, rewards: Sequence[tuple[float, Float32Array]]) -> Trajectory:
    if not rewards:
        return trajectory
    sample = trajectory.sample
    total = sample.token_rewards.copy() if len(sample.token_rewards) else np.zeros(len(sample.token_ids), np.float32)
    for weight, values in rewards:
        total += np.float32(weight) * values
    rewarded = (replace(sample, token_rewards=total), *trajectory.segments[1:])
    return replace(trajectory, segments=rewarded, agent_rewards=sample.token_rewards)


def without_scores(trajectory: Trajectory) -> Trajectory:
    """Return a trajectory as it was before `mix`; a trajectory without terms is returned unchanged."""
    if not trajectory.sample.terms:
        return trajectory
    first, *others = trajectory.with_values(score=None, scorer="", terms=()).segments
    rewards = trajectory.agent_rewards
    if rewards is None:  # all rewards of a sample from the store are those of scorers, unless an agent sampled it
        rewards = first.token_rewards if trajectory.task is not None else EMPTY_FLOATS
    segments = (replace(first, token_rewards=rewards), *others)
    return replace(trajectory, segments=segments, components={}, agent_rewards=None)
