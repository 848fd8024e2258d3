"""Implements the Muon optimizer on master weights that ZeRO shards over the ranks.

For a matrix W [a, b] of a layer, with gradient G (clipped), momentum M, learning rate r, weight decay d:

    M <- m M + G                            U = orthogonalized(G + m M)         Nesterov
    W <- (1 - r d) W - r * 0.2 sqrt(max(a, b)) U

The orthogonalisation is that of Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). The
factor gives an update the root mean square of AdamW's updates, so that both share the learning rate and weight decay:
Liu et al., "Muon is Scalable for LLM Training" (arXiv:2502.16982, 2025), section 2.2. AdamW updates all else:
embeddings, heads, norms, biases, and weights that do not have two dimensions.

ZeRO cuts matrices anywhere, but the orthogonalisation needs whole ones. N ranks therefore handle N matrices at a time
and gather one on each rank:

    every rank    its pieces of G + m M of these  --all to all-->  one matrix whole on each rank, orthogonalized
    every rank    its pieces of U                 <--all to all--

We do not use DeepSpeed's Muon, which clips the orthogonal updates instead of the gradients, has another factor, and
compiles kernels, nor torch's, which needs whole matrices.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fourfold.nn.forward import LogprobHead, ValueHead
from fourfold.weights.source.fused_params import whole_shape
from fourfold_trainer.optim.master_weights import MasterWeights

MOMENTUM: Final = "momentum"
"""Key of M in the optimizer's state and in checkpoints."""
_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
_ITERATIONS: Final = 5
# Lower bound of the norm that is divided by. It is tiny because RL gradients are small and their size must not matter.
_EPSILON: Final = 1e-12
_RMS_OF_ADAMW: Final = 0.2


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that Muon trains, by name: weights of linear layers, except heads and tied embeddings."""
    heads_or_embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding | LogprobHead | ValueHead)
    }
    weights = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear | Conv1D)}
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) in weights - heads_or_embeddings
        and parameter.requires_grad
        and len(whole_shape(parameter)) == 2
    }


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return U S' V^T of a matrix U S V^T [a, b], with all of S' near 1, by five quintic Newton-Schulz iterations.

    Computes in the matrix's dtype; bfloat16 is accurate enough. Formula and coefficients are those of Jordan et al.
    """
    first, third, fifth = _COEFFICIENTS
    wide = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix  # the smaller of the two Gram matrices
    x = wide / wide.norm().clamp(min=_EPSILON)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = first * x + (third * gram + fifth * gram @ gram) @ x
    result: Tensor = x.mT if matrix.shape[0] > matrix.shape[1] else x
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Matrix:
    """A matrix, and the places of its elements."""

    shape: tuple[int, int]
    counts: tuple[int, ...]
    """Number of elements on each rank; in rank order they are the flattened matrix."""
    offset: int
    """Offset of this rank's elements in its master."""


