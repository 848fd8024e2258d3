"""Defines the result of a training step on rank 0, for its answer and its metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from fourfold.algorithm.state import AlgorithmState
from fourfold.arrays import Float64Array
from fourfold_trainer.batches import dummy_tokens
from fourfold_trainer.engine import UpdateSettings, UpdateSums
from fourfold_trainer.step.advantages import TokenTargets
from fourfold_trainer.step.batch import TrainBatch
from fourfold_trainer.step.before_update import LaterNoise
from fourfold_trainer.step.micro_batches import LossTokens, MicroBatches
from fourfold_trainer.work import Work

Measure: TypeAlias = Callable[[LossTokens, UpdateSettings], dict[str, float]]
"""Returns further metrics of a step from its loss tokens and the settings of its updates."""

NO_ADVANTAGE: Final = "NO_ADVANTAGE"
NO_ACTION_TOKENS: Final = "NO_ACTION_TOKENS"
ALL_REJECTED: Final = "ALL_REJECTED"
NOT_FINITE: Final = "NOT_FINITE"


@dataclass(slots=True, kw_only=True, eq=False)
class StepResult:
    """Everything that a step computed, for its answer and its metrics."""

    step: int  # 1 for the first
    algorithm_state: AlgorithmState  # for the next step
    batch: TrainBatch
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
    """The reason why nothing was learned; empty when the policy changed, or the critic while it is trained alone."""

    def add_update(self, sums: UpdateSums, members: Sequence[int], shares: Sequence[MicroBatches[Any]]) -> None:
        """Add an optimizer step of the policy on some samples, and the micro-batches that it had."""
        lengths: list[int] = self.batch.samples.lengths[list(members)].tolist()
        if not math.isfinite(sums.grad_norm):
            self.skipped_reason = ALL_REJECTED if sums.all_rejected else NOT_FINITE
        self.policy_norms.append(sums.grad_norm)
        self.nonfinite_losses += not math.isfinite(sums.loss)
        self.policy.add(sums)
        self.trained.update(self.batch.trajectory_of[list(members)].tolist())
        self.policy_work.add(lengths, rows=int(self.batch.loss_lengths[list(members)].sum()), backward=True)
        dummies = sum(not part for share in shares for part in share.members)
        self.micro_batch_count += sum(map(len, shares))
        self.dummy_count += dummies
        self.forwarded_tokens += sum(lengths) + dummies * dummy_tokens().token_count
        self.real_tokens += sum(lengths)

    @property
    def policy_updates(self) -> int:
        """Optimizer steps that changed the policy."""
        return sum(map(math.isfinite, self.policy_norms))

    def reason_to_skip(self, *, trains_policy: bool) -> str:
        """Return why the step learned nothing; empty when it did."""
        if self.policy_updates:
            return ""
        if trains_policy:
            return self.skipped_reason or (NO_ADVANTAGE if self.batch.loss_lengths.any() else NO_ACTION_TOKENS)
        # The critic is trained alone, and the step is skipped only if each of its gradients was not finite.
        failed = self.critic_norms and not any(map(math.isfinite, self.critic_norms))
        return NOT_FINITE if failed else self.skipped_reason
