"""Runs one training step on rank 0: scores -> advantages, then one optimizer step for each mini-batch and epoch.

    shape_rewards        scores -> outcomes, [B]                                       advantages.py
    compute_per_token    old log-probabilities and values, where they are needed       micro_batches.py
    compute_advantages   outcomes -> advantages and returns of every token, [k]        advantages.py
    update_policy        one optimizer step on every rank: loss, backward, step        optimizer_step.py
    update_critic

The method that is trained is the recipe's: `algorithm.advantage` and `algorithm.loss` are definitions in
fourfold/algorithm/.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from fourfold.algorithm.state import AlgorithmState
from fourfold.arrays import Float32Array, Sample
from fourfold.config import Config
from fourfold_trainer.batches import dummy_tokens
from fourfold_trainer.engine import TrainerEngine, UpdateSettings
from fourfold_trainer.flops import Work
from fourfold_trainer.step.advantages import compute_advantages, next_kl_coef, shape_rewards
from fourfold_trainer.step.batch import StepBatch
from fourfold_trainer.step.lr_schedule import learning_rate
from fourfold_trainer.step.micro_batches import Compute, LossTokens, compute_per_token, mini_batches
from fourfold_trainer.step.shadow import keep_shadow_gradient
from fourfold_trainer.step.step_result import StepResult

NO_ADVANTAGE: Final = "NO_ADVANTAGE"
NO_ACTION_TOKENS: Final = "NO_ACTION_TOKENS"
ALL_REJECTED: Final = "ALL_REJECTED"
NOT_FINITE: Final = "NOT_FINITE"


def train_step(
    engine: TrainerEngine, samples: Sequence[Sample], config: Config, *, step: int, state: AlgorithmState
) -> StepResult:
    """Train on a batch that `check_samples` accepted; leave out optimizer steps whose gradient would be 0.

    `step` counts from 1; `state` is the algorithm's state after the previous step.
    """
    algorithm = config.algorithm
    kl_coef = algorithm.kl.coef if state.kl_coef is None else state.kl_coef
    batch = StepBatch.of(samples, algorithm)
    outcomes, following = shape_rewards(batch, config, state)
    policy_work, critic_work = Work(), Work()
    old, values = _compute_old(engine, batch, config, policy_work, critic_work)
    targets = compute_advantages(batch, outcomes, config, old=old, values=values, kl_coef=kl_coef)
    result = StepResult(
        step=step,
        algorithm_state=replace(following, kl_coef=next_kl_coef(batch, targets.kl, kl_coef, config)),
        batch=batch,
        outcomes=outcomes,
        targets=targets,
        kl_coef=kl_coef,
        policy_work=policy_work,
        critic_work=critic_work,
    )
    kl_in_loss = algorithm.kl.coef > 0 and algorithm.kl.placement == "loss"
    tokens = LossTokens(config=config, batch=batch, targets=targets, kl_in_loss=kl_in_loss)
    trains_policy = not algorithm.needs_critic or step >= config.critic.policy_starts_at_step
    settings = UpdateSettings(
        learning_rate=learning_rate(config.trainer, step, config.steps),
        kl_coef=kl_coef,
        router_coef=config.trainer.router_aux_loss_coef,
    )
    if trains_policy:
        result.shadow = keep_shadow_gradient(engine, tokens, settings, state)
    for mini_batch in mini_batches(batch.bounds, config, step=step):
        critic = partial(_update_critic, engine, tokens, mini_batch, result)
        policy = partial(_update_policy, engine, tokens, mini_batch, settings, result)
        if not algorithm.needs_critic:
            policy()
        elif trains_policy:
            engine.in_parallel(critic, policy)
        else:  # the first steps train the critic alone
            critic()
    result.skipped_reason = _skipped_reason(result, trains_policy=trains_policy)
    return result


def needs_old_logprobs(config: Config) -> bool:
    """Return whether old log-probabilities need a forward pass of their own.

    A step with one update needs no such pass: the policy has not changed yet, so the log-probabilities of the update's
    own pass are the old ones. But a KL term in the reward, or an adaptive KL coefficient, needs them before the update.
    """
    kl = config.algorithm.kl
    for_the_reward = kl.coef > 0 and (kl.placement == "reward" or kl.target > 0)
    return config.batch.updates_per_step > 1 or for_the_reward


def _compute_old(
    engine: TrainerEngine, batch: StepBatch, config: Config, policy_work: Work, critic_work: Work
) -> tuple[list[Float32Array] | None, list[Float32Array] | None]:
    """Return the old log-probabilities and the values of each sample's action tokens; None if they are not needed."""
    lengths = [len(s.token_ids) for s, count in zip(batch.samples, batch.lengths, strict=True) if count]

    def per_token(compute: Compute, work: Work, *, ranks: int = 0) -> list[Float32Array]:
        work.add(lengths, backward=False)
        return compute_per_token(compute, batch.samples, batch.positions, batch.lengths, config, ranks=ranks)

    def logprobs() -> list[Float32Array] | None:
        return per_token(engine.compute_logprobs, policy_work) if needs_old_logprobs(config) else None

    if not config.algorithm.needs_critic:
        return logprobs(), None
    values: list[list[Float32Array]] = []
    ranks = config.critic_data_parallel_size
    critic = partial(per_token, engine.compute_values, critic_work, ranks=ranks)
    old = engine.in_parallel(lambda: values.append(critic()), logprobs)
    return old, values[0]


