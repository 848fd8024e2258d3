"""Computes what a step needs of its models before the first update: old log-probabilities and the critic's values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from fourfold.arrays import Float32Array
from fourfold.config import Config
from fourfold_trainer.engine import TrainerEngine
from fourfold_trainer.flops import Work
from fourfold_trainer.step.advantages import ModelOutputs
from fourfold_trainer.step.batch import StepBatch
from fourfold_trainer.step.micro_batches import compute_old_logprobs, compute_per_token


def needs_old_logprobs(config: Config) -> bool:
    """Return whether old log-probabilities need a forward pass of their own.

    A step with one update needs no such pass: the policy has not changed yet, so the log-probabilities of the update's
    own pass are the old ones. But a KL term in the reward, an adaptive KL coefficient, or an estimator that compares
    tokens needs them before the update.
    """
    return config.batch.updates_per_step > 1 or _for_advantages(config)


def _for_advantages(config: Config) -> bool:
    """Return whether old log-probabilities are needed before the advantages, and for all samples."""
    kl = config.algorithm.kl
    return config.algorithm.advantage.compares_tokens or (kl.coef > 0 and (kl.placement == "reward" or kl.target > 0))


def compute_before(
    engine: TrainerEngine, batch: StepBatch, config: Config, steps: Sequence[Sequence[int]], work: tuple[Work, Work]
) -> ModelOutputs:
    """Return what the advantages need.

    Old log-probabilities that only the loss needs are computed afterwards, for those samples alone that have an
    advantage. A critic's pass and that of the policy run at the same time, and a shadow may train on any sample.
    """
    needs_critic = config.algorithm.needs_critic
    early = needs_critic or _for_advantages(config) or any(s.shadow_score is not None for s in batch.samples)

    def policy() -> ModelOutputs:
        if not (early and needs_old_logprobs(config)):
            return ModelOutputs()
        masked = np.flatnonzero(batch.left_out & (batch.free_lengths > 0)).tolist()  # of a baseline with a KL penalty
        trained = [[i for i in members if batch.loss_lengths[i]] for members in steps]
        updates = [*trained, masked]
        if not config.algorithm.advantage.compares_tokens:
            return ModelOutputs(old_logprobs=old_logprobs(engine, batch, config, updates, work[0]))
        rows = old_logprobs(engine, batch, config, updates, work[0], energies=True)
        return ModelOutputs(old_logprobs=[row[:, 0] for row in rows], energies=[row[:, 1] for row in rows])

    if not needs_critic:
        return policy()
    values: list[list[Float32Array]] = []

    def critic() -> None:
        asked = (len(s.token_ids) for s, count in zip(batch.samples, batch.lengths, strict=True) if count)
        work[1].add(asked, backward=False)
        ranks = config.critic_data_parallel_size
        values.append(
            compute_per_token(engine.compute_values, batch.samples, batch.positions, batch.lengths, config, ranks=ranks)
        )

    return replace(engine.in_parallel(critic, policy), values=values[0])


def old_logprobs(
    engine: TrainerEngine,
    batch: StepBatch,
    config: Config,
    updates: Sequence[Sequence[int]],
    work: Work,
    *,
    energies: bool = False,
) -> list[Float32Array]:
    """Compute the old log-probabilities of each sample's action tokens, [n], or with their energies [n, 2].

    `updates` are those of `compute_old_logprobs`.
    """
    work.add((len(batch.samples[i].token_ids) for members in updates for i in members), backward=False)
    compute = partial(engine.compute_logprobs, energies=True) if energies else engine.compute_logprobs
    return compute_old_logprobs(compute, batch, config, updates)
