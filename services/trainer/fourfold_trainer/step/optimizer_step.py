"""Runs one optimizer step on one rank: forward, loss, backward for each micro-batch, then `optimizer.step()`.

Every rank runs these functions at the same time, each on its share of the samples. They minimise

    policy   sum over tokens of  c * (w * loss(p, o, A) + kl_coef * kl(p, f) - entropy_coef * H - sft_coef * A p)
             + sum over micro-batches of  router_coef * share * router loss
    critic   sum over tokens of  c * value_loss(V, G)
    units    see unit_objective.py, for a loss of whole answers

    p current, o old, u behavior, f reference log-probability; A advantage; V value, G return; H entropy
    c weight of a token, from the lengths of all samples (algorithm/aggregation.py)
    w weight that corrects the mismatch of o and u (algorithm/corrections.py)
    share: fraction of the step's tokens that are in the micro-batch

c is known before the first forward pass, so the gradient does not depend on how the step is split. The routers' loss is
a product of two means over the tokens of a micro-batch and does depend on it a little; its scale does not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fourfold import metrics
from fourfold.algorithm import corrections, kl
from fourfold.algorithm.losses.base import LossInputs, PolicyLoss, log_likelihood_loss
from fourfold.algorithm.losses.value import value_loss
from fourfold.config.algorithm import AlgorithmConfig, KlConfig
from fourfold.config.trainer import CriticConfig
from fourfold.nn.sequence import to_device
from fourfold_trainer.batches import Batches, PolicyBatch, UnitBatch, UpdateBatch, ValueBatch
from fourfold_trainer.engine import UpdateSettings, UpdateSums
from fourfold_trainer.step.metric_accumulator import MetricAccumulator, policy_distances
from fourfold_trainer.step.unit_objective import unit_objective
from fourfold_trainer.trained_model import Critic, Policy


def compute_gradient(
    policy: Policy,
    batches: Batches[UpdateBatch],
    settings: UpdateSettings,
    algorithm: AlgorithmConfig,
    *,
    rank_count: int,
) -> MetricAccumulator:
    """Run this rank's passes of one optimizer step of the policy; return their metrics. The gradient is then complete.

    All ranks have as many micro-batches, at least one.
    """
    accumulator = MetricAccumulator()
    stream = iter(batches)
    upcoming = next(stream, None)
    while (batch := upcoming) is not None:
        share = 0.0 if batch.is_dummy or not settings.token_count else batch.tokens.token_count / settings.token_count
        if policy.routers is not None:
            policy.routers.weight = settings.router_coef * share * rank_count
            policy.routers.token_count = batch.tokens.token_count
        logprobs, entropy = policy.logprobs(batch.tokens, entropy=algorithm.needs_entropies)
        if policy.routers is not None:
            routed = policy.routers.routed()
            accumulator.add_routing(routed.loss, routed.counts, share)
        if isinstance(batch, UnitBatch):
            loss = unit_objective(logprobs, batch, algorithm, settings, accumulator)
        else:
            loss = _policy_objective(logprobs, entropy, batch, algorithm, settings, accumulator)
        # Made while the device computes: the backward pass waits for it, and 73,728 tokens take 8 ms to pack.
        upcoming = next(stream, None)
        last = upcoming is None
        if last and algorithm.correction.kind != "none" and not policy.any_rank(accumulator.any_accepted()):
            # No token is left to learn from. Every ZeRO stage skips a step whose gradient is not finite.
            accumulator.all_rejected = True
            loss = loss + math.nan * logprobs.sum()
        # The gradient is averaged over the ranks, but c is computed over the whole step.
        policy.backward(loss * rank_count, last=last)
    if policy.routers is not None:
        policy.routers.weight = 0.0  # ForwardBackward adds no router loss to the caller's
    return accumulator


def update_policy(
    policy: Policy,
    batches: Batches[UpdateBatch],
    settings: UpdateSettings,
    algorithm: AlgorithmConfig,
    *,
    rank_count: int,
) -> UpdateSums:
    """Run this rank's part of one optimizer step of the policy; the arguments are those of `compute_gradient`."""
    accumulator = compute_gradient(policy, batches, settings, algorithm, rank_count=rank_count)
    return accumulator.sums(grad_norm=policy.optimizer_step(settings.learning_rate))


