"""Defines the advantage of REINFORCE and REINFORCE++."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fourfold.algorithm.advantages.base import ADVANTAGES, AdvantageEstimator, holes_note, turns_note

if TYPE_CHECKING:
    from fourfold.algorithm.packed import PackedRewards
    from fourfold.arrays import Float64Array


@ADVANTAGES.register
class Reinforce(AdvantageEstimator):
    """REINFORCE++, and REINFORCE with discount: the return itself, without a baseline."""

    kind: Literal["reinforce"] = "reinforce"
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per step."""
    hole_mode: Literal["skip", "decay"] = "skip"
    """As for gae."""
    turn_discount: float = Field(default=1.0, gt=0, le=1)
    """As for gae."""
    source: ClassVar[str] = "arXiv 2501.03262"
    per_token: ClassVar[bool] = True

    def spread(self, rewards: PackedRewards) -> tuple[Float64Array, Float64Array | None]:
        """Return the discounted sum of the rewards to come, [k]."""
        steps = rewards.steps(across_holes=self.hole_mode == "decay")
        factors = self.gamma**steps * rewards.turn_factors(self.turn_discount)
        return rewards.sum_to_come(rewards.rewards, factors), None

    def formula(self) -> str:
        power = f"{self.gamma:g}^(k - t) " if self.gamma != 1 else ""
        notes = holes_note(self.hole_mode, self.gamma) + turns_note(self.turn_discount)
        return f"A_t = sum of {power}R_k over the tokens k from t on{notes}"
