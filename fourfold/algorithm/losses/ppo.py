"""Defines the loss of PPO, with the bounds that GSPO shares."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from fourfold import metrics
from fourfold.algorithm.losses.base import LOSSES, LossInputs, PolicyLoss, TokenLoss

if TYPE_CHECKING:
    from torch import Tensor


class ClippedLoss(PolicyLoss):
    """Bounds of PPO and GSPO: the ratio is clipped to [1 - clip_low, 1 + clip_high]."""

    clip_low: float = Field(default=0.2, gt=0, le=1)
    """Distance below 1 at which the ratio is clipped."""
    clip_high: float = Field(default=0.2, gt=0)
    """Distance above 1 at which the ratio is clipped."""

    def narrowest_clip(self) -> float:
        return min(-math.log1p(-self.clip_low) if self.clip_low < 1 else math.inf, math.log1p(self.clip_high))

    def surrogate(self, ratio: Tensor, advantages: Tensor) -> TokenLoss:
        """Return -min(ratio A, clip(ratio) A): no gradient where the ratio is past a bound in the direction of A."""
        low, high = 1 - self.clip_low, 1 + self.clip_high
        below = (advantages < 0) & (ratio.detach() < low)
        above = (advantages > 0) & (ratio.detach() > high)
        return TokenLoss(
            loss=-(ratio * advantages).minimum(ratio.clamp(low, high) * advantages),
            means={
                metrics.CLIP_FRACTION_LOW: below.to(ratio.dtype),
                metrics.CLIP_FRACTION_HIGH: above.to(ratio.dtype),
            },
        )

    def surrogate_formula(self, ratio: str) -> str:
        return f"-min({ratio} A, clip({ratio}, {1 - self.clip_low:g}, {1 + self.clip_high:g}) A)"


@LOSSES.register
class PpoLoss(ClippedLoss):
    """PPO's clipped surrogate. Unequal bounds: DAPO, arXiv 2503.14476, eq. 10. Dual clip: arXiv 1912.09729."""

    kind: Literal["ppo"] = "ppo"
    dual_clip: float = Field(default=0.0, ge=0)
    """Bounds the loss of a negative advantage at this multiple of it; above 1, or 0: off."""
    source: ClassVar[str] = "arXiv 1707.06347, eq. 7"
    token_wise: ClassVar[bool] = True
    trains_without_advantage: ClassVar[bool] = False

    @model_validator(mode="after")
    def _bounds_from_above(self) -> Self:
        if self.dual_clip and self.dual_clip <= 1:
            raise ValueError(f"dual_clip = {self.dual_clip} must be above 1, or 0 for none")
        return self

    def compute(self, inputs: LossInputs) -> TokenLoss:
        """Return -min(ratio A, clip(ratio) A), at most dual_clip |A| where A < 0."""
        clipped = self.surrogate(inputs.ratio(), inputs.advantages)
        if not self.dual_clip:
            return clipped
        bound = -self.dual_clip * inputs.advantages
        beyond = (inputs.advantages < 0) & (clipped.loss.detach() > bound)
        return TokenLoss(
            loss=bound.where(beyond, clipped.loss),
            means={**clipped.means, metrics.DUAL_CLIP_FRACTION: beyond.to(clipped.loss.dtype)},
        )

    def formula(self) -> str:
        bound = f", at most {self.dual_clip:g} |A| where A < 0" if self.dual_clip else ""
        return f"l = {self.surrogate_formula('ratio')}{bound}"
