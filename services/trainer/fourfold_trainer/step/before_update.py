"""Computes old log-probabilities and the critic's values before the first update of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Final

import numpy as np

from fourfold.arrays import Float32Array, Float64Array
from fourfold.config.schema import Config
from fourfold_trainer.engine import TrainerEngine
from fourfold_trainer.step.advantages import ModelOutputs
from fourfold_trainer.step.batch import TrainBatch
from fourfold_trainer.step.micro_batches import (
    LossTokens,
    compute_as_updates,
    compute_old_logprobs,
    compute_per_token,
    of_action_tokens,
)
from fourfold_trainer.work import Work

NOISE_STEPS: Final = 200
"""A noise that needs passes of its own is measured once in this number of steps that train the policy."""


def needs_old_logprobs(config: Config) -> bool:
    """Return whether old log-probabilities need a forward pass of their own.

    A step with one update needs no such pass: the policy has not changed yet, so the log-probabilities of the update's
    own pass are the old ones. But a KL term in the reward, an adaptive KL coefficient, or an estimator that compares
    tokens or reads the reference needs them before the update. Rows have no engine to compare with, so only their loss
    may read old ones.
    """
    read = config.needs_engines or config.algorithm.loss.compares_with_old
    return (read and config.batch.updates_per_step > 1) or _for_advantages(config)


def _for_advantages(config: Config) -> bool:
    """Return whether old log-probabilities are needed before the advantages, and for all samples."""
    algorithm, kl = config.algorithm, config.algorithm.kl
    in_reward = kl.coef > 0 and (kl.placement == "reward" or kl.target > 0)
    return algorithm.advantage.compares_tokens or algorithm.distills or in_reward


def _needs_all_tokens(config: Config, *, trains_policy: bool) -> bool:
    """Return whether the pass covers all sampled tokens: with a critic it runs beside the pass for their values."""
    return _for_advantages(config) or (trains_policy and config.algorithm.needs_critic and needs_old_logprobs(config))


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterNoise:
    """Difference of log-probabilities of the same weights in the micro-batches of a later epoch, in nats."""

    token: float  # largest of a token
    sample: float  # largest mean over the tokens of a trajectory


def compute_before(
    engine: TrainerEngine,
    batch: TrainBatch,
    config: Config,
    steps: Sequence[Sequence[int]],
    work: tuple[Work, Work],
    *,
    trains_policy: bool,
) -> ModelOutputs:
    """Return the values of a critic, and old log-probabilities of all sampled tokens if they are needed now.

    They are needed for the advantages, or with a critic for the loss: its pass and that of the policy run at the same
    time. Otherwise `with_old_logprobs` computes those of the samples that have an advantage.

    Args:
        steps: samples of each optimizer step of the first epoch.
        work: of the policy and of the critic; the passes are added.
        trains_policy: false in the steps that train the critic alone.
    """

    def policy() -> ModelOutputs:
        if not _needs_all_tokens(config, trains_policy=trains_policy):
            return ModelOutputs()
        masked = np.flatnonzero(batch.left_out & (batch.free_lengths > 0)).tolist()  # of a baseline with a KL penalty
        trained = [[i for i in members if batch.loss_lengths[i]] for members in steps]
        energies = config.algorithm.advantage.compares_tokens
        # The kernel that makes log-probabilities makes entropies anyway. On CPU they would add a tenth to the pass.
        entropies = config.trainer.device == "cuda" and config.algorithm.needs_entropies and not energies
        compute = partial(engine.compute_logprobs, entropies=entropies, energies=energies)
        _add_forward(work[0], batch, [*chain(*trained), *masked])
        rows = compute_as_updates(compute, batch, config, [*trained, masked])
        if not (entropies or energies) or not any(map(len, rows)):
            return ModelOutputs(old_logprobs=of_action_tokens(batch, rows))
        first, second = ([row[:, i] if len(row) else row for row in rows] for i in (0, 1))
        old = of_action_tokens(batch, first)
        if energies:
            return ModelOutputs(old_logprobs=old, energies=of_action_tokens(batch, second))
        return ModelOutputs(old_logprobs=old, entropy=float(np.concatenate(second).mean(dtype=np.float64)))

    if not config.algorithm.needs_critic:
        return policy()
    values: list[list[Float32Array]] = []

    def critic() -> None:
        asked: list[int] = batch.samples.lengths[batch.lengths > 0].tolist()
        work[1].add(asked, rows=0, backward=False)
        ranks = config.critic_data_parallel_size
        values.append(
            compute_per_token(engine.compute_values, batch.samples, batch.positions, batch.lengths, config, ranks=ranks)
        )

    return replace(engine.in_parallel(critic, policy), values=values[0])


def _add_forward(work: Work, batch: TrainBatch, members: Sequence[int]) -> None:
    """Add the pass of `compute_as_updates` over some samples."""
    rows = int(batch.free_lengths[list(members)].sum())
    work.add(batch.samples.lengths[list(members)].tolist(), rows=rows, backward=False)


def with_old_logprobs(
    engine: TrainerEngine, tokens: LossTokens, steps: Sequence[Sequence[int]], work: Work
) -> LossTokens:
    """Compute the old log-probabilities of the samples that are trained on, if the loss needs them and has none yet.

    Args:
        steps: samples of each optimizer step of the first epoch.
        work: of the policy; the pass is added.
    """
    batch, config = tokens.batch, tokens.config
    outputs = tokens.targets.outputs
    if outputs.old_logprobs is not None or not needs_old_logprobs(config):
        return tokens
    updates = [tokens.to_train(members) for members in steps]
    _add_forward(work, batch, [*chain(*updates)])
    old = compute_old_logprobs(engine.compute_logprobs, batch, config, updates)
    return replace(tokens, targets=replace(tokens.targets, outputs=replace(outputs, old_logprobs=old)))


def later_noise(
    engine: TrainerEngine, tokens: LossTokens, later_steps: Sequence[Sequence[int]], work: Work, *, step: int
) -> LaterNoise | None:
    """Compare old log-probabilities with those of one micro-batch of each rank in the first update of the second epoch.

    Call this before the first update of the policy: the weights are the same, and only the other samples of a
    micro-batch differ. The pass takes at most a fourteenth of a step, and less than 1e-3 of all steps, of which few
    measure the noise.

    Args:
        later_steps: samples of each optimizer step after the first epoch.
        work: of the policy; the pass is added.

    Returns:
        None in all other steps, and if later epochs have the micro-batches of the first, there is no sample, or a
        log-probability is not finite.
    """
    batch, config, old = tokens.batch, tokens.config, tokens.targets.outputs.old_logprobs
    first = config.critic.policy_starts_at_step if config.algorithm.needs_critic else 1
    if old is None or not later_steps or config.batch.mini_batches_per_step == 1 or (step - first) % NOISE_STEPS:
        return None
    update = tokens.to_train(later_steps[0])
    rows = compute_as_updates(engine.compute_logprobs, batch, config, [update], limit=1)
    differences: dict[int, list[Float64Array]] = {}
    for i, trajectory in enumerate(batch.trajectory_of.tolist()):
        if len(rows[i]):
            differences.setdefault(trajectory, []).append(rows[i].astype(np.float64) - old[i][batch.free(i)])
    _add_forward(work, batch, [i for i, row in enumerate(rows) if len(row)])
    samples = [np.concatenate(parts) for parts in differences.values()]
    if not samples or not all(np.isfinite(d).all() for d in samples):
        return None
    token, sample = max(np.abs(d).max() for d in samples), max(abs(d.mean()) for d in samples)
    return LaterNoise(token=float(token), sample=float(sample))
