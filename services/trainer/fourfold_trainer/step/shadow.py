"""Compares the policy's gradients that the scores and the shadow scores of a step's batch produce.

The gradient of the shadow is that of one update on the whole batch, at the weights before the step, if the shadow
scores were the scores. Shaping, comparison and whitening are the same, and begin at the same state of the algorithm,
which the shadow does not change. Token rewards, the critic's values, old log-probabilities and all terms of the loss
(KL to the reference, entropy, routers) are the same in both.

    one update a step        shadow: forward and backward pass, kept    live: the step's own gradient, just before it
                                                                              is applied
    more updates             shadow: the same                           live: likewise, all mini-batches as one

The kept gradient is on the ranks, each with the part that it has the optimizer for: 4 bytes per parameter there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fourfold.algorithm.state import AlgorithmState
from fourfold_trainer.engine import TrainerEngine, UpdateSettings, UpdateSums
from fourfold_trainer.step.advantages import TokenTargets, compute_advantages, shape_rewards
from fourfold_trainer.step.micro_batches import LossTokens, compute_old_logprobs


@dataclass(slots=True, kw_only=True)
class ShadowGradient:
    """The comparison of two gradients; the shadow's is kept on the ranks until `compare`."""

    seconds: float  # passes of the comparison alone, not those of the step
    is_compared: bool = False
    norm: float = math.nan  # L2 norm of the shadow's gradient
    live_norm: float = math.nan  # of the live one, before clipping
    cosine: float = math.nan  # not a number: one of the gradients is 0 or not finite

    def compare(self, sums: UpdateSums) -> UpdateSums:
        """Take the comparison out of the sums of the live gradient; return these."""
        self.is_compared, self.live_norm = True, sums.grad_norm
        if sums.products:
            dot, shadow, live = sums.products
            self.norm = math.sqrt(shadow)
            if shadow > 0 and live > 0:
                # Norms of two roots: the product of two squared norms can leave the range of numbers.
                self.cosine = max(-1.0, min(1.0, dot / math.sqrt(shadow) / math.sqrt(live)))
        return sums


def keep_shadow_gradient(
    engine: TrainerEngine, tokens: LossTokens, settings: UpdateSettings, state: AlgorithmState
) -> ShadowGradient | None:
    """Compute the gradient of the shadow scores before the first update; compare it, if the update itself will not.

    Args:
        tokens: of the step.
        settings: of the step's updates.
        state: of the algorithm before the step.

    Returns:
        None if not all samples have a shadow score, or one of the gradients is 0 or not finite.
    """
    config = tokens.config
    if not _has_shadow_scores(tokens):
        return None
    began = time.monotonic()
    shadow = replace(tokens, targets=_shadow_targets(tokens, state, settings.kl_coef))
    every = list(range(len(tokens.batch.samples)))
    if not shadow.to_train(every) or not tokens.to_train(every):
        return None
    shadow = _with_missing_logprobs(engine, shadow, shadow.to_train(every))
    if not math.isfinite(_compute(engine, shadow, replace(settings, gradient="keep")).grad_norm):
        return None
    result = ShadowGradient(seconds=0.0)
    if config.batch.updates_per_step > 1:
        result.compare(_compute(engine, tokens, replace(settings, gradient="compare")))
    result.seconds = time.monotonic() - began
    return result


def _has_shadow_scores(tokens: LossTokens) -> bool:
    # No shadow has scored the greedy completion that `needs_greedy_sample` compares with.
    greedy = tokens.config.algorithm.advantage.needs_greedy_sample
    return not greedy and all(sample.shadow_score is not None for sample in tokens.batch.trajectories)


def _shadow_targets(tokens: LossTokens, state: AlgorithmState, kl_coef: float) -> TokenTargets:
    """Return the targets that the step would have if the shadow scores were the scores."""
    config = tokens.config
    # The terms are those of the live score; a shadow has one number.
    samples = [replace(sample, score=sample.shadow_score, terms=()) for sample in tokens.batch.samples]
    batch = replace(tokens.batch, samples=samples)
    outcomes, _ = shape_rewards(batch, config, state)
    return compute_advantages(batch, outcomes, config, tokens.targets.outputs, kl_coef=kl_coef)


def _with_missing_logprobs(engine: TrainerEngine, shadow: LossTokens, members: Sequence[int]) -> LossTokens:
    """Compute the old log-probabilities of samples that the step does not train on, in micro-batches of their own.

    Among those of the step, they would change how it is packed, and so how its log-probabilities are rounded.
    """
    outputs = shadow.targets.outputs
    if outputs.old_logprobs is None:
        return shadow
    old = list(outputs.old_logprobs)
    missing = [i for i in members if np.isnan(old[i][shadow.batch.free(i)]).any()]
    found = compute_old_logprobs(engine.compute_logprobs, shadow.batch, shadow.config, [missing])
    for i in missing:
        old[i] = found[i]
    return replace(shadow, targets=replace(shadow.targets, outputs=replace(outputs, old_logprobs=old)))


def _compute(engine: TrainerEngine, tokens: LossTokens, settings: UpdateSettings) -> UpdateSums:
    """Compute the gradient of the whole batch, as one update has it."""
    every = list(range(len(tokens.batch.samples)))
    members = tokens.to_train(every)
    count = sum(len(tokens.batch.samples[i].token_ids) for i in members)
    shares = tokens.policy_micro_batches(members, tokens.weights(every))
    return engine.update_policy(shares, replace(settings, token_count=count))
