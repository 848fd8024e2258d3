"""What one rank's model computes in one forward and backward pass.

Legend: k loss tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.arrays import Float32Array, Int32Array
from fourfold.nn.batching import TokenBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyBatch:
    """One forward and backward pass of the policy on one rank."""

    tokens: TokenBatch
    segments: Int32Array  # [k], the sample of each token, 0 for the first
    weights: Float32Array  # [k], of each token's loss; 0: a dummy, which counts nowhere
    advantages: Float32Array  # [k]
    behavior_logprobs: Float32Array  # [k]
    old_logprobs: Float32Array  # [k], or [0]: the present ones, because the policy has not moved yet
    reference_logprobs: Float32Array  # [k], or [0] where the loss needs none

    @property
    def is_dummy(self) -> bool:
        """Whether nothing of it counts."""
        return not self.weights.any()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValueBatch:
    """One forward and backward pass of the critic on one rank."""

    tokens: TokenBatch
    weights: Float32Array  # [k]; 0: a dummy
    returns: Float32Array  # [k]
    old_values: Float32Array  # [k]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightedBatch:
    """One forward and backward pass of the policy on one rank, for a loss that is known by its derivatives."""

    tokens: TokenBatch
    weights: Float32Array  # [k], derivative of the loss by each log-probability; a dummy's is 0
