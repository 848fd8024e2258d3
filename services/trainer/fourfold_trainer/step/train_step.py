"""One training step on rank 0, top to bottom.

    shape      scores -> outcomes                                           credit.py
    look up    old log-probabilities and values, where they are needed      passes.py
    assign     outcomes -> advantages and returns of all tokens             credit.py
    update     epochs x mini-batches: the critic, then or beside it         update.py, on all ranks
               the policy
    report     metrics                                                      report.py

The formulas are in algorithm/.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np

from fourfold.arrays import Float32Array, Sample
from fourfold.config import AlgorithmConfig, Config
from fourfold.errors import InvalidInput
from fourfold.rpc.codec import check_unique
from fourfold_trainer.algorithm.state import AlgorithmState
from fourfold_trainer.engine import Engine, UpdateSettings, UpdateSums
from fourfold_trainer.flops import Work
from fourfold_trainer.step.advantages import Batch, Credit, Float64Array, assign, next_kl_coef, shape
from fourfold_trainer.step.lr_schedule import learning_rate
from fourfold_trainer.step.micro_batches import Compute, LossTokens, look_up, mini_batches

NO_ADVANTAGE: Final = "NO_ADVANTAGE"
NO_ACTION_TOKENS: Final = "NO_ACTION_TOKENS"
ALL_REJECTED: Final = "ALL_REJECTED"
NOT_FINITE: Final = "NOT_FINITE"


@dataclass(slots=True, kw_only=True, eq=False)
class Result:
    """What a step did."""

    memory: AlgorithmState
    batch: Batch
    outcomes: Float64Array  # [B], before the comparison within groups
    credit: Credit
    kl_coef: float
    policy: UpdateSums = field(default_factory=UpdateSums)
    critic: UpdateSums = field(default_factory=UpdateSums)
    policy_norms: list[float] = field(default_factory=list)
    """Norm of the gradient of each optimizer step; not finite: it changed nothing."""
    critic_norms: list[float] = field(default_factory=list)
    nonfinite_losses: int = 0
    """Updates of the policy whose loss was not finite."""
    trained: set[int] = field(default_factory=set)
    """Samples that the policy was trained on."""
    policy_work: Work = field(default_factory=Work)
    critic_work: Work = field(default_factory=Work)
    pass_count: int = 0
    """Micro-batches of the policy, dummies included."""
    dummy_count: int = 0
    """Those that are dummies."""
    passed_tokens: int = 0
    """What the policy's passes cost, dummies included."""
    real_tokens: int = 0
    """The same without dummies."""
    skipped_reason: str = ""
    """Why nothing was learned; empty when the policy changed, or the critic while it is trained alone."""

    @property
    def policy_updates(self) -> int:
        """Optimizer steps that changed the policy."""
        return sum(map(math.isfinite, self.policy_norms))


def check(samples: Sequence[Sample], algorithm: AlgorithmConfig, *, policy_version: int) -> None:
    """Refuse a batch that cannot be trained on.

    Fewer samples than ranks are no error here: a batch may shrink on its way (lost groups, a filter), and ranks
    without samples run dummies. A recipe that asks for so few is refused when it is read.

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
        if algorithm.kl.coef > 0 and not len(sample.reference_logprobs):
            raise InvalidInput(f"{who} has no reference_logprobs; algorithm.kl.coef = {algorithm.kl.coef:g} needs them")
        if algorithm.advantage == "remax" and sample.baseline_score is None:
            raise InvalidInput(f"{who} has no baseline_score; algorithm.advantage = `remax` needs a greedy sample's")
        if algorithm.correction.kind == "none":
            _check_behavior(sample)
        newest = max((span.policy_version for span in sample.version_spans), default=-1)
        if newest > policy_version:
            raise InvalidInput(
                f"{who} was sampled by policy version {newest}; the trainer is at {policy_version} and has not "
                f"published that one: restore the right checkpoint, or raise the policy version"
            )


def _check_behavior(sample: Sample) -> None:
    """Refuse a sampled token of probability 0: corrections reject it, but without one it would be trained on."""
    (impossible,) = np.nonzero(np.isneginf(sample.behavior_logprobs) & sample.loss_mask)
    if len(impossible):
        raise InvalidInput(
            f"sample {sample.sample_id}: behavior_logprobs[{impossible[0]}] is -inf: a token that was sampled has a "
            f"probability above 0; leave it out of loss_mask, or set algorithm.correction.kind = `tis`, which rejects "
            f"such tokens"
        )


def train_step(
    engine: Engine, samples: Sequence[Sample], config: Config, *, step: int, memory: AlgorithmState
) -> Result:
    """Train on a checked batch. An optimizer step with nothing to learn is left out, on all ranks.

    Args:
        engine: all ranks.
        samples: of the step, in any order.
        config: of the run.
        step: 1 for the first.
        memory: what the step before left.
    """
    algorithm = config.algorithm
    kl_coef = algorithm.kl.coef if memory.kl_coef is None else memory.kl_coef
    batch = Batch.of(samples, algorithm)
    outcomes, memory = shape(batch, config, memory)
    work, critic_work = Work(), Work()
    old, values = _look_up_both(engine, batch, config, work, critic_work)
    credit = assign(batch, outcomes, config, old=old, values=values, kl_coef=kl_coef)
    kl_in_loss = algorithm.kl.coef > 0 and algorithm.kl.placement == "loss"
    tokens = LossTokens.of(batch, credit, config, kl_in_loss=kl_in_loss)
    result = Result(
        memory=memory,
        batch=batch,
        outcomes=outcomes,
        credit=credit,
        kl_coef=kl_coef,
        policy_work=work,
        critic_work=critic_work,
    )
    trains_policy = not algorithm.needs_critic or step >= config.critic.policy_starts_at_step
    for part in mini_batches(len(samples), config, step=step):
        weights = tokens.weights(part)
        critic = partial(_update_critic, engine, tokens, part, weights, result, step=step)
        policy = partial(_update_policy, engine, tokens, part, weights, result, step=step)
        if algorithm.needs_critic and trains_policy:
            engine.beside(critic, policy)
        else:
            (policy if trains_policy else critic)()
    if result.policy_updates:
        result.skipped_reason = ""
    elif not trains_policy and result.critic_norms and not any(map(math.isfinite, result.critic_norms)):
        result.skipped_reason = NOT_FINITE
    elif trains_policy and not result.skipped_reason:
        result.skipped_reason = NO_ADVANTAGE if batch.selected.any() else NO_ACTION_TOKENS
    result.memory = replace(memory, kl_coef=next_kl_coef(batch, credit, kl_coef, config))
    return result


def needs_old_logprobs(config: Config) -> bool:
    """Whether the old log-probabilities need a pass of their own: in a step's only update they are the present ones."""
    settings = config.algorithm.kl
    for_the_reward = settings.coef > 0 and (settings.placement == "reward" or settings.target > 0)
    return config.batch.updates_per_step > 1 or for_the_reward


