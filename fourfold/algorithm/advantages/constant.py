"""Defines the advantage of data: the score itself, which is the weight of a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

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
    source: ClassVar[str] = "weighted maximum likelihood"

    def spread(self, rewards: PackedRewards) -> tuple[Float64Array, Float64Array | None]:
        """Return the sum of the sample's rewards for each of its tokens, [k]."""
        return rewards.totals(), None

    def formula(self) -> str:
        return "r"