def _update_policy(
    engine: TrainerEngine,
    tokens: LossTokens,
    mini_batch: Sequence[int],
    settings: UpdateSettings,
    result: StepResult,
) -> None:
    """Run one optimizer step of the policy, if there is anything to learn."""
    members = tokens.to_train(mini_batch)
    if not members:
        return
    shares = tokens.policy_micro_batches(members, tokens.weights(mini_batch))
    lengths = [len(tokens.batch.samples[i].token_ids) for i in members]
    settings = replace(settings, token_count=sum(lengths))
    if result.shadow is not None and not result.shadow.is_compared:
        sums = result.shadow.compare(engine.update_policy(shares, replace(settings, gradient="compare and apply")))
    else:
        sums = engine.update_policy(shares, settings)  # optimizer_step.py, on every rank
    if not math.isfinite(sums.grad_norm):
        result.skipped_reason = ALL_REJECTED if sums.all_rejected else NOT_FINITE
    result.policy_norms.append(sums.grad_norm)
    result.nonfinite_losses += not math.isfinite(sums.loss)
    result.policy.add(sums)
    result.trained.update(tokens.batch.trajectory_of[members].tolist())
    result.policy_work.add(lengths, backward=True)
    dummies = sum(not members for share in shares for members in share.shares)
    result.micro_batch_count += sum(map(len, shares))
    result.dummy_count += dummies
    result.forwarded_tokens += sum(lengths) + dummies * dummy_tokens().token_count
    result.real_tokens += sum(lengths)


def _update_critic(engine: TrainerEngine, tokens: LossTokens, mini_batch: Sequence[int], result: StepResult) -> None:
    """Run one optimizer step of the critic, on all loss tokens."""
    members = tokens.to_value(mini_batch)
    if not members:
        return
    config = tokens.config
    settings = UpdateSettings(learning_rate=learning_rate(config.critic, result.step, config.steps))
    sums = engine.update_critic(tokens.value_micro_batches(members, tokens.weights(mini_batch)), settings)
    result.critic_work.add((len(tokens.batch.samples[i].token_ids) for i in members), backward=True)
    result.critic_norms.append(sums.grad_norm)
    result.critic.add(sums)


def _skipped_reason(result: StepResult, *, trains_policy: bool) -> str:
    """Return why the step learned nothing; empty when it did."""
    if result.policy_updates:
        return ""
    if trains_policy:
        return result.skipped_reason or (NO_ADVANTAGE if result.batch.loss_lengths.any() else NO_ACTION_TOKENS)
    # The critic is trained alone, and the step is skipped only if each of its gradients was not finite.
    failed = result.critic_norms and not any(map(math.isfinite, result.critic_norms))
    return NOT_FINITE if failed else result.skipped_reason
