"""Defines what a training step returns on rank 0, for its answer and its metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fourfold.algorithm.state import AlgorithmState
from fourfold.arrays import Float64Array
from fourfold_trainer.engine import UpdateSums
from fourfold_trainer.flops import Work
from fourfold_trainer.step.advantages import TokenTargets
from fourfold_trainer.step.batch import StepBatch
from fourfold_trainer.step.before_update import LaterNoise


@dataclass(slots=True, kw_only=True, eq=False)
class StepResult:
    """Everything that a step computed, for its answer and its metrics."""

    step: int  # 1 for the first
    algorithm_state: AlgorithmState  # for the next step
    batch: StepBatch
    outcomes: Float64Array  # [B], shaped scores of trajectories, before they are compared within groups
    targets: TokenTargets
    kl_coef: float
    measured: dict[str, float] = field(default_factory=dict)  # metrics of `measure`, by name
    policy: UpdateSums = field(default_factory=UpdateSums)
    critic: UpdateSums = field(default_factory=UpdateSums)
    policy_norms: list[float] = field(default_factory=list)
    """Gradient norm of each optimizer step; not finite: the step changed nothing."""
    critic_norms: list[float] = field(default_factory=list)
    logprob_noise: float | None = None
    """Largest |p - o| of the first update, whose weights are those of o; None: o is p, or there was no update."""
    later_noise: LaterNoise | None = None  # in the steps that measure it
    nonfinite_losses: int = 0  # policy updates whose loss was not finite
    trained: set[int] = field(default_factory=set)  # trajectories that the policy was trained on
    policy_work: Work
    critic_work: Work
    micro_batch_count: int = 0  # micro-batches of the policy, dummies included
    dummy_count: int = 0
    forwarded_tokens: int = 0  # tokens of the policy's micro-batches, dummies included
    real_tokens: int = 0  # the same without dummies
    skipped_reason: str = ""
    """Why nothing was learned; empty when the policy changed, or the critic while it is trained alone."""

    @property
    def policy_updates(self) -> int:
        """Optimizer steps that changed the policy."""
        return sum(map(math.isfinite, self.policy_norms))
