"""Defines the loss of VESPO: a soft weight of whole samples in place of a clip."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fourfold.algorithm.losses.base import LOSSES, LossInputs, PolicyLoss, TokenLoss, log_likelihood_loss
from fourfold.algorithm.ratios import clamp, segment_sum


@LOSSES.register
class VespoLoss(PolicyLoss):
    """REINFORCE weighted by a function of the whole sample's ratio, which is 1 at 1 and falls to 0 on both sides."""

    kind: Literal["vespo"] = "vespo"
    power_positive: float = Field(default=2.0, ge=0)
    """k where A >= 0: larger, and samples that have become less likely weigh less."""
    rate_positive: float = Field(default=3.0, ge=0)
    """b where A >= 0: larger, and samples that have become more likely weigh less."""
    power_negative: float = Field(default=3.0, ge=0)
    """k where A < 0."""
    rate_negative: float = Field(default=2.0, ge=0)
    """b where A < 0."""
    source: ClassVar[str] = "arXiv 2602.10693; defaults of TRL"
    compares_with_old: ClassVar[bool] = False
    corrects_lag: ClassVar[bool] = True
    trains_without_advantage: ClassVar[bool] = False

    def compute(self, inputs: LossInputs) -> TokenLoss:
        """Return -stop(w^k exp(b - b w)) A p, w = exp of the sample's sum of p - u, the sum clamped to +-20.

        A token whose u is not a number is left out of the sum.
        """
        p, u, advantages = inputs.logprobs.detach(), inputs.behavior_logprobs, inputs.advantages
        known = u.isfinite() & p.isfinite()
        log_w = clamp(segment_sum(p - u, inputs.segments, inputs.segment_count, known))[inputs.segments]
        positive = advantages >= 0
        power = log_w.new_full(log_w.shape, self.power_negative).masked_fill(positive, self.power_positive)
        rate = log_w.new_full(log_w.shape, self.rate_negative).masked_fill(positive, self.rate_positive)
        weight = (rate + power * log_w - rate * log_w.exp()).exp().to(p.dtype)
        return TokenLoss(loss=log_likelihood_loss(inputs.logprobs, weight * advantages))

    def formula(self) -> str:
        return (
            f"l = -stop(w^k exp(b - b w)) A p, w = exp(sum of p - u over the sample), k, b = {self.power_positive:g}, "
            f"{self.rate_positive:g} where A >= 0, else {self.power_negative:g}, {self.rate_negative:g}"
        )
