"""One optimizer step on one rank: micro-batches -> gradient -> optimizer -> sums over tokens. Or in parts.

    p current, o old, u behavior, f reference log-probability; A advantage; V value, G return; H entropy
    c weight of a token's loss; w weight for the distance of o to u

    policy      sum over tokens of   c * ( w * loss(p, o, A) + kl_coef * kl(p, f) - entropy_coef * H )
                + sum over micro-batches of   router_coef * share * router loss          share of the step's tokens
    critic      sum over tokens of   c * value_loss(V, G)
    parts       sum over tokens of   c * p                  c of the caller, of either sign

The weights c are known before the first pass (algorithm/aggregation.py), so that the gradient
does not depend on how the step is split; w is that of algorithm/corrections.py. The routers' loss
is a product of two means over the tokens of a micro-batch and does depend on the split: weighted by
shares of tokens, its scale does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold import metrics
from fourfold.arrays import Float32Array
from fourfold.config import AlgorithmConfig, CriticConfig
from fourfold.nn.sequence import to_device
from fourfold_trainer.algorithm import corrections, kl, losses
from fourfold_trainer.algorithm.losses import TokenLoss
from fourfold_trainer.batches import PolicyBatch, ValueBatch, WeightedBatch
from fourfold_trainer.engine import Critic, Policy, UpdateSettings, UpdateSums
from fourfold_trainer.step.metric_accumulator import Tally, distances
from fourfold_trainer.step.packing import dummy_tokens


def update_policy(
    policy: Policy,
    batches: Sequence[PolicyBatch],
    settings: UpdateSettings,
    algorithm: AlgorithmConfig,
    *,
    rank_count: int,
) -> UpdateSums:
    """Run one rank's part of an optimizer step of the policy; all ranks run as many micro-batches."""
    tally = Tally()
    for index, batch in enumerate(batches):
        share = 0.0 if batch.is_dummy or not settings.token_count else batch.tokens.token_count / settings.token_count
        if policy.routers is not None:
            policy.routers.weight = settings.router_coef * share * rank_count
            policy.routers.token_count = batch.tokens.token_count
        logprobs, entropy = policy.logprobs(batch.tokens, entropy=True)
        if policy.routers is not None:
            tally.routed(policy.routers.routed(), share)
        assert entropy is not None, "asked for"
        loss = _policy_objective(logprobs, entropy, _Columns.of(batch, logprobs), algorithm, settings, tally)
        last = index == len(batches) - 1
        if last and algorithm.correction.kind != "none" and not policy.any_rank(tally.any_accepted()):
            # Nothing is left to learn from. A gradient that is not finite is what every ZeRO stage drops a step for.
            tally.all_rejected = True
            loss = loss + math.nan * logprobs.sum()
        # The gradient is averaged over the ranks, but c is that of the whole step.
        policy.backward(loss * rank_count, last=last)
    if policy.routers is not None:
        policy.routers.weight = 0.0  # a loss of parts is the caller's alone
    return tally.sums(grad_norm=policy.update(settings.learning_rate))


def update_critic(
    critic: Critic, batches: Sequence[ValueBatch], settings: UpdateSettings, config: CriticConfig, *, rank_count: int
) -> UpdateSums:
    """Run one rank's part of an optimizer step of the critic."""
    tally = Tally()
    for index, batch in enumerate(batches):
        values = critic.values(batch.tokens)
        old, returns, weights = (
            to_device(part, values.device) for part in (batch.old_values, batch.returns, batch.weights)
        )
        term = losses.value(values, old, returns, clip=config.value_clip)
        loss = _weighted_sum(term.loss, weights)
        tally.add(loss=loss.detach(), real=weights > 0, means=term.means)
        critic.backward(loss * rank_count, last=index == len(batches) - 1)
    return tally.sums(grad_norm=critic.update(settings.learning_rate))


def forward_backward(policy: Policy, batches: Sequence[WeightedBatch], *, rank_count: int) -> list[Float32Array]:
    """Add one rank's part of a gradient to what waits for `use_gradient`; return the log-probabilities."""
    rows = []
    for batch in batches:
        logprobs, _ = policy.logprobs(batch.tokens)
        weights = to_device(batch.weights, logprobs.device)
        policy.backward((weights * logprobs).sum() * rank_count, last=False)
        rows.append(logprobs.detach())
    return [row.cpu().numpy() for row in rows]


def use_gradient(policy: Policy, *, learning_rate: float, max_grad_norm: float) -> float:
    """Make an optimizer step of the gradient that waits; return its norm before clipping."""
    _end_gradient(policy, 0.0)
    return policy.update(learning_rate, max_grad_norm=max_grad_norm)


