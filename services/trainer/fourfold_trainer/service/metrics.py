"""Computes the metrics of a training step, as sums over all ranks divided by counts over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fourfold import metrics as m
from fourfold.arrays import Float64Array
from fourfold.config import Config
from fourfold_trainer.engine import RATIO_SQUARE_SUM, RATIO_SUM, SAMPLE_COUNT, SCORE_SQUARES, UNIT_COUNT
from fourfold_trainer.step.lr_schedule import learning_rate
from fourfold_trainer.step.step_result import StepResult

# Terms of an update's loss; their metrics are means over the updates.
_UPDATE_MEANS: Final = (m.KL_LOSS, m.ROUTER_LOSS, m.PAIR_NLL)
# Sums of a step that are not divided by its tokens or units. All others are, whatever names a loss gives its metrics.
_OTHER_SUMS: Final = {
    *_UPDATE_MEANS,
    m.REJECTED_SAMPLES,
    SAMPLE_COUNT,
    UNIT_COUNT,
    SCORE_SQUARES,
    m.MISMATCH_NONFINITE,
    m.MISMATCH_PROBABILITY,
    m.MISMATCH_KL,
    m.MISMATCH_KL_K1,
    RATIO_SUM,
    RATIO_SQUARE_SUM,
}
# Metrics that are constants where no engine samples: there is no older policy, no score and no turn.
_OF_SAMPLING: Final = {
    m.APPROX_KL, m.APPROX_KL_K1, m.RATIO_MEAN, m.RATIO_MIN, m.RATIO_MAX, m.MISMATCH_COVERED, m.SCORE_MEAN,
    m.REWARD_PENALTY, m.ADVANTAGE_MEAN, m.ADVANTAGE_STD, m.ADVANTAGE_ABSMAX, m.TRAINED_SEGMENTS, m.TRAINED_TURNS,
}  # fmt: skip
_SMALL: Final = 1e-5


def summarise(result: StepResult, config: Config) -> dict[str, float]:
    """Return the metrics of a step, except those that the coordinator computes without the model."""
    found = _policy(result) | _mismatch(result) | _coverage(result, config)
    if config.needs_engines:
        found |= _advantages(result)
    distance = result.targets.kl
    free = int(result.batch.free_lengths.sum())
    if distance is not None and free and (config.algorithm.kl.placement == "reward" or config.algorithm.distills):
        name = m.TEACHER_KL if config.algorithm.distills else m.REWARD_KL
        found[name] = math.fsum(float(part.sum()) for part in distance) / free
    found[m.LEARNING_RATE] = learning_rate(config.trainer, result.step, config.steps)
    if config.algorithm.kl.coef:
        found[m.KL_COEF] = result.kl_coef
    if config.algorithm.needs_critic:
        found[m.CRITIC_LEARNING_RATE] = learning_rate(config.critic, result.step, config.steps)
        found |= _critic(result)
    found |= result.measured
    return found if config.needs_engines else {name: v for name, v in found.items() if name not in _OF_SAMPLING}


def _advantages(result: StepResult) -> dict[str, float]:
    found = {
        m.TRAINED_SEGMENTS: len(result.batch.samples) / (len(result.batch.bounds) - 1),
        m.TRAINED_TURNS: float(result.batch.turn_counts.mean()),
    }
    if not result.targets.advantages:  # the scores are the labels of whole answers
        return found
    scores = np.array(result.batch.values("score"), np.float64)
    found[m.SCORE_MEAN] = float(scores.mean())
    found[m.REWARD_PENALTY] = float((result.outcomes - scores).mean())
    # Sample by sample, because all advantages together would take as much memory as the samples.
    count = int(result.batch.loss_lengths.sum())
    if count:
        mean = math.fsum(part.sum() for part in _selected(result, result.targets.advantages)) / count
        squares = math.fsum(np.square(part - mean).sum() for part in _selected(result, result.targets.advantages))
        found[m.ADVANTAGE_MEAN] = mean
        found[m.ADVANTAGE_STD] = math.sqrt(squares / count)
        found[m.ADVANTAGE_ABSMAX] = max(
            float(np.abs(part).max()) for part in _selected(result, result.targets.advantages) if len(part)
        )
    return found


def _selected(result: StepResult, parts: Sequence[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    """Yield the numbers of each sample's loss tokens."""
    return (part[result.batch.selected(index)] for index, part in enumerate(parts))


