"""Defines the protocols of the models of one rank: `Policy` and `Critic`, which zero/models.py implements.

step/optimizer_step.py and ranks/rank_worker.py use them alone; the step on rank 0 uses `TrainerEngine` (engine.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor

from fourfold.nn.batching import TokenBatch
from fourfold.nn.router import Routers
from fourfold.weights.source.base import WeightSource
from fourfold_trainer.checkpoint.shards import Shard
from fourfold_trainer.work import ModelSize


class TrainedModel(Protocol):
    """One rank's model and optimizer. The methods run collectives: all ranks call the same one at the same time."""

    size: ModelSize
    """Size of the whole model."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of `loss`, a scalar, averaged over ranks; `last`: no other pass before `optimizer_step`."""

    def optimizer_step(self, learning_rate: float, *, max_grad_norm: float | None = None) -> float:
        """Clip the gradient and run `optimizer.step()`; return the norm before clipping. Not finite: no weight changed.

        A gradient longer than `max_grad_norm` is scaled down to that norm; 0: no limit; None: the recipe's.
        """

    def save(self, folder: Path, name: str) -> None:
        """Write this rank's file of the model called `name`, durably."""

    def read(self, folder: Path, name: str) -> Shard:
        """Return this rank's part of the files of all ranks. Raises WrongState on every rank when one cannot read."""

    def restore(self, shard: Shard) -> None:
        """Restore the result of `read`."""

    def close(self) -> None: ...


class Policy(TrainedModel, Protocol):
    """The policy on one rank."""

    @property
    def vocabulary_size(self) -> int: ...

    def logprobs(
        self, batch: TokenBatch, *, entropy: bool = False, energy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities and, if asked for, entropies, float32 [k]; with gradients outside of torch.no_grad.

        Entropies are in nats, of the distribution at the token's temperature. With `energy`, the squared norms of the
        gradients of the log-probabilities in the logits take their place, and nothing has a gradient.
        """

    @property
    def routers(self) -> Routers | None:
        """Routers of a mixture of experts; None for other models and unsupported routers."""

    def any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""

    def keep_gradient(self) -> int:
        """Keep the gradient for `compare_gradient`, in place of `optimizer_step`; return the bytes of this rank's part.

        No weight changes, and the next gradient begins at 0. 0: the gradient is not finite, or this rank has no part.
        """

    def compare_gradient(self) -> list[float]:
        """Compare the gradient with the kept one, in place of `optimizer_step`; forget both.

        Returns the dot product and the squared norms over all ranks, of the kept gradient first; empty if this one is
        not finite.
        """

    def export(self, folder: Path, *, ema: bool = False) -> None:
        """Gather the weights, or their average; rank 0 writes them."""

    def weight_source(self) -> WeightSource:
        """Return the source from which `WeightSender` reads this rank's weights."""


class Critic(TrainedModel, Protocol):
    """The critic on one rank."""

    def export(self, folder: Path) -> None:
        """Gather the weights; rank 0 writes them."""

    def values(self, batch: TokenBatch) -> Tensor:
        """Return float32 [k]: the value of the state before each target token."""