def discard_gradient(policy: Policy) -> None:
    """Forget the gradient that waits: every ZeRO stage drops one that is not finite."""
    _end_gradient(policy, math.nan)
    policy.update(0.0)


def _end_gradient(policy: Policy, factor: float) -> None:
    """Run the cheapest pass as the last one, times `factor`: ZeRO must be told which is, and parts cannot know."""
    logprobs, _ = policy.logprobs(dummy_tokens())
    policy.backward(factor * logprobs.sum(), last=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Columns:
    """A micro-batch on the device, [k] each."""

    segments: Tensor  # int64
    segment_count: int
    weights: Tensor
    advantages: Tensor
    behavior: Tensor
    old: Tensor
    reference: Tensor | None

    @classmethod
    def of(cls, batch: PolicyBatch, logprobs: Tensor) -> _Columns:
        device = logprobs.device
        with_reference = len(batch.reference_logprobs) > 0
        return cls(
            segments=to_device(batch.segments, device, torch.int64),
            segment_count=int(batch.segments[-1]) + 1,
            weights=to_device(batch.weights, device),
            advantages=to_device(batch.advantages, device),
            behavior=to_device(batch.behavior_logprobs, device),
            # Without a pass of its own: the policy has not moved since the step began.
            old=to_device(batch.old_logprobs, device) if len(batch.old_logprobs) else logprobs.detach(),
            reference=to_device(batch.reference_logprobs, device) if with_reference else None,
        )


def _policy_objective(
    logprobs: Tensor,
    entropy: Tensor,
    columns: _Columns,
    algorithm: AlgorithmConfig,
    settings: UpdateSettings,
    tally: Tally,
) -> Tensor:
    """Return a micro-batch's part of the step's loss, a scalar, and note what the metrics need of it."""
    real = columns.weights > 0
    term = _policy_loss(logprobs, columns, algorithm)
    token_loss, means, accepted = term.loss, dict(term.means), real
    if algorithm.correction.kind != "none":
        correction = corrections.correct(
            columns.old,
            columns.behavior,
            columns.segments,
            columns.segment_count,
            kind=algorithm.correction.kind,
            low=algorithm.correction.low,
            high=algorithm.correction.high,
        )
        token_loss = torch.where(correction.rejected, 0.0, correction.weights * token_loss)
        if columns.reference is None and not algorithm.entropy_coef:  # these terms reject nothing
            accepted = real & ~correction.rejected
        means |= tally.corrected(correction, columns.segments, columns.segment_count, real=real)
    loss = policy_loss = _weighted_sum(token_loss, columns.weights)
    if columns.reference is not None:
        distance = kl.estimate(logprobs, columns.reference, algorithm.kl.estimator)
        kl_loss = _weighted_sum(distance, columns.weights)
        loss = loss + settings.kl_coef * kl_loss
        tally.total(metrics.KL_LOSS, kl_loss)
        means[metrics.REFERENCE_KL] = kl.k3(columns.reference - columns.old)
    if algorithm.entropy_coef:
        loss = loss - algorithm.entropy_coef * _weighted_sum(entropy, columns.weights)
    means[metrics.ENTROPY] = entropy.detach()
    means |= distances(logprobs.detach(), columns.old, columns.behavior)
    tally.add(loss=policy_loss.detach(), real=real, means=means)
    tally.note(logprobs.detach() - columns.old, columns.old - columns.behavior, real)
    tally.accepted.append(accepted.any())
    return loss


def _policy_loss(logprobs: Tensor, columns: _Columns, algorithm: AlgorithmConfig) -> TokenLoss:
    """Return the loss that the recipe names, token by token."""
    old, advantages = columns.old, columns.advantages
    low, high = algorithm.clip_low, algorithm.clip_high
    match algorithm.loss:
        case "ppo":
            return losses.ppo(logprobs, old, advantages, clip_low=low, clip_high=high, dual_clip=algorithm.dual_clip)
        case "gspo":
            samples = (columns.segments, columns.segment_count)
            form = algorithm.gspo_form
            return losses.gspo(logprobs, old, advantages, *samples, clip_low=low, clip_high=high, form=form)
        case "cispo":
            return losses.cispo(logprobs, old, advantages, ratio_min=algorithm.ratio_min, ratio_max=algorithm.ratio_max)
        case "sapo":
            taus = {"tau_positive": algorithm.sapo_tau_positive, "tau_negative": algorithm.sapo_tau_negative}
            return losses.sapo(logprobs, old, advantages, **taus)
        case "reinforce":
            return losses.reinforce(logprobs, advantages)


def _weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of weights * values over the tokens that count; an exact 0 with a gradient when none does."""
    return (weights * torch.where(weights > 0, values, 0.0)).sum()
