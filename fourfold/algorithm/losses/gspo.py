"""Defines the loss of GSPO: one ratio for a whole trajectory."""

from __future__ import annotations

from typing import ClassVar, Literal

from fourfold.algorithm.losses.base import LOSSES, LossInputs, TokenLoss
from fourfold.algorithm.losses.ppo import ClippedLoss
from fourfold.algorithm.ratios import MAX_LOG_RATIO, clamp, segment_mean


@LOSSES.register
class GspoLoss(ClippedLoss):
    """PPO's loss with one ratio for the whole trajectory. Its preset clips at 3e-4 and 4e-4: a mean moves less."""

    kind: Literal["gspo"] = "gspo"
    form: Literal["token", "sequence"] = "token"
    """Advantage in the gradient of a token. token: its own (GSPO-token, eq. 13 to 14). sequence: the sample's mean. The
    losses are equal, and so are the gradients if A and the weight are constant over a sample."""
    source: ClassVar[str] = "arXiv 2507.18071, eq. 5 to 7"
    trains_without_advantage: ClassVar[bool] = False

    def compute(self, inputs: LossInputs) -> TokenLoss:
        """Return -min(s A, clip(s) A), where s is exp of the sample's mean of p - o, the mean clamped to +-20."""
        p, segments = inputs.logprobs, inputs.segments
        mean = segment_mean(p - inputs.old_logprobs, segments, inputs.segment_count)
        if self.form == "sequence":
            log_ratio = clamp(mean)[segments]
        else:
            within = (mean.detach().abs() <= MAX_LOG_RATIO)[segments]
            slope = (p - p.detach()).masked_fill(~within, 0.0)  # value 0; gradient 1, and 0 outside of the clamp
            log_ratio = clamp(mean.detach())[segments] + slope
        return self.surrogate(log_ratio.exp().to(p.dtype), inputs.advantages)

    def formula(self) -> str:
        carried = "the token's own A" if self.form == "token" else "the sample's mean A"
        return (
            f"l = {self.surrogate_formula('s')}, s = exp(mean of p - o over the sample); its gradient carries {carried}"
        )
