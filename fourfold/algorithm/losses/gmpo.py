"""Defines the loss of GMPO: the geometric mean of clipped ratios."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fourfold import metrics
from fourfold.algorithm.losses.base import LOSSES, LossInputs, PolicyLoss, TokenLoss
from fourfold.algorithm.ratios import clamp, segment_mean


@LOSSES.register
class GmpoLoss(PolicyLoss):
    """GRPO with the geometric mean of a sample's ratios, each clipped before, which outliers move less."""

    kind: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(default=0.4, gt=0)
    """Distance below 0 at which p - o is clipped where A < 0."""
    clip_high: float = Field(default=0.4, gt=0)
    """Distance above 0 at which p - o is clipped where A > 0."""
    source: ClassVar[str] = "arXiv 2507.20673"
    trains_without_advantage: ClassVar[bool] = False

    def narrowest_clip(self) -> float:
        return min(self.clip_low, self.clip_high)

    def compute(self, inputs: LossInputs) -> TokenLoss:
        """Return -s A, where s is exp of the sample's mean of the clipped p - o."""
        log_ratio, advantages = clamp(inputs.logprobs - inputs.old_logprobs), inputs.advantages
        below = (advantages < 0) & (log_ratio.detach() < -self.clip_low)
        above = (advantages > 0) & (log_ratio.detach() > self.clip_high)
        clipped = log_ratio.clamp(-self.clip_low, self.clip_high).where(below | above, log_ratio)
        ratio = segment_mean(clipped, inputs.segments, inputs.segment_count).exp().to(log_ratio.dtype)[inputs.segments]
        return TokenLoss(
            loss=-ratio * advantages,
            means={
                metrics.CLIP_FRACTION_LOW: below.to(log_ratio.dtype),
                metrics.CLIP_FRACTION_HIGH: above.to(log_ratio.dtype),
            },
        )

    def formula(self) -> str:
        return (
            f"l = -s A, s = exp(mean of d over the sample), d = p - o, at most {self.clip_high:g} where A > 0, and "
            f"at least -{self.clip_low:g} where A < 0"
        )
