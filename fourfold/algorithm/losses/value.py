"""Defines the critic's loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fourfold import metrics
from fourfold.algorithm.losses.base import TokenLoss

if TYPE_CHECKING:
    from torch import Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> TokenLoss:
    """Return 1/2 max((V - G)^2, (clip(V) - G)^2), [k], with V clipped to the old value +- clip; clip = 0: no clip.

    PPO's loss of the critic as OpenRLHF and verl have it: no gradient where V has already moved by more than `clip`
    towards G.
    """
    old_values, returns = old_values.detach(), returns.detach()
    loss = 0.5 * (values - returns).square()
    if not clip:
        return TokenLoss(loss=loss)
    bounded = 0.5 * (values.clamp(old_values - clip, old_values + clip) - returns).square()
    larger = bounded.detach() > loss.detach()
    return TokenLoss(loss=bounded.where(larger, loss), means={metrics.VALUE_CLIP_FRACTION: larger.to(values.dtype)})
