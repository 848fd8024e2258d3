"""Defines generalised advantage estimation."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fourfold.algorithm.advantages.base import ADVANTAGES, AdvantageEstimator, factor, holes_note, turns_note

if TYPE_CHECKING:
    from fourfold.algorithm.packed import PackedRewards
    from fourfold.arrays import Float64Array


@ADVANTAGES.register
class Gae(AdvantageEstimator):
    """Generalised advantage estimation with a critic."""

    kind: Literal["gae"] = "gae"
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per step."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """lambda, from 0 (one step ahead) to 1 (the whole return)."""
    lam_length_factor: float = Field(default=0.0, ge=0)
    """alpha of a lambda that grows with the n tokens of a sample: 1 - 1 / (alpha n), at least 0, not `lam`. VAPO
    (arXiv 2504.05118) has 0.05. 0: `lam`."""
    lam_critic: float | None = Field(default=None, ge=0, le=1)
    """lambda of the critic's targets G, if it differs from that of the policy (VAPO has 1)."""
    hole_mode: Literal["skip", "decay"] = "skip"
    """Tokens of the environment between two turns. skip: the next action is one step away. decay: gamma and lambda keep
    multiplying, as in OpenRLHF."""
    turn_discount: float = Field(default=1.0, gt=0, le=1)
    """Discount per turn: it multiplies what follows the last token of a turn, beside gamma, which counts tokens."""
    source: ClassVar[str] = "arXiv 1506.02438, eq. 16"
    needs_critic: ClassVar[bool] = True
    per_token: ClassVar[bool] = True

    def spread(self, rewards: PackedRewards) -> tuple[Float64Array, Float64Array | None]:
        """Return A and G = A + V, both [k].

        Where the next action is one step away, A_t = R_t + gamma V_next - V_t + gamma lam A_next. Across a hole of
        g - 1 positions, in which R and V are 0, the recursion runs g - 1 times more:

            A_t = R_t + (gamma lam)^(g-1) gamma V_next - V_t + (gamma lam)^g A_next

        At the end of a turn, V_next and A_next are also multiplied by turn_discount.
        """
        assert rewards.values is not None, "needs_critic is set"
        lam: float | Float64Array = self.lam
        if self.lam_length_factor:
            lam = (1 - 1 / (self.lam_length_factor * rewards.lengths).clip(1)).repeat(rewards.lengths)
        advantages = self._advantages(rewards, lam)
        same = self.lam_critic is None or (self.lam_critic == self.lam and not self.lam_length_factor)
        targets = advantages if same else self._advantages(rewards, self.lam_critic or 0.0)
        return advantages, targets + rewards.values

    def _advantages(self, rewards: PackedRewards, lam: float | Float64Array) -> Float64Array:
        """Return A, [k], for one lambda or that of each token, [k]."""
        assert rewards.values is not None, "needs_critic is set"
        steps, discount = rewards.steps(across_holes=self.hole_mode == "decay"), self.gamma * lam
        turns = rewards.turn_factors(self.turn_discount)
        ahead = discount ** (steps - 1) * self.gamma * turns * rewards.next_values()
        return rewards.sum_to_come(rewards.rewards + ahead - rewards.values, discount**steps * turns)

    def formula(self) -> str:
        grows = bool(self.lam_length_factor)
        ahead = f"{factor(self.gamma)}lambda A_next" if grows else f"{factor(self.gamma * self.lam)}A_next"
        lam = f"1 - 1 / max({self.lam_length_factor:g} n, 1) for a sample of n tokens" if grows else f"{self.lam:g}"
        critic = f"; G with lambda {self.lam_critic:g}" if self.lam_critic is not None else ""
        return (
            f"A_t = d_t + {ahead}, d_t = R_t + {factor(self.gamma)}V_next - V_t (GAE, gamma {self.gamma:g}, "
            f"lambda {lam}{critic}){holes_note(self.hole_mode, 0 if grows else self.gamma * self.lam)}"
            f"{turns_note(self.turn_discount)}"
        )
