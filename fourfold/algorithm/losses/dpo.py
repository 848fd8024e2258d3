"""Defines DPO and its forms: pairs of answers, compared with the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from fourfold.algorithm.losses.base import LOSSES
from fourfold.algorithm.losses.units import SampleInputs, SampleLoss, UnitLoss, log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor

Form = Literal["sigmoid", "ipo", "hinge", "robust", "apo-zero", "apo-down"]
_SMOOTHED: Final = ("sigmoid", "robust")


@LOSSES.register
class DpoLoss(SampleLoss):
    """Direct preference optimization: the preferred answer must gain more on the reference than the other one."""

    kind: Literal["dpo"] = "dpo"
    form: Form = "sigmoid"
    """sigmoid: DPO; with label_smoothing, cDPO. ipo: arXiv 2310.12036. hinge: SLiC, arXiv 2309.06657. robust: arXiv
    2403.00409. apo-zero, apo-down: arXiv 2408.06266."""
    beta: float = Field(default=0.1, gt=0)
    """Strength of the reference. With ipo, 1 / (2 beta) is the difference of x that is aimed at."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed share of pairs whose order is wrong; with sigmoid and robust."""
    average: bool | None = None
    """Divide x by the number of tokens of the answer. None: only with ipo. With sigmoid: Tulu 3's loss."""
    ld_alpha: float = Field(default=1.0, ge=0, le=1)
    """Weight of an answer's tokens beyond the length of the shorter one (LD-DPO, arXiv 2409.06411)."""
    source: ClassVar[str] = "arXiv 2305.18290, eq. 7"
    needs_reference: ClassVar[bool] = True

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if self.label_smoothing and self.form not in _SMOOTHED:
            raise ValueError(
                f"label_smoothing = {self.label_smoothing:g} has no effect on form = `{self.form}`; remove it, or use "
                f"`sigmoid` or `robust`"
            )
        if self.ld_alpha != 1 and self.averages:
            raise ValueError(
                f"ld_alpha = {self.ld_alpha:g} weighs tokens of sums, but the loss divides by the number of tokens; "
                f"set average = false, or remove ld_alpha"
            )
        return self

    @property
    def averages(self) -> bool:
        """True if x is divided by the number of tokens."""
        return self.form == "ipo" if self.average is None else self.average

    @property
    def tail_weight(self) -> float:
        return self.ld_alpha

    def compute(self, inputs: SampleInputs) -> UnitLoss:
        """Return the loss of every pair, by `form`."""
        ratios = inputs.log_ratios()
        x = inputs.averaged(ratios) if self.averages else ratios
        chosen, rejected = inputs.sides(x)
        return UnitLoss(loss=self._loss(chosen, rejected), means=inputs.pair_means(self.beta * x))

    def _loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        beta, e = self.beta, self.label_smoothing
        d = chosen - rejected
        match self.form:
            case "sigmoid":
                return -(1 - e) * log_sigmoid(beta * d) - e * log_sigmoid(-beta * d)
            case "ipo":
                return (d - 1 / (2 * beta)).square()
            case "hinge":
                return (1 - beta * d).clamp(min=0)
            case "robust":
                return (-(1 - e) * log_sigmoid(beta * d) + e * log_sigmoid(-beta * d)) / (1 - 2 * e)
            case "apo-zero":
                return 1 - (beta * chosen).sigmoid() + (beta * rejected).sigmoid()
            case "apo-down":
                return (beta * chosen).sigmoid() + 1 - (beta * d).sigmoid()

    def formula(self) -> str:
        b, e = f"{self.beta:g}", f"{self.label_smoothing:g}"
        kept = f"{1 - self.label_smoothing:g}"
        smoothed = f"-{kept} log s({b} d) {{sign}} {e} log s(-{b} d)"
        x = "(sum of p - f) / n" if self.averages else "sum of p - f"
        d = "d = x_w - x_l"
        text = {
            "sigmoid": smoothed.format(sign="-") if self.label_smoothing else f"-log s({b} d)",
            "ipo": f"(d - {1 / (2 * self.beta):g})^2",
            "hinge": f"max(0, 1 - {b} d)",
            "robust": f"({smoothed.format(sign='+')}) / {1 - 2 * self.label_smoothing:g}"
            if self.label_smoothing
            else f"-log s({b} d)",
            "apo-zero": f"1 - s({b} x_w) + s({b} x_l)",
            "apo-down": f"s({b} x_w) + 1 - s({b} d)",
        }[self.form]
        tail = f", tokens beyond the length of the shorter answer times {self.ld_alpha:g}" if self.ld_alpha != 1 else ""
        return f"l = {text}, {d}, x = {x} over the answer{tail}; w preferred, l the other, s the sigmoid"
