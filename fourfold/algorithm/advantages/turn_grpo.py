"""Defines GRPO on the returns of turns."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fourfold.algorithm.advantages.base import ADVANTAGES, AdvantageEstimator

if TYPE_CHECKING:
    from fourfold.algorithm.comparison import ScoredTurns
    from fourfold.arrays import Float64Array


@ADVANTAGES.register
class TurnGrpo(AdvantageEstimator):
    """GRPO on the returns of turns: all tokens of a turn have its advantage."""

    kind: Literal["turn-grpo"] = "turn-grpo"
    turn_discount: float = Field(default=1.0, ge=0, le=1)
    """Discount of the next turn's return, from 0 (the turn's own rewards) to 1 (all rewards that are still to come)."""
    baseline: Literal["turn", "group"] = "turn"
    """turn: a turn is compared with the turns of the same index of the other samples (arXiv 2505.11821, section 3); the
    only sample that has so many turns gets 0 there. group: with all turns of the prompt's samples (arXiv 2507.11948,
    section 3), each sample weighing the same."""
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""
    source: ClassVar[str] = "arXiv 2505.11821; 2507.11948"
    compares_samples: ClassVar[bool] = True
    compares_turns: ClassVar[bool] = True

    def compare_turns(self, turns: ScoredTurns) -> Float64Array:
        """Return (G - mean) / (std + epsilon), [u]; exactly 0 where there is nothing to compare, or all are equal."""
        same_turn = self.baseline == "turn"
        return turns.compare(turns.returns(self.turn_discount), same_turn=same_turn, epsilon=self.epsilon)

    def formula(self) -> str:
        peers = (
            "the turns of the same index" if self.baseline == "turn" else "all turns, each sample weighing the same,"
        )
        power = f"{self.turn_discount:g}^(m - j) " if self.turn_discount != 1 else ""
        returns = f"sum of {power}R_m over the turns m from j on" if self.turn_discount else "R_j"
        return (
            f"(G - mean(G)) / (std(G) + {self.epsilon:g}), G_j = {returns}, R the rewards of a turn's tokens, plus r "
            f"in the last turn; mean and std over {peers} of a prompt's samples"
        )
