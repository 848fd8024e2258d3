"""Rewards: from the scores of a batch to the reward of every token. numpy float64, over the whole batch.

    B        samples
    k        action tokens of all samples, packed: one sample after another
    score r  [B]  number of the scorer; every function below returns new ones
    lengths  [B]  action tokens of each sample (text of the environment is not counted)
    stream   [k]  rewards of single tokens or turns, already on the last action of what they judge
    kl       [k]  estimate of KL(old || reference) per token

In this order: normalise, overlong, stop properly, then the group's baseline (advantages.py), and last

    R_t = - kl_coef * kl_t + stream_t + [t is the sample's last action] * outcome
"""

from __future__ import annotations

import numpy as np

from fourfold.algorithm.packed import BoolArray, Float64Array, Int64Array, last_tokens


def overlong_penalty(lengths: Int64Array, *, max_tokens: int, buffer_tokens: float, factor: float) -> Float64Array:
    """Return what is added to each score, [B], at most 0: a ramp down to -factor over the last `buffer_tokens`.

    DAPO, arXiv 2503.14476, eq. 13, with its cap: longer than max_tokens costs no more than max_tokens.

    Args:
        lengths: int64 [B].
        max_tokens: where the whole penalty is reached.
        buffer_tokens: the penalty begins that much earlier; at least 1.
        factor: the whole penalty.
    """
    excess = np.clip(lengths - (max_tokens - buffer_tokens), 0, buffer_tokens)
    return -factor * excess / buffer_tokens


def stop_properly(scores: Float64Array, truncated: BoolArray, *, coef: float) -> Float64Array:
    """Return the scores, [B], with truncated samples at r * coef, or at coef itself where coef is below 0.

    The penalty of ProRL v2, as OpenRLHF has it. With scores below 0, r * coef makes a bad answer
    better: use a coef below 0 then.

    Args:
        scores: float64 [B].
        truncated: bool [B]; a budget ended the sample.
        coef: at most 1.
    """
    return np.where(truncated, scores * coef if coef >= 0 else coef, scores)


def token_rewards(
    outcomes: Float64Array,
    lengths: Int64Array,
    *,
    stream: Float64Array | None,
    kl: Float64Array | None,
    kl_coef: float,
) -> Float64Array:
    """Return the reward R of every token, float64 [k].

    The outcome sits on the last action, not on the last position, which may be text of the
    environment. A sample without actions gets nothing.

    Args:
        outcomes: float64 [B]; the score after shaping and after the group's baseline.
        lengths: int64 [B].
        stream: float64 [k], or None.
        kl: float64 [k], or None where KL is no part of the reward.
        kl_coef: what one nat costs.
    """
    rewards = np.zeros(int(lengths.sum()), np.float64)
    if stream is not None:
        rewards += stream
    if kl is not None and kl_coef:
        rewards -= kl_coef * kl
    rewards[last_tokens(lengths)] += outcomes[lengths > 0]
    return rewards