def _look_up_both(
    engine: Engine, batch: Batch, config: Config, work: Work, critic_work: Work
) -> tuple[Float32Array | None, Float32Array | None]:
    """Return the old log-probability and the value of each action token, packed; None for what is not needed."""
    lengths = [len(s.token_ids) for s, p in zip(batch.samples, batch.positions, strict=True) if len(p)]

    def numbers(compute: Compute, work: Work, *, ranks: int = 0) -> Float32Array:
        work.add(lengths, backward=False)
        return np.concatenate(look_up(compute, batch.samples, batch.positions, config, ranks=ranks))

    def logprobs() -> Float32Array | None:
        return numbers(engine.compute_logprobs, work) if needs_old_logprobs(config) else None

    if not config.algorithm.needs_critic:
        return logprobs(), None
    values: list[Float32Array] = []
    ranks = config.critic_data_parallel_size
    old = engine.beside(lambda: values.append(numbers(engine.compute_values, critic_work, ranks=ranks)), logprobs)
    return old, values[0]


def _update_policy(
    engine: Engine, tokens: LossTokens, part: Sequence[int], weights: dict[int, float], result: Result, *, step: int
) -> None:
    """Make one optimizer step of the policy, if there is anything to learn."""
    members = tokens.to_train(part)
    if not members:
        return
    config = tokens.config
    passes = tokens.policy_passes(members, weights)
    rate = learning_rate(config.trainer, step, config.steps)
    settings = UpdateSettings(
        learning_rate=rate,
        kl_coef=result.kl_coef,
        router_coef=config.trainer.router_aux_loss_coef,
        token_count=sum(len(tokens.samples[i].token_ids) for i in members),
    )
    sums = engine.update_policy(passes, settings)
    if not math.isfinite(sums.grad_norm):
        result.skipped_reason = ALL_REJECTED if sums.all_rejected else NOT_FINITE
    result.policy_norms.append(sums.grad_norm)
    result.nonfinite_losses += not math.isfinite(sums.loss)
    result.policy.add(sums)
    result.trained.update(members)
    result.policy_work.add((len(tokens.samples[i].token_ids) for i in members), backward=True)
    result.pass_count += sum(map(len, passes))
    result.dummy_count += sum(batch.is_dummy for share in passes for batch in share)
    result.passed_tokens += sum(batch.tokens.token_count for share in passes for batch in share)
    result.real_tokens += sum(len(tokens.samples[i].token_ids) for i in members)


def _update_critic(
    engine: Engine, tokens: LossTokens, part: Sequence[int], weights: dict[int, float], result: Result, *, step: int
) -> None:
    """Make one optimizer step of the critic, on all loss tokens."""
    members = [i for i in part if len(tokens.positions[i])]
    if not members:
        return
    config = tokens.config
    rate = learning_rate(config.critic, step, config.steps)
    sums = engine.update_critic(tokens.value_passes(members, weights), UpdateSettings(learning_rate=rate))
    result.critic_work.add((len(tokens.samples[i].token_ids) for i in members), backward=True)
    result.critic_norms.append(sums.grad_norm)
    result.critic.add(sums)
