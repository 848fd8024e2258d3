"""One training step, top to bottom.

    rank 0       prepare     samples -> advantages, loss tokens N, what to train on
    every rank   train       micro-batches -> gradient -> optimizer -> sums over tokens
    rank 0       summarise   sums of all ranks -> metrics

The formulas are in algorithm/, the split into micro-batches in batching.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fourfold import metrics
from fourfold.config import AlgorithmConfig, Config, TrainerConfig
from fourfold.errors import InvalidInput
from fourfold.wire import Sample, check_unique
from fourfold_trainer.algorithm import kl as kl_estimates
from fourfold_trainer.algorithm import losses
from fourfold_trainer.algorithm.advantages import group_members, group_normalised
from fourfold_trainer.algorithm.kl import k3
from fourfold_trainer.algorithm.packed import Float64Array
from fourfold_trainer.batching import MicroBatch, padding_fraction
from fourfold_trainer.engine import Policy, UpdateSettings, UpdateSums

NO_ADVANTAGE: Final = "NO_ADVANTAGE"
NO_ACTION_TOKENS: Final = "NO_ACTION_TOKENS"
NOT_FINITE: Final = "NOT_FINITE"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """What a batch gives to learn."""

    advantages: Float64Array  # [B]
    token_count: int
    """N: loss tokens of all samples."""
    trained: list[int]
    """Samples that contribute to the gradient."""
    skipped_reason: str
    """Why there is nothing to learn; empty when there is."""


def check(samples: Sequence[Sample], algorithm: AlgorithmConfig, *, policy_version: int) -> None:
    """Refuse a batch that cannot be trained on.

    Raises:
        InvalidInput: names the sample, the value and the rule.
    """
    if not samples:
        raise InvalidInput("the batch has no experiences; send at least one")
    check_unique(sample.sample_id for sample in samples)
    for sample in samples:
        who = f"sample {sample.sample_id}"
        if sample.score is None:
            raise InvalidInput(f"{who} has no score; score it first, or leave it out of the batch")
        if sample.top_p < 1 or sample.top_k:
            raise InvalidInput(
                f"{who} was sampled with top_p = {sample.top_p:g}, top_k = {sample.top_k}; the engine's "
                f"log-probabilities are then renormalised and cannot be trained on: sample with temperature alone"
            )
        if algorithm.kl_coef > 0 and not len(sample.reference_logprobs):
            raise InvalidInput(f"{who} has no reference_logprobs; algorithm.kl_coef = {algorithm.kl_coef:g} needs them")
        newest = max((span.policy_version for span in sample.version_spans), default=-1)
        if newest > policy_version:
            raise InvalidInput(
                f"{who} was sampled by policy version {newest}; the trainer is at {policy_version} and has not "
                f"published that one: restore the right checkpoint, or raise the policy version"
            )


def prepare(samples: Sequence[Sample], algorithm: AlgorithmConfig) -> Plan:
    """Compute advantages over the whole batch, and choose what to forward."""
    scores = np.array([sample.score for sample in samples], np.float64)
    advantages = group_normalised(scores, [s.group_id for s in samples], epsilon=algorithm.advantage_epsilon)
    counts = [int(sample.loss_mask.sum()) for sample in samples]
    # Without a KL loss, a sample with advantage 0 has gradient 0: its tokens count in N, but need no pass.
    trained = [i for i, n in enumerate(counts) if n and (advantages[i] or algorithm.kl_coef > 0)]
    reason = "" if trained else NO_ADVANTAGE if any(counts) else NO_ACTION_TOKENS
    return Plan(advantages=advantages, token_count=sum(counts), trained=trained, skipped_reason=reason)


def train(policy: Policy, micro_batches: Sequence[MicroBatch], settings: UpdateSettings) -> UpdateSums:
    """Run one rank's part of the step; all ranks run as many micro-batches."""
    measured = []
    for index, batch in enumerate(micro_batches):
        logprobs = policy.logprobs(batch.tokens)
        if batch.dummy:
            loss = logprobs.sum() * 0.0
        else:
            loss, measures = _loss(logprobs, batch, settings)
            measured.append(measures)
        # The gradient is averaged over the ranks, but N counts the tokens of all of them.
        policy.backward(loss * settings.rank_count, last=index == len(micro_batches) - 1)
    grad_norm = policy.update(settings.learning_rate)
    return _add_up(measured, grad_norm)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Measures:
    """What the metrics need of one micro-batch. Tensors, read after the update: reading one waits for the device."""

    token_count: int
    sums: Tensor
    """float64 [6]: loss, approximate KL, clipped low, clipped high, reference KL, mismatch KL."""
    mismatches: Tensor
    """[k]: |old - behavior|, not finite where the behavior log-probability is not."""


