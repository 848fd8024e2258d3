"""Defines the loss of CISPO: a clipped weight in place of a clipped gradient."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from fourfold.algorithm.losses.base import LOSSES, LossInputs, PolicyLoss, TokenLoss, log_likelihood_loss


@LOSSES.register
class CispoLoss(PolicyLoss):
    """REINFORCE weighted by the clipped ratio: a clipped token keeps its gradient, with a bounded weight."""

    kind: Literal["cispo"] = "cispo"
    ratio_min: float = Field(default=0.0, ge=0)
    """Bounds of the ratio itself, not of its distance to 1; 0: no lower bound."""
    ratio_max: float = Field(default=5.0, gt=0)
    """Upper bound of the ratio."""
    source: ClassVar[str] = "arXiv 2506.13585, eq. 4 and 5"
    token_wise: ClassVar[bool] = True
    trains_without_advantage: ClassVar[bool] = False

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.ratio_min >= self.ratio_max:
            raise ValueError(f"ratio_min = {self.ratio_min} must be below ratio_max = {self.ratio_max}")
        return self

    def compute(self, inputs: LossInputs) -> TokenLoss:
        """Return -clip(ratio) A p, the ratio detached."""
        weight = inputs.ratio().detach().clamp(self.ratio_min, self.ratio_max)
        return TokenLoss(loss=log_likelihood_loss(inputs.logprobs, weight * inputs.advantages))

    def formula(self) -> str:
        return (
            f"l = -stop(clip(ratio, {self.ratio_min:g}, {self.ratio_max:g})) A p; no gradient through the clipped "
            f"ratio, and every token keeps its own"
        )
