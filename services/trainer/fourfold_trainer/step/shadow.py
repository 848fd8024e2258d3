"""Compares the policy's gradients that the scores and the shadow scores of a step's batch produce.

This is a tool beside the step: it runs before the first update, and the step is the same with and without it.

    forward and backward pass with the advantages of the shadow scores    the gradient is kept on the ranks
    forward and backward pass with the advantages of the scores           compared with the kept one; both are forgotten

Both gradients are those of one update on the whole batch, at the weights before the step. For the shadow's, the shadow
scores take the place of the scores. Shaping, comparison and whitening are the same, and begin at the same state of the
algorithm, which the shadow does not change. Token rewards, the critic's values, old log-probabilities and all terms of
the loss (KL to the reference, entropy, routers) are the same in both.

Memory: until the second pass has ended, each rank keeps the part of a gradient that it has the optimizer for, 4 bytes
per parameter there. The updates of the step run without it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fourfold import metrics
from fourfold.algorithm.state import AlgorithmState
from fourfold_trainer.batches import PolicyBatch
from fourfold_trainer.engine import TrainerEngine, UpdateSettings
from fourfold_trainer.step.advantages import TokenTargets, compute_advantages, shape_rewards
from fourfold_trainer.step.micro_batches import LossTokens, MicroBatches, compute_old_logprobs

_log = logging.getLogger("fourfold.trainer")


def compare_gradients(
    engine: TrainerEngine, state: AlgorithmState, tokens: LossTokens, settings: UpdateSettings
) -> dict[str, float]:
    """Compare the gradients of the scores and the shadow scores; return the metrics `shadow/...`.

    Args:
        state: of the algorithm before the step.
        tokens: of the step.
        settings: of the step's updates.

    Returns:
        Nothing if a sample has no shadow score, a batch has no advantage, or the shadow's gradient is not finite. Only
        the time if the other one is not finite, or one of the two is 0.
    """
    if not _has_shadow_scores(tokens):
        return {}
    began = time.monotonic()
    shadow = replace(tokens, targets=_shadow_targets(tokens, state, settings.kl_coef))
    every = list(range(len(tokens.batch.samples)))
    if not shadow.to_train(every) or not tokens.to_train(every):
        return {}
    shadow = _with_missing_logprobs(engine, shadow, shadow.to_train(every))
    kept = engine.keep_gradient(*_one_update(shadow, settings))
    if not kept:
        return {}
    products = engine.compare_gradient(*_one_update(tokens, settings))
    seconds = time.monotonic() - began
    _log.info("gradients compared: seconds=%.1f kept_mib_per_rank=%.1f", seconds, kept / (1 << 20))
    return {metrics.SHADOW_SECONDS: seconds, **_comparison(products)}


def _has_shadow_scores(tokens: LossTokens) -> bool:
    # No shadow has scored the greedy completion that `needs_greedy_sample` compares with.
    greedy = tokens.config.algorithm.advantage.needs_greedy_sample
    return not greedy and None not in tokens.batch.values("shadow_score")


def _shadow_targets(tokens: LossTokens, state: AlgorithmState, kl_coef: float) -> TokenTargets:
    """Return the targets that the step would have if the shadow scores were the scores."""
    config = tokens.config
    # The terms are those of the live score; a shadow has one number.
    samples = tokens.batch.samples
    scores, terms = samples.values["shadow_score"], [()] * len(samples)
    batch = replace(tokens.batch, samples=samples.with_values(score=scores, terms=terms))
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


def _one_update(tokens: LossTokens, settings: UpdateSettings) -> tuple[list[MicroBatches[PolicyBatch]], UpdateSettings]:
    """Return the whole batch as the micro-batches of one update, and the settings of that update."""
    every = list(range(len(tokens.batch.samples)))
    members = tokens.to_train(every)
    count = int(tokens.batch.samples.lengths[members].sum())
    return tokens.policy_micro_batches(members, tokens.weights(every)), replace(settings, token_count=count)


def _comparison(products: Sequence[float]) -> dict[str, float]:
    """Return cosine and norms from the dot product and the squared norms, the shadow's first; nothing without both."""
    if not products:
        return {}
    dot, shadow, live = products
    if not (shadow > 0 and live > 0):
        return {}
    # Norms of two roots: the product of two squared norms can leave the range of numbers.
    cosine = max(-1.0, min(1.0, dot / math.sqrt(shadow) / math.sqrt(live)))
    return {
        metrics.SHADOW_COSINE: cosine,
        metrics.SHADOW_NORM: math.sqrt(shadow),
        metrics.SHADOW_LIVE_NORM: math.sqrt(live),
    }