def _policy_objective(
    logprobs: Tensor,
    entropy: Tensor | None,
    batch: PolicyBatch,
    algorithm: AlgorithmConfig,
    settings: UpdateSettings,
    accumulator: MetricAccumulator,
) -> Tensor:
    """Return a micro-batch's part of the step's loss, a scalar, and add its metrics to the accumulator."""
    logprobs, top = (logprobs, None) if logprobs.dim() == 1 else (logprobs[:, 0], logprobs[:, 1:])  # a teacher's
    device, current = logprobs.device, logprobs.detach()
    weights = to_device(batch.weights, device)
    # In a step's only update the policy has not moved: its log-probabilities are the old ones.
    old = to_device(batch.old_logprobs, device) if len(batch.old_logprobs) else current
    behavior = to_device(batch.behavior_logprobs, device) if len(batch.behavior_logprobs) else old * math.nan
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=old,
        behavior_logprobs=behavior,
        advantages=to_device(batch.advantages, device),
        segments=to_device(batch.trajectories, device, torch.int64),
        segment_count=int(batch.trajectories.max()) + 1,
        top_logprobs=top,
        teacher_logprobs=None if top is None else to_device(batch.teacher_logprobs, device),
    )
    assert isinstance(algorithm.loss, PolicyLoss), "a loss of whole answers has a UnitBatch"
    token_loss = algorithm.loss.compute(inputs)
    losses, means = token_loss.loss, dict(token_loss.means)
    real = accepted = weights > 0
    with_kl = len(batch.reference_logprobs) > 0
    asked = algorithm.correction
    if asked.kind != "none":
        correction = corrections.correct(inputs, kind=asked.kind, low=asked.low, high=asked.high)
        losses = torch.where(correction.rejected, 0.0, correction.weights * losses)
        if not with_kl and not algorithm.entropy_coef:  # those terms reject no token
            accepted = real & ~correction.rejected
        means |= accumulator.add_correction(correction, inputs.segments, inputs.segment_count, real=real)
    loss = policy_loss = _weighted_sum(losses, weights)
    if with_kl:
        reference = to_device(batch.reference_logprobs, device)
        kl_loss = _weighted_sum(reference_kl(logprobs, old, reference, algorithm.kl), weights)
        loss = loss + settings.kl_coef * kl_loss
        accumulator.add_sum(metrics.KL_LOSS, kl_loss)
        means[metrics.REFERENCE_KL] = kl.k3(reference - old)
        means[metrics.KL_CLAMPED] = kl.is_clamped(
            current, reference, algorithm.kl.estimator, k3_max=algorithm.kl.k3_max
        )
    if algorithm.sft_coef:
        loss = loss + algorithm.sft_coef * _weighted_sum(log_likelihood_loss(logprobs, inputs.advantages), weights)
    if algorithm.entropy_coef and entropy is not None:
        loss = loss - algorithm.entropy_coef * _weighted_sum(entropy, weights)

    if entropy is not None:
        means[metrics.ENTROPY] = entropy.detach()
    means |= policy_distances(current, old)
    accumulator.add_loss(policy_loss.detach(), real=real, means=means)
    accumulator.add_ratios(current - old, real=real, any_accepted=accepted.any())
    if settings.first_epoch and len(batch.behavior_logprobs):  # the mismatch is the same in all epochs
        accumulator.add_mismatch(old, inputs.behavior_logprobs, real=real)
    return loss


def reference_kl(logprobs: Tensor, old: Tensor, reference: Tensor, config: KlConfig) -> Tensor:
    """Return the KL term of every token, [k]."""
    if config.importance_weighted:
        return kl.importance_weighted(logprobs, old, reference, k3_max=config.k3_max)
    return kl.estimate(logprobs, reference, config.estimator, k3_max=config.k3_max)


def update_critic(
    critic: Critic, batches: Batches[ValueBatch], settings: UpdateSettings, config: CriticConfig, *, rank_count: int
) -> UpdateSums:
    """Run this rank's part of one optimizer step of the critic."""
    accumulator = MetricAccumulator()
    for index, batch in enumerate(batches):
        values = critic.values(batch.tokens)
        old_values, returns, weights = (
            to_device(array, values.device) for array in (batch.old_values, batch.returns, batch.weights)
        )
        token_loss = value_loss(values, old_values, returns, clip=config.value_clip)
        loss = _weighted_sum(token_loss.loss, weights)
        accumulator.add_loss(loss.detach(), real=weights > 0, means=token_loss.means)
        critic.backward(loss * rank_count, last=index == len(batches) - 1)
    return accumulator.sums(grad_norm=critic.optimizer_step(settings.learning_rate))


def _weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of weights * values over the tokens that count; an exact 0 with a gradient when none does."""
    return (weights * torch.where(weights > 0, values, 0.0)).sum()