def _policy(result: StepResult) -> dict[str, float]:
    sums, count = result.policy, float(max(result.policy.token_count, 1))
    found = {
        m.UPDATES: float(result.policy_updates),
        m.TRAINED_TOKENS: float(sums.token_count),
        m.TRAINED_SAMPLES: float(len(result.trained)),
    }
    if not result.policy_norms:
        return found
    if result.logprob_noise is not None:
        found[m.LOGPROB_NOISE] = result.logprob_noise
    if result.later_noise is not None:
        found[m.LATER_NOISE], found[m.LATER_SAMPLE_NOISE] = result.later_noise.token, result.later_noise.sample
    found[m.GRAD_NORM] = _norm(result.policy_norms)
    found[m.POLICY_LOSS] = sums.loss / len(result.policy_norms)
    found[m.NONFINITE_LOSS] = float(result.nonfinite_losses)
    found[m.PADDING_FRACTION] = 1 - result.real_tokens / result.forwarded_tokens
    found[m.DUMMY_FRACTION] = result.dummy_count / result.micro_batch_count
    found |= {name: sums.sums[name] / len(result.policy_norms) for name in _UPDATE_MEANS if name in sums.sums}
    if sums.expert_counts:
        loads = np.array(sums.expert_counts)
        found[m.ROUTER_VIOLATION] = float((loads.max(1) / loads.mean(1)).max() - 1)
    if SAMPLE_COUNT in sums.sums:
        found[m.REJECTED_SAMPLES] = sums.sums[m.REJECTED_SAMPLES] / max(sums.sums[SAMPLE_COUNT], 1)
    count = sums.sums.get(UNIT_COUNT) or count
    found |= {name: total / count for name, total in sums.sums.items() if name not in _OTHER_SUMS}
    if SCORE_SQUARES in sums.sums:
        found[m.SCORE_STD] = math.sqrt(max(sums.sums[SCORE_SQUARES] / count - found[m.SCORE_MEAN] ** 2, 0.0))
    return found | sums.lowest | sums.highest


def _coverage(result: StepResult, config: Config) -> dict[str, float]:
    """Return the shares of the batch's tokens that the metrics of tokens cover, and the entropy that covers all."""
    batch, free = result.batch, int(result.batch.free_lengths.sum())
    if not free:
        return {}
    in_updates = int(batch.loss_lengths[np.isin(batch.trajectory_of, list(result.trained))].sum()) / free
    found = {
        m.COVERED: in_updates,
        m.MISMATCH_COVERED: len(result.policy.mismatches) / free,
    }
    entropy = result.targets.outputs.entropy
    if entropy is not None:
        return found | {m.ENTROPY: entropy, m.ENTROPY_COVERED: 1.0}
    return found | {m.ENTROPY_COVERED: in_updates} if config.algorithm.needs_entropies else found


def _mismatch(result: StepResult) -> dict[str, float]:
    """Return the logprob mismatch between trainer and engine, over tokens with a finite engine log-probability."""
    sums, mismatches = result.policy.sums, result.policy.mismatches
    found = {m.MISMATCH_NONFINITE: sums[m.MISMATCH_NONFINITE]} if m.MISMATCH_NONFINITE in sums else {}
    count = len(mismatches)
    if not count:
        return found
    ratio, square = sums[RATIO_SUM], sums[RATIO_SQUARE_SUM]
    return found | {
        m.MISMATCH_MEAN: float(mismatches.mean(dtype=np.float64)),
        m.MISMATCH_MAX: float(mismatches.max()),
        m.MISMATCH_P99: float(np.quantile(mismatches, 0.99)),
        m.MISMATCH_PROBABILITY: sums[m.MISMATCH_PROBABILITY] / count,
        m.MISMATCH_KL: sums[m.MISMATCH_KL] / count,
        m.MISMATCH_KL_K1: sums[m.MISMATCH_KL_K1] / count,
        m.MISMATCH_CHI2: square / count - 1,
        m.EFFECTIVE_SAMPLE_SIZE: ratio**2 / (count * square),
    }


def _critic(result: StepResult) -> dict[str, float]:
    targets = result.targets
    assert targets.returns is not None and targets.outputs.values is not None, "an algorithm with a critic has both"
    if not result.batch.loss_lengths.any() or not result.critic_norms:
        return {}
    returns = np.concatenate([*_selected(result, targets.returns)])
    values = np.concatenate([*_selected(result, targets.outputs.values)])
    return {
        m.CRITIC_GRAD_NORM: _norm(result.critic_norms),
        m.VALUE_LOSS: result.critic.loss / len(result.critic_norms),
        m.VALUE_CLIP_FRACTION: result.critic.sums.get(m.VALUE_CLIP_FRACTION, 0.0) / max(result.critic.token_count, 1),
        m.RETURN_MEAN: float(returns.mean()),
        m.EXPLAINED_VARIANCE: explained_variance(values.astype(np.float64), returns),
    }


def explained_variance(values: Float64Array, returns: Float64Array) -> float:
    """Return 1 - Var(G - V) / (Var(G) + 1e-5). At 0 or less the values predict no better than their mean."""
    return float(1 - (returns - values).var() / (returns.var() + _SMALL))


def _norm(norms: Sequence[float]) -> float:
    """Return the mean of the finite norms; NaN if none is finite."""
    finite = [norm for norm in norms if math.isfinite(norm)]
    return float(np.mean(finite)) if finite else math.nan
