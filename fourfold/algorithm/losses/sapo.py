"""Defines the loss of SAPO: a gradient that fades with the ratio."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fourfold.algorithm.losses.base import LOSSES, LossInputs, PolicyLoss, TokenLoss


@LOSSES.register
class SapoLoss(PolicyLoss):
    """A gradient that fades with the distance of the ratio to 1 instead of a clip."""

    kind: Literal["sapo"] = "sapo"
    tau_positive: float = Field(default=1.0, gt=0)
    """Larger: the gradient fades faster with the distance of the ratio to 1, where A > 0."""
    tau_negative: float = Field(default=1.05, gt=0)
    """The same where A <= 0."""
    source: ClassVar[str] = "arXiv 2511.20347"
    token_wise: ClassVar[bool] = True
    trains_without_advantage: ClassVar[bool] = False

    def compute(self, inputs: LossInputs) -> TokenLoss:
        """Return -4 / tau * sigmoid(tau (ratio - 1)) A; gradient -A ratio 4 s (1 - s), s the sigmoid."""
        ratio, advantages = inputs.ratio(), inputs.advantages
        tau = ratio.new_full(ratio.shape, self.tau_negative).masked_fill(advantages > 0, self.tau_positive)
        return TokenLoss(loss=-4 / tau * (tau * (ratio - 1)).sigmoid() * advantages)

    def formula(self) -> str:
        return (
            f"l = -(4 / tau) sigmoid(tau (ratio - 1)) A, tau = {self.tau_positive:g} where A > 0, else "
            f"{self.tau_negative:g}"
        )
