"""What the trainer asks of its engine: all ranks as one (`Engine`), and one rank's models (`Policy`, `Critic`).

    servicer -> core -> step -> Engine --- RankGroup --- link ---> RankWorker -> Policy, Critic     (every rank)
                                           processes.py            update.py

`core` and `step` know `Engine` alone and are tested with a fake one; `update` and the worker
know `Policy` and `Critic` alone. `zero` implements those two, `ranks` the `Engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol, TypeVar

import numpy as np
from torch import Tensor

from fourfold.arrays import EMPTY_FLOATS, Float32Array
from fourfold.nn.batching import TokenBatch
from fourfold.nn.router import Routers
from fourfold.weights.manifest import Manifest
from fourfold.weights.source.base import WeightSource
from fourfold_trainer.batches import PolicyBatch, ValueBatch, WeightedBatch
from fourfold_trainer.checkpoint.shards import Shard
from fourfold_trainer.flops import Machine, ModelSize

T = TypeVar("T")

# Sums over tokens that metrics are made of, besides those that carry a metric's own name.
RATIO_SUM: Final = "sum of the ratio of trainer to engine"
RATIO_SQUARE_SUM: Final = "sum of its square"
SAMPLE_COUNT: Final = "samples with loss tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """What every rank must know of one optimizer step besides its batches and the recipe."""

    learning_rate: float
    kl_coef: float = 0.0
    """Of a KL term in the loss; the controller may have moved it away from the recipe's."""
    router_coef: float = 0.0
    """Of the routers' load-balancing loss."""
    token_count: int = 0
    """Tokens in the passes of all ranks, dummies left out."""


@dataclass(slots=True, kw_only=True, eq=False)
class UpdateSums:
    """What optimizer steps did, so that those of all ranks, and of several steps, can be added."""

    loss: float = 0.0
    """Value of what was minimised, policy term or value term."""
    token_count: int = 0
    """Loss tokens that were forwarded."""
    sums: dict[str, float] = field(default_factory=dict)
    """By metric name: sum over the tokens."""
    lowest: dict[str, float] = field(default_factory=dict)
    highest: dict[str, float] = field(default_factory=dict)
    mismatches: Float32Array = field(default_factory=lambda: EMPTY_FLOATS)
    """|old - behavior| of every token that has a finite behavior log-probability."""
    grad_norm: float = 0.0
    """L2 norm before clipping, the same on all ranks; not finite: no weight was changed."""
    expert_counts: list[list[float]] = field(default_factory=list)
    """[L, E]: tokens that each expert of each layer got; empty without experts."""
    all_rejected: bool = False
    """No weight was changed because the correction rejected every token."""

    def add_rank(self, other: UpdateSums) -> None:
        """Add another rank's part of the same optimizer step."""
        self.add(other)
        self.grad_norm, self.all_rejected = other.grad_norm, other.all_rejected

    def add(self, other: UpdateSums) -> None:
        """Add another optimizer step; its gradient's norm is not added."""
        self.loss += other.loss
        self.token_count += other.token_count
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        for name, value in other.lowest.items():
            self.lowest[name] = min(self.lowest.get(name, value), value)
        for name, value in other.highest.items():
            self.highest[name] = max(self.highest.get(name, value), value)
        self.mismatches = np.concatenate([self.mismatches, other.mismatches])
        pairs = zip(self.expert_counts, other.expert_counts, strict=True) if self.expert_counts else ()
        self.expert_counts = [[a + b for a, b in zip(*rows, strict=True)] for rows in pairs] or other.expert_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What a weight transfer sent."""

    weights_digest: bytes
    sent_bytes: int
    sums: bytes = b""
    """Of every tensor, over all ranks (`fourfold.weights.digest`); empty when they were left out."""


class EngineFailedError(Exception):
    """The ranks cannot go on: a link to one broke, or one died. Not for callers: it ends the service."""


class TrainerEngine(Protocol):
    """All ranks as one. Every method blocks and belongs to one thread, except `abort_weights`.

    With sequence parallelism "rank" means, where batches are dealt, a group of ranks that share every pass.
    """

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids."""

    @property
    def machine(self) -> Machine:
        """What the ranks run on, and the sizes of the models."""

    @property
    def change_count(self) -> int:
        """Number of calls so far that have begun to change weights, optimizers or gradients."""

    def update_policy(self, shares: Sequence[Sequence[PolicyBatch]], settings: UpdateSettings) -> UpdateSums:
        """Make one optimizer step: each rank its share, the same number of batches on every rank."""

    def update_critic(self, shares: Sequence[Sequence[ValueBatch]], settings: UpdateSettings) -> UpdateSums:
        """The same for the critic."""

    def forward_backward(self, shares: Sequence[Sequence[WeightedBatch]]) -> list[list[Float32Array]]:
        """Add the gradient of sum weights * log-probabilities to what waits; return the log-probabilities."""

    def optim_step(self, *, learning_rate: float, max_grad_norm: float) -> float:
        """Use up the gradient that waits; return its norm before clipping. Not finite: nothing was changed."""

    def discard_gradient(self) -> None:
        """Forget the gradient that waits."""

    def compute_logprobs(
        self, shares: Sequence[Sequence[TokenBatch]], *, entropies: bool = False
    ) -> list[list[Float32Array]]:
        """Return the log-probabilities of each rank's batches under the present weights.

        [k] for each batch; with entropies beside them [k, 2].
        """

    def compute_values(self, shares: Sequence[Sequence[TokenBatch]]) -> list[list[Float32Array]]:
        """Return the critic's value of the state before each asked token."""

    def in_parallel(self, critic: Callable[[], None], policy: Callable[[], T]) -> T:
        """Make the critic's calls and the policy's, at the same time where it can; return what the latter return.

        The critic's may come from another thread. An error of either is raised when both have ended.
        """

    def release_memory(self) -> None:
        """Give GPU memory that is kept for the next pass back, on all ranks: others on these GPUs need it."""

    def save(self, folder: Path) -> None:
        """Write every rank's state into an existing folder, durably."""

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote. Raises WrongState, before anything changes, when it does not fit."""

    def export(self, folder: Path, *, ema: bool = False) -> None:
        """Write the weights, or their average, as a Hugging Face model into an existing folder, durably."""

    def manifest(self) -> Manifest:
        """Return the layout of the weights."""

    @property
    def device_uuids(self) -> tuple[bytes, ...]:
        """CUDA UUIDs of the policy's ranks, 16 bytes each, in rank order; none on CPU."""

    @property
    def backends(self) -> tuple[str, ...]:
        """How weights can be sent from where they are, on every rank; best first."""

    def make_offers(
        self, epoch: int, backend: str, receiver_count: int, *, group: int = 0, timeout: float
    ) -> list[bytes]:
        """Start an epoch (group 0), or add the next group of receivers to it; one offer per rank."""

    def open_weights(self, epoch: int, *, timeout: float) -> None:
        """Meet the receivers."""

    def send_weights(self, epoch: int, policy_version: int, *, skip_sums: bool = False, timeout: float) -> Sent:
        """Send the present weights, and sum them up unless told not to."""

    def abort_weights(self, epoch: int) -> None:
        """End what is under way and close the epoch. From any thread."""

    def leave(self) -> None:
        """Leave the process group in good order; `close` follows."""

    def close(self) -> None:
        """End all ranks, whatever they do. From any thread."""


