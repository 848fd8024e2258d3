"""Defines the protocol of the trainer's engine: all ranks as one (`TrainerEngine`).

    service -> step/train_step.py -> TrainerEngine   (rank 0; implemented by ranks/distributed_engine.py)
                                          |  rank channel
                                     ranks/rank_worker.py -> step/optimizer_step.py -> Policy, Critic (each rank; zero/)
                                          '-> fourfold.weights.sender, reads `Policy.weight_source` -> engines

service/state.py numbers the versions of the weights. train_step.py uses `TrainerEngine` alone, and service/ its
extension `ServedEngine` (served_engine.py); both are tested with a fake. `Policy` and `Critic` are in trained_model.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

import numpy as np

from fourfold import metrics
from fourfold.arrays import EMPTY_FLOATS, Float32Array
from fourfold.nn.batching import TokenBatch
from fourfold_trainer.batches import UpdateBatch, ValueBatch, WeightedBatch
from fourfold_trainer.work import Machine

T = TypeVar("T")

# Names of sums over tokens from which metrics are computed; other sums have the name of a metric.
RATIO_SUM: Final = "sum of the mismatch ratio"
RATIO_SQUARE_SUM: Final = "sum of the squared mismatch ratio"
SAMPLE_COUNT: Final = "samples with loss tokens"
UNIT_COUNT: Final = "units of a loss of whole answers"
SCORE_SQUARES: Final = "squared scores, mean over a unit"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """Settings of one optimizer step that every rank needs besides its batches and the recipe."""

    learning_rate: float
    kl_coef: float = 0.0  # coefficient of the KL term in the loss; the controller may have changed the recipe's
    router_coef: float = 0.0  # coefficient of the routers' load-balancing loss
    token_count: int = 0  # tokens in the micro-batches of all ranks, without dummies
    distance: float = 0.0  # mean log-ratio of mismatched answers, for a loss that measures it
    first_epoch: bool = True  # False: the step's earlier updates have measured the mismatch of these samples


@dataclass(slots=True, kw_only=True, eq=False)
class UpdateSums:
    """Sums of optimizer steps, which can be added over ranks and over steps."""

    loss: float = 0.0  # value of the policy loss or the value loss
    token_count: int = 0  # loss tokens of the forward passes
    sums: dict[str, float] = field(default_factory=dict)  # sum over the tokens, by metric name
    lowest: dict[str, float] = field(default_factory=dict)
    highest: dict[str, float] = field(default_factory=dict)
    # [tokens with a finite behavior log-probability]: |old - behavior|. Kept whole, because a percentile is no sum.
    mismatches: Float32Array = field(default_factory=lambda: EMPTY_FLOATS)
    grad_norm: float = 0.0  # L2 norm before clipping, the same on all ranks; not finite: no weight was changed
    expert_counts: list[list[float]] = field(default_factory=list)  # [layers, experts]: tokens; empty without experts
    # No weight was changed because the correction rejected every token of every rank.
    all_rejected: bool = False

    def largest_log_ratio(self) -> float | None:
        """Return the largest |current - old log-probability| of a token in nats; None without a finite one."""
        ratios = self.lowest.get(metrics.RATIO_MIN, 0.0), self.highest.get(metrics.RATIO_MAX, math.inf)
        return max(abs(math.log(ratio)) for ratio in ratios) if 0 < min(ratios) <= max(ratios) < math.inf else None

    def add(self, other: UpdateSums) -> None:
        """Add the sums of another rank or another optimizer step, except what is the same on all ranks.

        That is `grad_norm` and `all_rejected`.
        """
        self.loss += other.loss
        self.token_count += other.token_count
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        for name, value in other.lowest.items():
            self.lowest[name] = min(self.lowest.get(name, value), value)
        for name, value in other.highest.items():
            self.highest[name] = max(self.highest.get(name, value), value)
        both = len(self.mismatches) > 0  # no copy if only one side has values
        self.mismatches = np.concatenate([self.mismatches, other.mismatches]) if both else other.mismatches
        pairs = zip(self.expert_counts, other.expert_counts, strict=True) if self.expert_counts else ()
        self.expert_counts = [[a + b for a, b in zip(*rows, strict=True)] for rows in pairs] or other.expert_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class SentWeights:
    """Result of a weight transfer."""

    weights_digest: bytes
    sent_bytes: int
    sums: bytes = b""  # of every tensor, over all ranks (`fourfold.weights.digest`); empty when they were left out


class EngineFailedError(Exception):
    """A rank died, or the channel to it broke. This error ends the service and never reaches a caller."""


class TrainerEngine(Protocol):
    """All ranks as one, as a step uses them. Every method blocks and is called from one thread.

    With sequence parallelism, a "rank" that receives batches is a group of ranks that share every micro-batch.
    """

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def machine(self) -> Machine:
        """Device of the ranks, and sizes of the models."""

    @property
    def change_count(self) -> int:
        """Number of calls so far that began to change weights, optimizers or gradients.

        If the number grew during a call that failed, the state of the ranks is unknown, and the service ends.
        """

    def update_policy(self, shares: Sequence[Sequence[UpdateBatch]], settings: UpdateSettings) -> UpdateSums:
        """Run one optimizer step of the policy. `shares` has the same number of batches for every rank."""

    def keep_gradient(self, shares: Sequence[Sequence[UpdateBatch]], settings: UpdateSettings) -> int:
        """Compute the gradient that `update_policy` would apply, and keep it on the ranks for `compare_gradient`.

        Weights and optimizer stay as they are. Returns the bytes that a rank keeps, of the rank with the most; 0: the
        gradient is not finite, and nothing was kept.
        """

    def compare_gradient(self, shares: Sequence[Sequence[UpdateBatch]], settings: UpdateSettings) -> list[float]:
        """Compute another such gradient and compare it with the kept one; forget both.

        Returns their dot product, the squared L2 norm of the kept one, and that of the other; empty: the other is not
        finite.
        """

    def update_critic(self, shares: Sequence[Sequence[ValueBatch]], settings: UpdateSettings) -> UpdateSums:
        """Run one optimizer step of the critic."""

    def forward_backward(self, shares: Sequence[Sequence[WeightedBatch]]) -> list[list[Float32Array]]:
        """Add the gradient of sum(weights * log-probabilities) to the pending one; return the log-probabilities."""

    def optim_step(self, *, learning_rate: float, max_grad_norm: float) -> float:
        """Apply the pending gradient; return its norm before clipping. Not finite: no weight was changed."""

    def discard_gradient(self) -> None: ...

    def compute_logprobs(
        self, shares: Sequence[Sequence[TokenBatch]], *, entropies: bool = False, energies: bool = False
    ) -> list[list[Float32Array]]:
        """Return log-probabilities of each rank's batches under the current weights, [k].

        With entropies or energies, but not both: [k, 2].
        """

    def compute_values(self, shares: Sequence[Sequence[TokenBatch]]) -> list[list[Float32Array]]:
        """Return the critic's value of the state before each target token, [k] for each batch."""

    def in_parallel(self, critic: Callable[[], None], policy: Callable[[], T]) -> T:
        """Run a function that calls the critic and one that calls the policy; return the result of `policy`.

        They run at the same time where the critic has ranks of its own, and `critic` then in another thread. An error
        of either is raised after both have ended.
        """
