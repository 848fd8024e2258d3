"""Turns the scores of a batch into the reward of every token. numpy float64, over the whole batch.

    B        samples
    k        action tokens of all samples, packed: one sample after another
    score r  [B]  returned by the scorer, then changed by the functions below
    lengths  [B]  action tokens of each sample; text of the environment is not counted
    stream   [k]  rewards of single tokens or turns, each on the last action that it is for
    kl       [k]  estimate of KL(old || reference) per token
    outcome  [B]  score after all changes, which the last action receives

The order is: normalisation (state.py), `overlong_penalty`, `stop_properly`, the comparison with other samples
(advantages/), and last `token_rewards`:

    R_t = - kl_coef * kl_t + stream_t + [t is the sample's last action] * outcome
"""

from __future__ import annotations

import numpy as np

from fourfold.algorithm.packed import last_tokens
from fourfold.arrays import BoolArray, Float64Array, Int64Array


def overlong_penalty(lengths: Int64Array, *, max_tokens: int, buffer_tokens: float, factor: float) -> Float64Array:
    """Return the number to add to each score, [B], at most 0: a ramp down to -factor over the last `buffer_tokens`.

    DAPO, arXiv 2503.14476, eq. 13, with its cap: the penalty of a longer sample is that of `max_tokens`. The ramp has
    at least one token.
    """
    excess = np.clip(lengths - (max_tokens - buffer_tokens), 0, buffer_tokens)
    return -factor * excess / buffer_tokens


def stop_properly(scores: Float64Array, truncated: BoolArray, *, coef: float) -> Float64Array:
    """Return the scores, [B], with truncated samples at r * coef, or at coef itself where coef is below 0.

    The penalty of ProRL v2 as implemented in OpenRLHF. With scores below 0, r * coef makes a bad answer better: use a
    coef below 0 then.
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

    The outcome is added to the last action, not to the last position, which may be text of the environment. A sample
    without actions has no rewards. `kl_coef` is the penalty per nat, if `kl` is part of the reward.
    """
    rewards = np.zeros(int(lengths.sum()), np.float64)
    if stream is not None:
        rewards += stream
    if kl is not None and kl_coef:
        rewards -= kl_coef * kl
    rewards[last_tokens(lengths)] += outcomes[lengths > 0]
    return rewards