class Trained(Protocol):
    """One rank's model and optimizer. Collectives run inside: all ranks call the same method at the same time."""

    size: ModelSize
    """Of the whole model."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss`, averaged over ranks; `last` says that no more comes before `update`."""

    def optimizer_step(self, learning_rate: float, *, max_grad_norm: float | None = None) -> float:
        """Clip and step; return the gradient's norm before clipping. Not finite: nothing was changed.

        A longer gradient is scaled down to `max_grad_norm`; 0: none is; None: the recipe's.
        """

    def save(self, folder: Path, name: str) -> None:
        """Write this rank's file of the model called `name`, durably."""

    def read(self, folder: Path, name: str) -> Shard:
        """Return this rank's part of what all have saved. Raises WrongState on every rank when one of them cannot."""

    def restore(self, shard: Shard) -> None:
        """Go back to what `read` returned."""

    def close(self) -> None:
        """Leave the process group."""


class Policy(Trained, Protocol):
    """The model that samples and is trained."""

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids."""

    def logprobs(self, batch: TokenBatch, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return float32 [k] log-probabilities and, where asked, entropies; with gradients unless torch.no_grad is on.

        Entropies are in nats, of the distribution at the token's temperature.
        """

    @property
    def routers(self) -> Routers | None:
        """Those of a mixture of experts; None when it is none, or one whose routers are not known."""

    def any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""

    def export(self, folder: Path, *, ema: bool = False) -> None:
        """Gather the weights, or their average; rank 0 writes them."""

    def weight_source(self) -> WeightSource:
        """Return where this rank's weights are."""


class Critic(Trained, Protocol):
    """The model that estimates what will be scored."""

    def values(self, batch: TokenBatch) -> Tensor:
        """Return float32 [k]: the value of the state before each asked token."""
