"""Defines the advantage of data and of selected answers: a weight, without comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fourfold.algorithm.advantages.base import ADVANTAGES, AdvantageEstimator

if TYPE_CHECKING:
    from fourfold.algorithm.packed import PackedRewards
    from fourfold.arrays import Float64Array


@ADVANTAGES.register
class Constant(AdvantageEstimator):
    """The score of the sample, without a baseline: the weight of a row, 1 unless the data says otherwise.

    Rewards of turns and a KL penalty in the reward count by their sum.
    """

    kind: Literal["constant"] = "constant"
    value: float | None = Field(default=None, gt=0)
    """Advantage of each token, in place of the score: of answers that `algorithm.selection` chose. None: the score."""
    source: ClassVar[str] = "weighted maximum likelihood"

    def spread(self, rewards: PackedRewards) -> tuple[Float64Array, Float64Array | None]:
        """Return the sum of the sample's rewards, or the value, for each of its tokens, [k]."""
        return rewards.totals() if self.value is None else self.value * rewards.steps(), None

    def formula(self) -> str:
        return "r" if self.value is None else f"{self.value:g}"
