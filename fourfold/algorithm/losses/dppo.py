"""Defines the loss of DPPO: a trust region in probabilities in place of their ratio."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fourfold import metrics
from fourfold.algorithm.losses.base import LOSSES, LossInputs, PolicyLoss, TokenLoss, log_likelihood_loss
from fourfold.algorithm.ratios import clamp


@LOSSES.register
class DppoLoss(PolicyLoss):
    """A token is left out once its probability has moved too far from that in the engine, in the direction of A.

    A ratio bounds tokens of low probability too tightly, and those of high probability too little. The distance is the
    total variation between two outcomes: this token, or any other.
    """

    kind: Literal["dppo"] = "dppo"
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """Largest fall of the token's probability, from 0 to 1, where A <= 0."""
    clip_high: float = Field(default=0.2, gt=0, le=1)
    """Largest rise of the token's probability, from 0 to 1, where A > 0."""
    ratio_max: float = Field(default=0.0, ge=0)
    """Upper bound of exp(p - u), which is then a detached weight of p, as in CISPO. 0: no bound, and its gradient."""
    source: ClassVar[str] = "arXiv 2602.04879"
    token_wise: ClassVar[bool] = True
    compares_with_old: ClassVar[bool] = False
    corrects_lag: ClassVar[bool] = True
    trains_without_advantage: ClassVar[bool] = False

    def compute(self, inputs: LossInputs) -> TokenLoss:
        """Return -exp(p - u) A, and 0 for a token that is left out, or whose u is not a number."""
        p, u, advantages = inputs.logprobs, inputs.behavior_logprobs, inputs.advantages
        known = u.isfinite()
        moved = p.detach().exp() - u.masked_fill(~known, 0.0).exp()
        below = known & (advantages <= 0) & (moved < -self.clip_low)
        above = known & (advantages > 0) & (moved > self.clip_high)
        ratio = clamp(p - u.masked_fill(~known, 0.0)).exp()
        if self.ratio_max:
            loss = log_likelihood_loss(p, ratio.detach().clamp(max=self.ratio_max) * advantages)
        else:
            loss = -ratio * advantages
        return TokenLoss(
            loss=loss.masked_fill(below | above | ~known, 0.0),
            means={
                metrics.CLIP_FRACTION_LOW: (below & (advantages < 0)).to(p.dtype),
                metrics.CLIP_FRACTION_HIGH: above.to(p.dtype),
            },
        )

    def formula(self) -> str:
        loss = f"-stop(min(exp(p - u), {self.ratio_max:g})) A p" if self.ratio_max else "-exp(p - u) A"
        return (
            f"l = {loss}; 0 where A > 0 and exp(p) - exp(u) > {self.clip_high:g}, or A <= 0 and exp(p) - exp(u) < "
            f"-{self.clip_low:g}"
        )
