"""Losses: what the optimizer makes small, token by token. torch, inside the update.

    k            tokens of a micro-batch, all samples one after another
    s            samples of it
    current p    [k]  log-probability under the policy that is updated; carries the gradient
    old o        [k]  the same when the update began
    advantage A  [k]
    segments     int64 [k]  sample of each token, 0 to s - 1
    ratio        [k]  exp(p - o), the log clamped to +-20

Computed in the precision of p. A loss is not yet weighted: see aggregation.py and corrections.py.
While nothing has moved (p = o), every policy loss here has the gradient of REINFORCE, -A; in the
sequence form of GSPO that is the mean over the sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fourfold import metrics
from fourfold_trainer.algorithm.ratios import MAX_LOG_RATIO, clamp, segment_mean


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLoss:
    """The loss of every token, and what is worth knowing of it."""

    loss: Tensor
    """[k]."""
    means: dict[str, Tensor] = field(default_factory=dict)
    """Metrics that are means over tokens, by their name in fourfold/metrics.py: detached, [k] each."""


def ppo(
    p: Tensor, o: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> TokenLoss:
    """Return -min(ratio * A, clip(ratio) * A): the gradient ends where the ratio has gone far enough.

    PPO, arXiv 1707.06347, eq. 7. Unequal bounds: DAPO, arXiv 2503.14476, eq. 10. Dual clip, arXiv
    1912.09729: where A < 0, the loss is at most dual_clip * |A|, with gradient 0 beyond.

    Args:
        p: [k].
        o: [k].
        advantages: A, [k].
        clip_low: the ratio is clipped from below at 1 - clip_low,
        clip_high: and from above at 1 + clip_high.
        dual_clip: c > 1, or 0 for none.
    """
    ratio = clamp(p - o.detach()).exp()
    clipped = _clipped(ratio, advantages.detach(), clip_low=clip_low, clip_high=clip_high)
    if not dual_clip:
        return clipped
    worst = -dual_clip * advantages.detach()
    beyond = (advantages < 0) & (clipped.loss.detach() > worst)
    return TokenLoss(
        loss=torch.where(beyond, worst, clipped.loss),
        means={**clipped.means, metrics.DUAL_CLIP_FRACTION: beyond.to(p.dtype)},
    )


def _clipped(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> TokenLoss:
    low, high = 1 - clip_low, 1 + clip_high
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    below = (advantages < 0) & (ratio.detach() < low)
    above = (advantages > 0) & (ratio.detach() > high)
    return TokenLoss(
        loss=-surrogate,
        means={
            metrics.CLIP_FRACTION_LOW: below.to(ratio.dtype),
            metrics.CLIP_FRACTION_HIGH: above.to(ratio.dtype),
        },
    )


def gspo(
    p: Tensor,
    o: Tensor,
    advantages: Tensor,
    segments: Tensor,
    segment_count: int,
    *,
    clip_low: float,
    clip_high: float,
    form: Literal["token", "sequence"],
) -> TokenLoss:
    """Return PPO's clipped loss with one ratio for the whole sample: exp of the mean of p - o, clamped to +-20.

    GSPO, arXiv 2507.18071, eq. 5 to 7. Both forms have the same values, and where A is constant over a
    sample and every token has the same weight, the same gradient:

        token     each token's gradient is that of its own term, ratio * A_t (eq. 13 to 14, GSPO-token)
        sequence  all tokens of a sample share the mean of these

    Args:
        p: [k].
        o: [k].
        advantages: A, [k].
        segments: int64 [k].
        segment_count: s.
        clip_low: the paper's 3e-4,
        clip_high: and 4e-4: a mean over a sample moves much less than a token.
        form: see above.
    """
    mean = segment_mean(p - o.detach(), segments, segment_count)
    if form == "sequence":
        log_ratio = clamp(mean)[segments]
    else:
        within = (mean.detach().abs() <= MAX_LOG_RATIO)[segments]
        slope = torch.where(within, p - p.detach(), 0.0)  # value 0; gradient 1, and 0 outside of the clamp
        log_ratio = clamp(mean.detach())[segments] + slope
    ratio = log_ratio.exp().to(p.dtype)
    return _clipped(ratio, advantages.detach(), clip_low=clip_low, clip_high=clip_high)


def cispo(p: Tensor, o: Tensor, advantages: Tensor, *, ratio_min: float, ratio_max: float) -> TokenLoss:
    """Return -clip(ratio) * A * p, the ratio detached: a clipped token keeps its gradient, with a bounded weight.

    CISPO, arXiv 2506.13585, eq. 4 and 5.

    Args:
        p: [k].
        o: [k].
        advantages: A, [k].
        ratio_min: bounds of the ratio itself, not of its distance to 1; 0 for no lower one,
        ratio_max: for example 5.
    """
    weight = clamp(p.detach() - o.detach()).exp().clamp(ratio_min, ratio_max)
    return TokenLoss(loss=_log_likelihood(p, weight * advantages.detach()))


def reinforce(p: Tensor, advantages: Tensor) -> TokenLoss:
    """Return -A * p: the policy gradient itself (REINFORCE, Williams, 1992). For samples of this very policy.

    Args:
        p: [k].
        advantages: A, [k].
    """
    return TokenLoss(loss=_log_likelihood(p, advantages.detach()))


def _log_likelihood(p: Tensor, weight: Tensor) -> Tensor:
    # A token that the policy cannot sample has no direction to move in; -inf * 0 would be NaN.
    return -weight * torch.where(p.isneginf(), 0.0, p)


def sapo(p: Tensor, o: Tensor, advantages: Tensor, *, tau_positive: float, tau_negative: float) -> TokenLoss:
    """Return -4 / tau * sigmoid(tau * (ratio - 1)) * A: a gradient that fades instead of a clip.

    SAPO, arXiv 2511.20347. The gradient is -A * ratio * 4 s (1 - s) with s the sigmoid: -A at ratio 1.

    Args:
        p: [k].
        o: [k].
        advantages: A, [k].
        tau_positive: how fast it fades, where A > 0,
        tau_negative: and elsewhere; larger is faster.
    """
    ratio = clamp(p - o.detach()).exp()
    tau = torch.full_like(p, tau_negative).masked_fill(advantages > 0, tau_positive)
    return TokenLoss(loss=-4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages.detach())


def value(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> TokenLoss:
    """Return 1/2 max((V - G)^2, (clip(V) - G)^2), with V clipped to the old value +- clip.

    The critic's loss of PPO as OpenRLHF and verl have it: no gradient where V has already moved by
    more than clip towards G.

    Args:
        values: V, [k]; carries the gradient.
        old_values: V when the update began, [k].
        returns: G, [k].
        clip: in units of the return, or 0 for none.
    """
    target = returns.detach()
    loss = 0.5 * (values - target).square()
    if not clip:
        return TokenLoss(loss=loss)
    old = old_values.detach()
    bounded = 0.5 * (values.clamp(old - clip, old + clip) - target).square()
    larger = bounded.detach() > loss.detach()
    return TokenLoss(
        loss=torch.where(larger, bounded, loss), means={metrics.VALUE_CLIP_FRACTION: larger.to(values.dtype)}
    )
