"""Defines the advantage of on-policy distillation: how much likelier the teacher makes a token than the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fourfold.algorithm.advantages.base import ADVANTAGES, AdvantageEstimator, factor

if TYPE_CHECKING:
    from fourfold.algorithm.packed import PackedRewards
    from fourfold.arrays import Float64Array


@ADVANTAGES.register
class Distillation(AdvantageEstimator):
    """Reverse KL divergence to a teacher, `reference.source`, estimated on the sampled token.

    With s = grad p, the mean of -(p - f) s over the tokens that the policy may sample is minus the gradient of
    KL(policy || teacher) at that position, because the mean of s is 0: the estimate is unbiased for each prefix. The
    effect of a token on the prefixes that follow is left out, as with a discount of 0.
    """

    kind: Literal["distillation"] = "distillation"
    coef: float = Field(default=1.0, gt=0)
    """Factor of the advantage."""
    source: ClassVar[str] = "arXiv 2306.13649, eq. 3 with the reverse KL divergence, on the sampled token"
    per_token: ClassVar[bool] = True
    reads_reference: ClassVar[bool] = True

    def spread(self, rewards: PackedRewards) -> tuple[Float64Array, Float64Array | None]:
        """Return coef * (f - o) for each token, [k]."""
        return self.coef * rewards.rewards, None

    def formula(self) -> str:
        return f"A_t = -{factor(self.coef)}(o - f), f under the teacher"
