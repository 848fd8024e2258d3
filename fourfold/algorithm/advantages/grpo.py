"""Defines the advantage of GRPO."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fourfold.algorithm.advantages.base import ADVANTAGES, GroupEstimator, centred

if TYPE_CHECKING:
    from fourfold.arrays import Float64Array, Int64Array


@ADVANTAGES.register
class Grpo(GroupEstimator):
    """Scores in units of the unbiased standard deviation of their group."""

    kind: Literal["grpo"] = "grpo"
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to a group's standard deviation."""
    source: ClassVar[str] = "arXiv 2402.03300, section 4.1.2"

    def relative(self, scores: Float64Array, lengths: Int64Array) -> Float64Array:
        """Return (r - mean) / (std + epsilon), [n]."""
        scale = scores.std(ddof=1) + self.epsilon
        # The squares of tiny differences can all be 0.
        return centred(scores) / scale if scale > 0 else scores - scores

    def formula(self) -> str:
        return (
            f"(r - mean(r)) / (std(r) + {self.epsilon:g}), mean and std over the samples of a prompt; 0 when all "
            f"scored the same"
        )


@ADVANTAGES.register
class GrpoLeaveOneOut(GroupEstimator):
    """GRPO with mean and deviation of the other samples: a sample is not part of its own baseline."""

    kind: Literal["grpo-leave-one-out"] = "grpo-leave-one-out"
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation of the others."""
    source: ClassVar[str] = "NeMo-RL, use_leave_one_out_baseline"

    def relative(self, scores: Float64Array, lengths: Int64Array) -> Float64Array:
        """Return (r - mean) / (std + epsilon) of the others, [n]; not divided where the others are equal, or one."""
        result = scores - scores
        for index in range(len(scores)):
            others = scores[[i for i in range(len(scores)) if i != index]]
            alike = others.min() == others.max()  # the mean of equal numbers may differ from them by rounding
            distance = scores[index] - (others[0] if alike else others.mean())
            scale = 0.0 if alike else others.std(ddof=1) + self.epsilon
            result[index] = distance / scale if scale > 0 else distance
        return result

    def formula(self) -> str:
        return (
            f"(r - mean) / (std + {self.epsilon:g}), mean and std of the others' r over the samples of a prompt; r - "
            f"mean when the others scored the same"
        )
