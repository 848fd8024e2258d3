"""Defines the loss of REINFORCE."""

from __future__ import annotations

from typing import ClassVar, Literal

from fourfold.algorithm.losses.base import LOSSES, LossInputs, PolicyLoss, TokenLoss, log_likelihood_loss


@LOSSES.register
class ReinforceLoss(PolicyLoss):
    """The policy gradient itself, for samples of the policy that is updated."""

    kind: Literal["reinforce"] = "reinforce"
    source: ClassVar[str] = "Williams, 1992"
    token_wise: ClassVar[bool] = True
    compares_with_old: ClassVar[bool] = False
    trains_without_advantage: ClassVar[bool] = False

    def compute(self, inputs: LossInputs) -> TokenLoss:
        """Return -A p."""
        return TokenLoss(loss=log_likelihood_loss(inputs.logprobs, inputs.advantages))

    def formula(self) -> str:
        return "l = -A p"
