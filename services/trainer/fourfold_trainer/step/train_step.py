"""Runs one training step on rank 0: scores -> advantages, then one optimizer step for each mini-batch and epoch.

    shape_rewards        scores -> outcomes, [B]                                       advantages.py
    compute_before       old log-probabilities and values, where they are needed       before_update.py
    compute_advantages   outcomes -> advantages and returns of every token, [k]        advantages.py
    measure              further metrics before the first update, if the caller asks   shadow.py
    update_policy        one optimizer step on every rank: loss, backward, step        optimizer_step.py
    update_critic

A loss of whole answers has a step of its own, without advantages: unit_step.py.

The method that is trained is the recipe's: `algorithm.advantage` and `algorithm.loss` are definitions in
fourfold/algorithm/.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from fourfold.algorithm.losses.units import SampleLoss
from fourfold.algorithm.state import AlgorithmState
from fourfold.config.schema import Config
from fourfold.sample import Sample
from fourfold_trainer.engine import TrainerEngine, UpdateSettings
from fourfold_trainer.step.advantages import compute_advantages, next_kl_coef, shape_rewards
from fourfold_trainer.step.batch import TrainBatch
from fourfold_trainer.step.before_update import compute_before, later_noise, with_old_logprobs
from fourfold_trainer.step.lr_schedule import learning_rate
from fourfold_trainer.step.metric_accumulator import untrained_mismatch
from fourfold_trainer.step.micro_batches import LossTokens, mini_batches
from fourfold_trainer.step.step_result import Measure, StepResult
from fourfold_trainer.step.unit_step import train_units
from fourfold_trainer.work import Work


def train_step(
    engine: TrainerEngine,
    samples: Sequence[Sample],
    config: Config,
    *,
    step: int,
    state: AlgorithmState,
    measure: Measure | None = None,
) -> StepResult:
    """Train on a batch that `check_samples` accepted; leave out optimizer steps whose gradient would be 0.

    Args:
        step: 1 for the first.
        state: of the algorithm, after the previous step.
        measure: called before the first update, but not of a loss of whole answers; must not change the models.
    """
    algorithm = config.algorithm
    batch = TrainBatch.of(samples, algorithm)
    if isinstance(algorithm.loss, SampleLoss):
        return train_units(engine, batch, config, algorithm.loss, step=step, state=state)
    kl_coef = algorithm.kl.coef if state.kl_coef is None else state.kl_coef
    outcomes, following = shape_rewards(batch, config, state)
    policy_work, critic_work = Work(), Work()
    steps = mini_batches(batch.bounds, config, step=step)
    first_epoch = steps[: len(steps) // config.batch.epochs_per_step]
    trains_policy = not algorithm.needs_critic or step >= config.critic.policy_starts_at_step
    work = (policy_work, critic_work)
    before = compute_before(engine, batch, config, first_epoch, work, trains_policy=trains_policy)
    targets = compute_advantages(batch, outcomes, config, before, kl_coef=kl_coef)
    kl_in_loss = algorithm.kl.coef > 0 and algorithm.kl.placement == "loss"
    tokens = LossTokens(config=config, batch=batch, targets=targets, kl_in_loss=kl_in_loss)
    later = None
    if trains_policy:
        tokens = with_old_logprobs(engine, tokens, first_epoch, policy_work)
        later = later_noise(engine, tokens, steps[len(first_epoch) :], policy_work, step=step)
    result = StepResult(
        step=step,
        algorithm_state=replace(following, kl_coef=next_kl_coef(batch, targets.kl, kl_coef, config)),
        batch=batch,
        outcomes=outcomes,
        targets=tokens.targets,
        kl_coef=kl_coef,
        later_noise=later,
        policy_work=policy_work,
        critic_work=critic_work,
    )
    settings = UpdateSettings(
        learning_rate=learning_rate(config.trainer, step, config.steps),
        kl_coef=kl_coef,
        router_coef=config.trainer.router_aux_loss_coef,
    )
    if trains_policy and measure is not None:
        result.measured = measure(tokens, settings)
    for index, mini_batch in enumerate(steps):
        settings = replace(settings, first_epoch=index < len(first_epoch))
        _update(engine, tokens, mini_batch, settings, result, trains_policy=trains_policy)
    if before.old_logprobs is not None:
        result.policy.add(untrained_mismatch(batch, before.old_logprobs, result.trained))
    result.skipped_reason = result.reason_to_skip(trains_policy=trains_policy)
    return result


def _update(
    engine: TrainerEngine,
    tokens: LossTokens,
    mini_batch: Sequence[int],
    settings: UpdateSettings,
    result: StepResult,
    *,
    trains_policy: bool,
) -> None:
    """Run one optimizer step of the policy, of the critic, or of both."""
    critic = partial(_update_critic, engine, tokens, mini_batch, result)
    policy = partial(_update_policy, engine, tokens, mini_batch, settings, result)
    if not tokens.config.algorithm.needs_critic:
        policy()
    elif trains_policy:
        engine.in_parallel(critic, policy)
    else:  # the first steps train the critic alone
        critic()


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
    settings = replace(settings, token_count=int(tokens.batch.samples.lengths[members].sum()))
    sums = engine.update_policy(shares, settings)  # optimizer_step.py, on every rank
    if not result.policy_norms and tokens.targets.outputs.old_logprobs is not None:
        result.logprob_noise = sums.largest_log_ratio()
    result.add_update(sums, members, shares)


def _update_critic(engine: TrainerEngine, tokens: LossTokens, mini_batch: Sequence[int], result: StepResult) -> None:
    """Run one optimizer step of the critic, on all loss tokens."""
    members = tokens.to_value(mini_batch)
    if not members:
        return
    config = tokens.config
    settings = UpdateSettings(learning_rate=learning_rate(config.critic, result.step, config.steps))
    sums = engine.update_critic(tokens.value_micro_batches(members, tokens.weights(mini_batch)), settings)
    result.critic_work.add(tokens.batch.samples.lengths[members].tolist(), rows=0, backward=True)
    result.critic_norms.append(sums.grad_norm)
    result.critic.add(sums)
