"""Defines the loss of process reward models: scores at the ends of labelled steps."""

from __future__ import annotations

from typing import ClassVar, Literal

from fourfold import metrics
from fourfold.algorithm.losses.base import LOSSES, Reads, Trained
from fourfold.algorithm.losses.units import SampleInputs, SampleLoss, UnitLoss, log_sigmoid


@LOSSES.register
class StepLabelsLoss(SampleLoss):
    """Binary cross-entropy of each step: the score of the head is the log-odds that the step is right."""

    kind: Literal["step-labels"] = "step-labels"
    source: ClassVar[str] = "arXiv 2312.08935, eq. 2"
    reads: ClassVar[Reads] = "steps"
    trains: ClassVar[Trained] = "scores"

    def compute(self, inputs: SampleInputs) -> UnitLoss:
        """Return -(t log sigmoid(h) + (1 - t) log(1 - sigmoid(h))) of every step, h its score and t its label."""
        score, label = inputs.sums, inputs.labels
        # 1 - sigmoid(h) = sigmoid(-h), which keeps its digits where the sigmoid is near 1.
        loss = -(label * log_sigmoid(score) + (1 - label) * log_sigmoid(-score))
        right = (score.detach() > 0) == (label > 0.5)
        return UnitLoss(loss=loss, means={metrics.SCORE_ACCURACY: right.to(loss.dtype)})

    def formula(self) -> str:
        return "l = -(r log s(h) + (1 - r) log s(-h)), h = score of the head after the step; s the sigmoid"
