"""Defines the loss of reward models: scores of pairs of answers."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fourfold import metrics
from fourfold.algorithm.losses.base import LOSSES, Trained
from fourfold.algorithm.losses.units import SampleInputs, SampleLoss, UnitLoss, log_sigmoid


@LOSSES.register
class BradleyTerryLoss(SampleLoss):
    """Bradley-Terry model: the difference of two scores is the log-odds that the first answer is preferred."""

    kind: Literal["bradley-terry"] = "bradley-terry"
    margin: bool = False
    """Subtract the difference of the labels of the two answers from that of their scores (Llama 2, arXiv
    2307.09288)."""
    center_coef: float = Field(default=0.0, ge=0)
    """Weight of the squared sum of the two scores, which keeps their mean near 0 (arXiv 2312.09244)."""
    source: ClassVar[str] = "arXiv 2203.02155, eq. 1"
    trains: ClassVar[Trained] = "scores"

    def compute(self, inputs: SampleInputs) -> UnitLoss:
        """Return -log sigmoid(h_w - h_l - m) + center_coef (h_w + h_l)^2 of every pair, h the score of the head."""
        chosen, rejected = inputs.sides(inputs.sums)
        difference = chosen - rejected
        if self.margin:
            preferred, other = inputs.sides(inputs.labels)
            difference = difference - (preferred - other)
        loss = -log_sigmoid(difference)
        if self.center_coef:
            loss = loss + self.center_coef * (chosen + rejected).square()
        means = inputs.pair_means(inputs.sums)
        means[metrics.SCORE_ACCURACY] = means.pop(metrics.PAIR_ACCURACY)
        return UnitLoss(loss=loss, means=means)

    def formula(self) -> str:
        margin = " - (r_w - r_l)" if self.margin else ""
        centre = f" + {self.center_coef:g} (h_w + h_l)^2" if self.center_coef else ""
        return f"l = -log s(h_w - h_l{margin}){centre}, h = score of the head; w preferred, l the other, s the sigmoid"
