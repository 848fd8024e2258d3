"""What the trainer asks of its engine: all ranks as one (`Engine`), and one rank's model (`Policy`).

    servicer -> core -> Engine --- RankGroup --- link ---> RankWorker -> Policy     (every rank)
                                                           step.train

`core` knows `Engine` alone and is tested with a fake one; `step` and the worker know `Policy`
alone. `deepspeed_engine` is the one implementation of `Policy`, `ranks` the one of `Engine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor

from fourfold.nn.batching import TokenBatch
from fourfold.weights.manifest import Manifest
from fourfold.weights.source import WeightSource
from fourfold.wire import EMPTY_FLOATS, Float32Array
from fourfold_trainer.batching import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """What every rank must know of a step besides its micro-batches."""

    learning_rate: float
    token_count: int
    """N: loss tokens of the whole step."""
    rank_count: int
    clip_low: float
    clip_high: float
    kl_coef: float


@dataclass(slots=True, kw_only=True, eq=False)
class UpdateSums:
    """What a step did, as sums over tokens, so that those of all ranks can be added."""

    loss: float = 0.0
    """Policy loss, already divided by N."""
    token_count: int = 0
    """Loss tokens that were forwarded."""
    approx_kl: float = 0.0
    clipped_low: int = 0
    clipped_high: int = 0
    reference_kl: float = 0.0
    mismatch_kl: float = 0.0
    mismatches: Float32Array = field(default_factory=lambda: EMPTY_FLOATS)
    """|old - behavior| of every token that has a finite behavior log-probability."""
    grad_norm: float = 0.0
    """L2 norm before clipping, the same on all ranks; not finite: no weight was changed."""

    def add(self, other: UpdateSums) -> None:
        """Add another rank's sums."""
        self.loss += other.loss
        self.token_count += other.token_count
        self.approx_kl += other.approx_kl
        self.clipped_low += other.clipped_low
        self.clipped_high += other.clipped_high
        self.reference_kl += other.reference_kl
        self.mismatch_kl += other.mismatch_kl
        self.mismatches = np.concatenate([self.mismatches, other.mismatches])
        self.grad_norm = other.grad_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What a weight transfer sent."""

    weights_digest: bytes
    sent_bytes: int


class Engine(Protocol):
    """All ranks as one. Every method blocks and belongs to one thread, except `abort_weights`."""

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids."""

    def update(self, shares: Sequence[Sequence[MicroBatch]], settings: UpdateSettings) -> UpdateSums:
        """Train one step: each rank its share, the same number of micro-batches on every rank."""

    def compute_logprobs(self, shares: Sequence[Sequence[TokenBatch]]) -> list[list[Float32Array]]:
        """Return the log-probabilities of each rank's batches under the present weights."""

    def save(self, folder: Path) -> None:
        """Write every rank's state into an existing folder, durably."""

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote. Raises WrongState, before anything changes, when it does not fit."""

    def export(self, folder: Path) -> None:
        """Write a Hugging Face model into an existing folder, durably."""

    def manifest(self) -> Manifest:
        """Return the layout of the weights."""

    def make_offers(self, epoch: int, backend: str, receiver_count: int, *, timeout: float) -> list[bytes]:
        """Start an epoch; one offer per rank."""

    def open_weights(self, epoch: int, *, timeout: float) -> None:
        """Meet the receivers."""

    def send_weights(self, epoch: int, policy_version: int, *, timeout: float) -> Sent:
        """Send the present weights."""

    def abort_weights(self, epoch: int) -> None:
        """End what is under way and close the epoch. From any thread."""

    def leave(self) -> None:
        """Leave the process group in good order; `close` follows."""

    def close(self) -> None:
        """End all ranks, whatever they do. From any thread."""


class Policy(Protocol):
    """One rank's model and optimizer. Collectives run inside: all ranks call the same method at the same time."""

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids."""

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Return float32 [k] log-probabilities; they carry the gradient unless torch.no_grad is on."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss`, averaged over ranks; `last` says that no more comes before `update`."""

    def update(self, learning_rate: float) -> float:
        """Clip and step; return the gradient's norm before clipping. Not finite: nothing was changed."""

    def save(self, folder: Path) -> None:
        """Write this rank's file, durably."""

    def load(self, folder: Path) -> None:
        """Restore this rank's file."""

    def export(self, folder: Path) -> None:
        """Gather the weights; rank 0 writes them."""

    def weight_source(self) -> WeightSource:
        """Return where this rank's weights are."""

    def close(self) -> None:
        """Leave the process group."""