class Muon(torch.optim.AdamW):
    """Applies Muon to parameter groups with `muon` set, and AdamW to the others.

    It is a subclass of AdamW because DeepSpeed takes one optimizer per model.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        shapes: Mapping[str, tuple[int, int]],
        *,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        """Begin with learning rate 0.

        Args:
            groups: parameter groups, each with `muon` and `weight_decay`.
            shapes: of all matrices in the groups with `muon`, by parameter name.
            momentum: m, in [0, 1).
            betas: of AdamW, as `eps`.
        """
        super().__init__(list(groups), lr=0.0, betas=betas, eps=eps, fused=True)
        self._shapes, self._momentum = dict(shapes), momentum
        self._matrices: dict[Tensor, list[_Matrix]] = {}
        self._rank, self._rank_count = 0, 1
        self._device, self._dtype = torch.device("cpu"), torch.float32

    def attach(self, masters: MasterWeights, *, device: torch.device, dtype: torch.dtype) -> None:
        """Exchange the places of the matrices with the other ranks. A collective; until then `step` skips them.

        Args:
            masters: of this rank.
            device: of the collectives and the orthogonalisation; the masters may be in main memory.
            dtype: of the collectives and the orthogonalisation.
        """
        self._device, self._dtype = device, dtype
        names = sorted(self._shapes)
        places = torch.full((len(names), 3), -1, dtype=torch.int64)  # of this rank: first, offset, master
        counts = torch.zeros(len(names), dtype=torch.int64)
        index = {name: i for i, name in enumerate(names)}
        for piece in masters.slices:
            if (i := index.get(piece.name)) is not None:
                assert counts[i] == 0, "a rank has one piece of a matrix"
                places[i] = torch.tensor([piece.first, piece.offset, piece.master])
                counts[i] = piece.count
        table = torch.cat([places, counts[:, None]], 1).to(device)
        tables = [table]
        if not masters.shared:
            self._rank, self._rank_count = torch.distributed.get_rank(), torch.distributed.get_world_size()
            tables = [torch.empty_like(table) for _ in range(self._rank_count)]
            torch.distributed.all_gather(tables, table)
        self._place(names, masters, torch.stack(tables).tolist())

    def _place(self, names: Sequence[str], masters: MasterWeights, tables: list[list[list[int]]]) -> None:
        """Set the matrices of each master from `tables`: by rank and matrix [first, offset, master, count], or -1."""
        found: dict[int, list[_Matrix]] = defaultdict(list)
        for i, name in enumerate(names):
            rows = [table[i] for table in tables]
            ends = 0
            for first, _, _, count in rows:
                assert count == 0 or first == ends, "ranks have a matrix's elements one after another"
                ends += count
            assert ends == math.prod(self._shapes[name]), "the ranks' pieces are the matrix"
            found[max(master for _, _, master, _ in rows)].append(
                _Matrix(
                    shape=self._shapes[name],
                    counts=tuple(count for _, _, _, count in rows),
                    offset=max(rows[self._rank][1], 0),
                )
            )
        # Every rank must have the same order, or the exchanges would mix matrices. Large ones come first, so that the
        # matrices of one exchange take the ranks about the same time.
        self._matrices = {
            masters.tensors[master]: sorted(ones, key=lambda one: one.shape, reverse=True)
            for master, ones in found.items()
        }

    def trains(self, master: Tensor) -> bool:
        """Return whether Muon updates a master, rather than AdamW."""
        return master in self._matrices

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the masters that have a gradient. A collective."""
        assert closure is None, "DeepSpeed passes no closure"
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["muon"]]
        try:
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if group["muon"]:
                for master in group["params"]:
                    if master.grad is not None and self.trains(master):
                        self._step_master(master, master.grad.reshape(-1), group["lr"], group["weight_decay"])

    def _step_master(self, master: Tensor, gradient: Tensor, rate: float, decay: float) -> None:
        state = self.state[master]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(master)
        momentum, weights = state[MOMENTUM].view(-1), master.view(-1)
        momentum.mul_(self._momentum).add_(gradient)
        all_matrices = self._matrices[master]
        for begin in range(0, len(all_matrices), self._rank_count):
            chunk = all_matrices[begin : begin + self._rank_count]
            places = [slice(one.offset, one.offset + one.counts[self._rank]) for one in chunk]
            pieces = [torch.add(gradient[p], momentum[p], alpha=self._momentum) for p in places]
            updates = self._orthogonalize(chunk, [piece.to(self._device, self._dtype) for piece in pieces])
            for one, place, update in zip(chunk, places, updates, strict=True):
                factor = _RMS_OF_ADAMW * math.sqrt(max(one.shape))
                weights[place].mul_(1 - rate * decay).add_(update.to(weights), alpha=-rate * factor)

    def _orthogonalize(self, chunk: Sequence[_Matrix], pieces: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return this rank's pieces of the orthogonalized matrices; there are at most as many matrices as ranks."""
        if self._rank_count == 1:
            return [orthogonalized(piece.view(one.shape)).reshape(-1) for one, piece in zip(chunk, pieces, strict=True)]
        mine = chunk[self._rank] if self._rank < len(chunk) else None
        sizes = [len(piece) for piece in pieces] + [0] * (self._rank_count - len(chunk))
        sizes_of_mine = list(mine.counts) if mine else [0] * self._rank_count
        whole = _exchange(torch.cat(list(pieces)), sizes, sizes_of_mine)
        if mine:
            whole = orthogonalized(whole.view(mine.shape)).reshape(-1)
        return torch.split(_exchange(whole, sizes_of_mine, sizes), sizes)[: len(chunk)]


def _exchange(elements: Tensor, sizes: list[int], received_sizes: list[int]) -> Tensor:
    """Send each rank its part of the elements; return the received elements in rank order."""
    received = elements.new_empty(sum(received_sizes))
    torch.distributed.all_to_all_single(received, elements, received_sizes, sizes)
    return received
