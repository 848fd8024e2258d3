"""Defines losses of pairs without a reference: SimPO, CPO and ORPO."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Final, Literal

from pydantic import Field

from fourfold.algorithm.losses.base import LOSSES
from fourfold.algorithm.losses.units import SampleInputs, SampleLoss, UnitLoss, log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor

# log(1 - exp(a)) is infinite at a = 0, where all tokens of an answer have probability 1.
_HIGHEST_AVERAGE: Final = -1e-6


@LOSSES.register
class SimpoLoss(SampleLoss):
    """Simple preference optimization: mean log-probabilities must differ by a margin."""

    kind: Literal["simpo"] = "simpo"
    beta: float = Field(default=2.0, gt=0)
    """Factor of the mean log-probabilities."""
    gamma: float = Field(default=0.5, ge=0)
    """Margin of beta times their difference."""
    source: ClassVar[str] = "arXiv 2405.14734, eq. 6"

    def compute(self, inputs: SampleInputs) -> UnitLoss:
        """Return -log sigmoid(beta (a_w - a_l) - gamma) of every pair, a the mean of p."""
        rewards = self.beta * inputs.averaged(inputs.sums)
        chosen, rejected = inputs.sides(rewards)
        return UnitLoss(loss=-log_sigmoid(chosen - rejected - self.gamma), means=inputs.pair_means(rewards))

    def formula(self) -> str:
        margin = f" - {self.gamma:g}" if self.gamma else ""
        return f"l = -log s({self.beta:g} (a_w - a_l){margin}), a = mean of p; w preferred, l the other, s the sigmoid"


@LOSSES.register
class CpoLoss(SampleLoss):
    """Contrastive preference optimization: DPO with a uniform reference. The paper has algorithm.sft_coef = 1."""

    kind: Literal["cpo"] = "cpo"
    beta: float = Field(default=0.1, gt=0)
    """Factor of the summed log-probabilities."""
    source: ClassVar[str] = "arXiv 2401.08417, eq. 5"

    def compute(self, inputs: SampleInputs) -> UnitLoss:
        """Return -log sigmoid(beta (s_w - s_l)) of every pair, s the sum of p."""
        rewards = self.beta * inputs.sums
        chosen, rejected = inputs.sides(rewards)
        return UnitLoss(loss=-log_sigmoid(chosen - rejected), means=inputs.pair_means(rewards))

    def formula(self) -> str:
        return f"l = -log s({self.beta:g} (t_w - t_l)), t = sum of p; w preferred, l the other, s the sigmoid"


@LOSSES.register
class OrpoLoss(SampleLoss):
    """Odds ratio preference optimization. The paper has algorithm.sft_coef = 1."""

    kind: Literal["orpo"] = "orpo"
    beta: float = Field(default=0.1, gt=0)
    """Weight of the odds ratio; lambda in the paper."""
    source: ClassVar[str] = "arXiv 2403.07691, eq. 7"

    def compute(self, inputs: SampleInputs) -> UnitLoss:
        """Return -beta log sigmoid(o_w - o_l) of every pair, o = a - log(1 - exp(a)), a the mean of p."""
        averages = inputs.averaged(inputs.sums)
        bounded = averages.clamp(max=_HIGHEST_AVERAGE)
        chosen, rejected = inputs.sides(bounded - _log1mexp(bounded))
        loss = -self.beta * log_sigmoid(chosen - rejected)
        return UnitLoss(loss=loss, means=inputs.pair_means(self.beta * averages))

    def formula(self) -> str:
        return (
            f"l = -{self.beta:g} log s(o_w - o_l), o = a - log(1 - exp(a)), a = mean of p; w preferred, l the other, "
            f"s the sigmoid"
        )


def _log1mexp(values: Tensor) -> Tensor:
    """Return log(1 - exp(v)) for each v below 0 (Maechler, 2012): each branch keeps the digits that the other loses."""
    near = values > -math.log(2)
    # A branch that is not chosen must have a finite gradient, too.
    small = (-values.where(near, -1.0).expm1()).log()
    large = (-values.where(~near, -1.0).exp()).log1p()
    return small.where(near, large)
