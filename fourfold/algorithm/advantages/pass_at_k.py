"""Defines an advantage for pass@k: the best sample of a group alone is trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fourfold.algorithm.advantages.base import ADVANTAGES, GroupEstimator

if TYPE_CHECKING:
    from fourfold.arrays import Float64Array, Int64Array


@ADVANTAGES.register
class PassAtK(GroupEstimator):
    """The gain of the best sample over the second: an unbiased gradient of the best of k scores, k the group's size."""

    kind: Literal["pass-at-k"] = "pass-at-k"
    normalize: bool = True
    """Divide by the unbiased standard deviation of the group's scores, as in GRPO."""
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""
    source: ClassVar[str] = "arXiv 2503.19595"

    def relative(self, scores: Float64Array, lengths: Int64Array) -> Float64Array:
        """Return (r_1 - r_2) / (std + epsilon) for the best sample, 0 for the others, [n]; 0 if two are the best."""
        order = scores.argsort()
        best, second = int(order[-1]), int(order[-2])
        scale = scores.std(ddof=1) + self.epsilon if self.normalize else 1.0
        result = scores - scores
        result[best] = (scores[best] - scores[second]) / scale if scale > 0 else 0.0
        return result

    def formula(self) -> str:
        scale = f" / (std(r) + {self.epsilon:g})" if self.normalize else ""
        return f"(r - second largest r){scale} for the sample of a prompt with the largest r, 0 for its others"
