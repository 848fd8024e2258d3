"""A loss of pairs of one's own: DPO in which a pair counts less, the surer the model orders it right already.

A recipe names the class; a relative path starts from the folder in which the command and the services start:

    fourfold run recipes/dpo.toml --set algorithm.loss.gamma=1.0 \
        --set algorithm.loss.kind=examples/losses/focal_pairs.py:FocalPairs

Keys of the class are keys of [algorithm.loss]. `fourfold plan` prints the formula.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from fourfold import SampleInputs, SampleLoss, UnitLoss


class FocalPairs(SampleLoss):
    """DPO, weighted by the probability of the wrong order to the power of `gamma`."""

    needs_reference: ClassVar[bool] = True
    source: ClassVar[str] = "focal loss (arXiv 1708.02002), of pairs"

    beta: float = Field(default=0.1, gt=0)
    """Slope of the probability over the difference of the log-ratios, per nat."""
    gamma: float = Field(default=2.0, ge=0)
    """Power of the weight. 0: DPO."""

    def compute(self, inputs: SampleInputs) -> UnitLoss:
        """Return -s(-beta d)^gamma log s(beta d), [u], with d = x_w - x_l."""
        from torch.nn.functional import softplus  # here: `fourfold plan` reads this file on machines without torch

        rewards = self.beta * inputs.log_ratios()
        chosen, rejected = inputs.sides(rewards)
        margin = chosen - rejected
        weight = (-margin).sigmoid() ** self.gamma
        return UnitLoss(
            loss=weight * softplus(-margin),
            means={**inputs.pair_means(rewards), "focal/weight": weight.detach()},
        )

    def formula(self) -> str:
        return (
            f"l = -s(-{self.beta:g} d)^{self.gamma:g} log s({self.beta:g} d), d = x_w - x_l, x = sum of p - f over the "
            f"answer; w preferred, l the other, s the sigmoid"
        )
