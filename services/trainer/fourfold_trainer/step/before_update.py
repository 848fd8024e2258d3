"""Computes what a step needs of its models before the first update: old log-probabilities, and the critic's values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Final

import numpy as np

from fourfold.arrays import Float32Array, Float64Array
from fourfold.config import Config
from fourfold_trainer.engine import TrainerEngine
from fourfold_trainer.flops import Work
from fourfold_trainer.step.batch import StepBatch
from fourfold_trainer.step.micro_batches import (
    LossTokens,
    compute_as_updates,
    compute_old_logprobs,
    compute_per_token,
    of_action_tokens,
)

_NOISE_STEPS: Final = 200  # the noise of later epochs is measured in one of so many steps, the first among them


def needs_old_logprobs(config: Config) -> bool:
    """Return whether old log-probabilities need a forward pass of their own.

    A step with one update needs no such pass: the policy has not changed yet, so the log-probabilities of the update's
    own pass are the old ones. But a KL term in the reward, or an adaptive KL coefficient, needs them before the update.
    """
    return config.batch.updates_per_step > 1 or _needs_reference_kl(config)


def _needs_reference_kl(config: Config) -> bool:
    """Return whether the distance to the reference is needed before the updates, for all samples."""
    kl = config.algorithm.kl
    return kl.coef > 0 and (kl.placement == "reward" or kl.target > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterNoise:
    """Difference of log-probabilities of the same weights in the micro-batches of a later epoch, in nats."""

    token: float  # largest of a token
    sample: float  # largest mean over the tokens of a trajectory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BeforeUpdate:
    """What the passes before the first update computed; None: not needed."""

    old_logprobs: list[Float32Array] | None = None  # of each sample's action tokens
    values: list[Float32Array] | None = None  # of the critic, likewise
    entropy: float | None = None  # nats: mean over all sampled tokens of the batch that no grammar forced


def compute_before(
    engine: TrainerEngine, batch: StepBatch, config: Config, steps: Sequence[Sequence[int]], work: tuple[Work, Work]
) -> BeforeUpdate:
    """Compute what the advantages need: old log-probabilities and values.

    Old log-probabilities that only the loss needs are computed afterwards, for those samples alone that have an
    advantage. A critic's pass and that of the policy run at the same time, and a shadow may train on any sample.

    Args:
        steps: samples of each optimizer step of the first epoch.
        work: of the policy and of the critic; the passes are added.
    """
    needs_critic = config.algorithm.needs_critic
    early = needs_critic or _needs_reference_kl(config) or any(s.shadow_score is not None for s in batch.samples)

    def policy() -> BeforeUpdate:
        if not (early and needs_old_logprobs(config)):
            return BeforeUpdate()
        masked = np.flatnonzero(batch.left_out & (batch.free_lengths > 0)).tolist()  # of a baseline with a KL penalty
        trained = [[i for i in members if batch.loss_lengths[i]] for members in steps]
        # The kernel that makes log-probabilities makes entropies anyway. On CPU they would add a tenth to the pass.
        entropies = config.trainer.device == "cuda"
        compute = partial(engine.compute_logprobs, entropies=entropies)
        work[0].add((len(batch.samples[i].token_ids) for i in [*chain(*trained), *masked]), backward=False)
        rows = compute_as_updates(compute, batch, config, [*trained, masked])
        if not entropies or not any(map(len, rows)):
            return BeforeUpdate(old_logprobs=of_action_tokens(batch, rows))
        spread = np.concatenate([row[:, 1] for row in rows if len(row)])
        return BeforeUpdate(
            old_logprobs=of_action_tokens(batch, [row[:, 0] if len(row) else row for row in rows]),
            entropy=float(spread.mean(dtype=np.float64)),
        )

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


def with_old_logprobs(
    engine: TrainerEngine, tokens: LossTokens, steps: Sequence[Sequence[int]], work: Work
) -> LossTokens:
    """Compute the old log-probabilities of the samples that are trained on, if the loss needs them and has none yet.

    Args:
        steps: samples of each optimizer step of the first epoch.
        work: of the policy; the pass is added.
    """
    batch, config = tokens.batch, tokens.config
    if tokens.targets.old_logprobs is not None or not needs_old_logprobs(config):
        return tokens
    updates = [tokens.to_train(members) for members in steps]
    work.add((len(batch.samples[i].token_ids) for i in chain(*updates)), backward=False)
    old = compute_old_logprobs(engine.compute_logprobs, batch, config, updates)
    return replace(tokens, targets=replace(tokens.targets, old_logprobs=old))


def later_noise(
    engine: TrainerEngine, tokens: LossTokens, later_steps: Sequence[Sequence[int]], work: Work, *, step: int
) -> LaterNoise | None:
    """Compare old log-probabilities with those of one micro-batch of each rank in the first update of the second epoch.

    Call this before the first update: the weights are the same, and only the other samples of a micro-batch differ. The
    pass takes at most a fourteenth of a step, and less than 1e-3 of all steps, of which few measure the noise.

    Args:
        later_steps: samples of each optimizer step after the first epoch.
        work: of the policy; the pass is added.

    Returns:
        None in all other steps, and if later epochs have the micro-batches of the first, there is no sample, or a
        log-probability is not finite.
    """
    batch, config, old = tokens.batch, tokens.config, tokens.targets.old_logprobs
    if old is None or not later_steps or config.batch.mini_batches_per_step == 1 or step % _NOISE_STEPS != 1:
        return None
    update = tokens.to_train(later_steps[0])
    rows = compute_as_updates(engine.compute_logprobs, batch, config, [update], limit=1)
    differences: dict[int, list[Float64Array]] = {}
    for i, trajectory in enumerate(batch.trajectory_of.tolist()):
        if len(rows[i]):
            differences.setdefault(trajectory, []).append(rows[i].astype(np.float64) - old[i][batch.free(i)])
    work.add((len(s.token_ids) for s, row in zip(batch.samples, rows, strict=True) if len(row)), backward=False)
    samples = [np.concatenate(parts) for parts in differences.values()]
    if not samples or not all(np.isfinite(d).all() for d in samples):
        return None
    token, sample = max(np.abs(d).max() for d in samples), max(abs(d.mean()) for d in samples)
    return LaterNoise(token=float(token), sample=float(sample))
