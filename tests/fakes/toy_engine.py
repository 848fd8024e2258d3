"""Runs the real optimizer step on a toy policy and a toy critic, for any number of ranks, without DeepSpeed.

The policy is one table of logits, the same for every token. The critic is one number for each preceding token id.
Gradients can therefore be derived by hand, and a rank is nothing but its share of the batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fourfold.arrays import Float32Array
from fourfold.config import Config
from fourfold.nn.batching import TokenBatch
from fourfold.nn.router import Routers
from fourfold_trainer.batches import PolicyBatch, ValueBatch
from fourfold_trainer.engine import UpdateSettings, UpdateSums
from fourfold_trainer.step.optimizer_step import update_critic, update_policy
from tests.fakes.trainer_engine import VOCABULARY

T = TypeVar("T")


class Toy:
    """Implements `Policy` and `Critic` of one rank; all ranks share `table`."""

    def __init__(self, table: Tensor, *, any_rank: bool = True) -> None:
        self.table = table
        self.routers: Routers | None = None
        self.flags: list[bool] = []
        self.answer = any_rank
        self.gradient = torch.zeros_like(table)
        self.ends: list[bool] = []

    def logprobs(
        self, batch: TokenBatch, *, entropy: bool = False, energy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        temperatures = torch.from_numpy(batch.temperatures).double()
        rows = torch.log_softmax(self.table[None] / temperatures[:, None], 1)
        picked = rows.gather(1, torch.from_numpy(batch.targets).long().view(len(rows), -1)).squeeze(1)
        if energy:
            return picked, 1 - 2 * picked.exp() + rows.exp().square().sum(1)
        return picked, -(rows.exp() * rows).sum(1) if entropy else None

    def values(self, batch: TokenBatch) -> Tensor:
        return self.table[torch.from_numpy(batch.token_ids).long()[torch.from_numpy(batch.rows)]]

    def any_rank(self, flag: bool) -> bool:
        self.flags.append(flag)
        return self.answer

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.ends.append(last)
        self.gradient += torch.autograd.grad(loss, self.table)[0]

    def optimizer_step(self, learning_rate: float, *, max_grad_norm: float | None = None) -> float:
        return float(self.gradient.norm())


class ToyEngine:
    """Implements the part of `TrainerEngine` that a step uses: gradient descent, with gradients averaged over ranks."""

    def __init__(self, config: Config) -> None:
        self.config = config
        generator = torch.Generator().manual_seed(0)
        self.policy = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).requires_grad_()
        self.critic = torch.zeros(VOCABULARY, dtype=torch.float64).requires_grad_()
        self.gradients: list[Tensor] = []  # of the policy's updates
        self.critic_gradients: list[Tensor] = []
        self.policy_shares: list[Sequence[Sequence[PolicyBatch]]] = []
        self.critic_shares: list[Sequence[Sequence[ValueBatch]]] = []
        self.kept: Tensor | None = None
        self.uses: list[str] = []  # of each gradient of the policy: apply, keep or compare

    def update_policy(self, shares: Sequence[Sequence[PolicyBatch]], settings: UpdateSettings) -> UpdateSums:
        parts, gradient = self._passes("apply", shares, settings)
        self.policy_shares.append(shares)
        self.gradients.append(gradient)
        return self._finish(parts, self.policy, gradient, settings.learning_rate)

    def keep_gradient(self, shares: Sequence[Sequence[PolicyBatch]], settings: UpdateSettings) -> int:
        _, self.kept = self._passes("keep", shares, settings)
        return self.kept.nbytes if bool(self.kept.isfinite().all()) else 0

    def compare_gradient(self, shares: Sequence[Sequence[PolicyBatch]], settings: UpdateSettings) -> list[float]:
        _, two = self._passes("compare", shares, settings)
        one, self.kept = self.kept, None
        assert one is not None
        return [float(one @ two), float(one @ one), float(two @ two)] if bool(two.isfinite().all()) else []

    def update_critic(self, shares: Sequence[Sequence[ValueBatch]], settings: UpdateSettings) -> UpdateSums:
        self.critic_shares.append(shares)
        toys = [Toy(self.critic) for _ in shares]
        parts = [
            update_critic(toy, share, settings, self.config.critic, rank_count=len(shares))  # type: ignore[arg-type]
            for toy, share in zip(toys, shares, strict=True)
        ]
        self.critic_gradients.append(_average(toys, shares))
        return self._finish(parts, self.critic, self.critic_gradients[-1], settings.learning_rate)

    def in_parallel(self, critic: Callable[[], None], policy: Callable[[], T]) -> T:
        critic()
        return policy()

    def _passes(
        self, use: str, shares: Sequence[Sequence[PolicyBatch]], settings: UpdateSettings
    ) -> tuple[list[UpdateSums], Tensor]:
        self.uses.append(use)
        toys, parts = self._ranks(shares, settings, any_rank=True)
        flags = [flag for toy in toys for flag in toy.flags]
        if flags and not any(flags):  # the ranks run one after another here; real ones would agree on this
            toys, parts = self._ranks(shares, settings, any_rank=False)
        return parts, _average(toys, shares)

    def _ranks(
        self, shares: Sequence[Sequence[PolicyBatch]], settings: UpdateSettings, *, any_rank: bool
    ) -> tuple[list[Toy], list[UpdateSums]]:
        toys = [Toy(self.policy, any_rank=any_rank) for _ in shares]
        parts = [
            update_policy(toy, share, settings, self.config.algorithm, rank_count=len(shares))  # type: ignore[arg-type]
            for toy, share in zip(toys, shares, strict=True)
        ]
        return toys, parts

    @torch.no_grad()
    def compute_logprobs(
        self, shares: Sequence[Sequence[TokenBatch]], *, entropies: bool = False, energies: bool = False
    ) -> list[list[Float32Array]]:
        more = {"energy": True} if energies else {}

        def compute(batch: TokenBatch) -> Float32Array:
            logprobs, column = Toy(self.policy).logprobs(batch, entropy=entropies, **more)
            found: Float32Array = (logprobs if column is None else torch.stack([logprobs, column], 1)).float().numpy()
            return found

        return [[compute(b) for b in share] for share in shares]

    @torch.no_grad()
    def compute_values(self, shares: Sequence[Sequence[TokenBatch]]) -> list[list[Float32Array]]:
        return [[Toy(self.critic).values(b).float().numpy() for b in share] for share in shares]

    @torch.no_grad()
    def _finish(self, parts: list[UpdateSums], table: Tensor, gradient: Tensor, rate: float) -> UpdateSums:
        sums, *others = parts
        for other in others:
            sums.add(other)
        sums.grad_norm = float(gradient.norm())
        if bool(gradient.isfinite().all()):
            table -= rate * gradient
        return sums


def _average(toys: Sequence[Toy], shares: Sequence[Sequence[object]]) -> Tensor:
    for toy, share in zip(toys, shares, strict=True):
        assert toy.ends == [False] * (len(share) - 1) + [True]
    return sum((toy.gradient for toy in toys), torch.zeros_like(toys[0].gradient)) / len(toys)