def _loss(logprobs: Tensor, batch: MicroBatch, settings: UpdateSettings) -> tuple[Tensor, _Measures]:
    """Return this micro-batch's part of the step's loss, and what the metrics need of it."""
    device = logprobs.device
    advantages = torch.from_numpy(batch.advantages).to(device)
    old_logprobs = logprobs.detach()  # one update per batch: the policy has not moved since the step began
    policy = losses.ppo(logprobs, old_logprobs, advantages, clip_low=settings.clip_low, clip_high=settings.clip_high)
    policy_loss = loss = policy.loss.sum() / settings.token_count
    kl = torch.zeros_like(logprobs)
    if settings.kl_coef > 0:
        kl = kl_estimates.estimate(logprobs, torch.from_numpy(batch.reference_logprobs).to(device), "k3")
        loss = loss + settings.kl_coef * kl.sum() / settings.token_count
    with torch.no_grad():
        mismatch = old_logprobs - torch.from_numpy(batch.behavior_logprobs).to(device)
        mismatch_kl = torch.where(torch.isfinite(mismatch), k3(mismatch), 0.0)
        clipped = (policy.means[metrics.CLIP_FRACTION_LOW], policy.means[metrics.CLIP_FRACTION_HIGH])
        parts = (k3(logprobs - old_logprobs), *clipped, kl, mismatch_kl)
        sums = torch.stack([policy_loss.double(), *(part.double().sum() for part in parts)])
    return loss, _Measures(token_count=len(logprobs), sums=sums, mismatches=mismatch.abs())


def _add_up(measured: Sequence[_Measures], grad_norm: float) -> UpdateSums:
    if not measured:
        return UpdateSums(grad_norm=grad_norm)
    loss, approx_kl, low, high, reference, mismatch = torch.stack([m.sums for m in measured]).sum(0).tolist()
    mismatches = torch.cat([m.mismatches for m in measured]).cpu().numpy()
    return UpdateSums(
        loss=loss,
        token_count=sum(m.token_count for m in measured),
        approx_kl=approx_kl,
        clipped_low=int(low),
        clipped_high=int(high),
        reference_kl=reference,
        mismatch_kl=mismatch,
        mismatches=mismatches[np.isfinite(mismatches)],
        grad_norm=grad_norm,
    )


def learning_rate(config: TrainerConfig, step: int, step_count: int) -> float:
    """Return the learning rate of step 1, 2, ...: a linear warm-up, then the schedule; it is 0 after the last step."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    done = (step - 1 - config.warmup_steps) / max(step_count - config.warmup_steps, 1)
    left = 1 - min(done, 1.0)
    return config.learning_rate * (left if config.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2)


def summarise_batch(samples: Sequence[Sample], policy_version: int) -> dict[str, float]:
    """Return the metrics that need no forward pass."""
    scores = np.array([sample.score for sample in samples], np.float64)
    groups = [scores[members] for members in group_members([s.group_id for s in samples])]
    lags = [policy_version - s.oldest_version for s in samples if s.oldest_version >= 0] or [0]
    constant = [group.max() for group in groups if group.max() == group.min()]
    low, high = scores.min(), scores.max()
    return {
        metrics.REWARD_MEAN: float(scores.mean()),
        metrics.REWARD_STD: float(scores.std()),
        metrics.USEFUL_GROUPS: 1 - len(constant) / len(groups),
        metrics.GROUPS_ALL_MAX: sum(1 for value in constant if value == high) / len(groups),
        metrics.GROUPS_ALL_MIN: sum(1 for value in constant if value == low) / len(groups),
        metrics.RESPONSE_LENGTH: float(np.mean([sample.action_mask.sum() for sample in samples])),
        metrics.TRUNCATION_RATE: float(np.mean([sample.truncated for sample in samples])),
        metrics.POLICY_LAG_MEAN: float(np.mean(lags)),
        metrics.POLICY_LAG_MAX: float(max(lags)),
    }


def summarise_update(
    sums: UpdateSums, plan: Plan, samples: Sequence[Sample], shares: Sequence[Sequence[MicroBatch]], config: Config
) -> dict[str, float]:
    """Return the metrics of the update: global sums over global counts, never a mean of means."""
    count = max(sums.token_count, 1)
    result = {
        metrics.POLICY_LOSS: sums.loss,
        metrics.APPROX_KL: sums.approx_kl / count,
        metrics.CLIP_FRACTION_LOW: sums.clipped_low / count,
        metrics.CLIP_FRACTION_HIGH: sums.clipped_high / count,
        metrics.GRAD_NORM: sums.grad_norm,
        metrics.TRAINED_TOKENS: float(sums.token_count),
        metrics.TRAINED_SAMPLES: float(len(plan.trained)),
        metrics.PADDING_FRACTION: padding_fraction(shares, sum(len(samples[i].token_ids) for i in plan.trained)),
    }
    if config.algorithm.kl_coef > 0:
        result[metrics.REFERENCE_KL] = sums.reference_kl / count
    if len(sums.mismatches):
        result[metrics.MISMATCH_MEAN] = float(sums.mismatches.mean(dtype=np.float64))
        result[metrics.MISMATCH_MAX] = float(sums.mismatches.max())
        result[metrics.MISMATCH_P99] = float(np.quantile(sums.mismatches, 0.99))
        result[metrics.MISMATCH_KL] = sums.mismatch_kl / len(sums.mismatches)
    return result
