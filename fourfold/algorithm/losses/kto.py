"""Defines KTO: single answers that are labelled desirable or undesirable."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fourfold import metrics
from fourfold.algorithm.losses.base import LOSSES, Reads
from fourfold.algorithm.losses.units import SampleInputs, SampleLoss, UnitLoss


@LOSSES.register
class KtoLoss(SampleLoss):
    """Kahneman-Tversky optimization; a label above 0 says that the answer is desirable."""

    kind: Literal["kto"] = "kto"
    beta: float = Field(default=0.1, gt=0)
    """Strength of the reference."""
    desirable_weight: float = Field(default=1.0, ge=0)
    """Weight of desirable answers; with the other one it balances labels of unequal number."""
    undesirable_weight: float = Field(default=1.0, ge=0)
    """Weight of undesirable answers."""
    source: ClassVar[str] = "arXiv 2402.01306, eq. 8"
    reads: ClassVar[Reads] = "labels"
    needs_reference: ClassVar[bool] = True
    measures_distance: ClassVar[bool] = True

    def compute(self, inputs: SampleInputs) -> UnitLoss:
        """Return w (1 - sigmoid(beta (x - z))) of every answer, with the sign turned for an undesirable one."""
        x, desirable = inputs.log_ratios(), inputs.labels > 0
        distance = max(0.0, inputs.distance)
        gain = self.beta * (x - distance)
        signed = gain.where(desirable, -gain)
        weights = signed.new_full(signed.shape, self.undesirable_weight).masked_fill(desirable, self.desirable_weight)
        # 1 - sigmoid(v) = sigmoid(-v), which keeps its digits where the sigmoid is near 1.
        loss = weights * (-signed).sigmoid()
        means = {
            metrics.KTO_DISTANCE: signed.new_full(signed.shape, distance),
            metrics.KTO_ACCURACY: (signed.detach() > 0).to(signed.dtype),
            metrics.KTO_MARGIN: signed.detach(),
        }
        return UnitLoss(loss=loss, means=means)

    def formula(self) -> str:
        b, w, v = f"{self.beta:g}", f"{self.desirable_weight:g}", f"{self.undesirable_weight:g}"
        return (
            f"l = {w} (1 - s({b} (x - z))) where r > 0, else {v} (1 - s({b} (z - x))), x = sum of p - f over the "
            f"answer, z = max(0, mean of x over the answers of other prompts), s the sigmoid"
        )
