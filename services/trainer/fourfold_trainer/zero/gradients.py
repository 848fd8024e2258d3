"""Compares the gradients of two series of backward passes. Each rank compares the elements of its optimizer state.

DeepSpeed reduces, partitions and stores gradients in another way at each ZeRO stage, but always sets `grad` of a master
just before it calls the optimizer. There, `intercepted` sees them. An optimizer step in which the optimizer itself does
nothing leaves weights, masters and moments as they are, bit for bit, and ends the accumulation as any other step does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from fourfold_trainer.optim.master_weights import MasterWeights

# Elements that are converted to float64 at once.
_CHUNK: Final = 1 << 22

See = Callable[[Tensor, Tensor], None]
"""Gets a master and its gradient, which is valid during the call."""


@contextmanager
def intercepted(optimizer: Any, see: See) -> Iterator[None]:
    """Show all gradients that `optimizer` is called with, for the block, in place of its step.

    A hook of torch would not do: it cannot leave the step out.
    """

    def showing(_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            for master in group["params"]:
                if master.grad is not None:
                    see(master, master.grad)

    optimizer.step = showing
    try:
        yield
    finally:
        del optimizer.step  # the attribute of the instance, which hides the method


class KeptGradient:
    """The gradient of one rank's masters, kept for a comparison with a later one."""

    def __init__(self, masters: MasterWeights, device: torch.device) -> None:
        """Take the masters by reference; `device` is that of collectives."""
        self._shared, self._device = masters.shared, device
        self._slices: dict[Tensor, list[slice]] = defaultdict(list)  # without padding
        for piece in masters.slices:
            self._slices[masters.tensors[piece.master]].append(slice(piece.offset, piece.offset + piece.count))
        self._kept: dict[Tensor, Tensor] = {}
        self._products: list[Tensor] = []  # float64 [3] of each part: dot product, squared norms

    @property
    def byte_count(self) -> int:
        """Return the memory of the kept gradient on this rank."""
        return sum(kept.nbytes for kept in self._kept.values())

    def clear(self) -> None:
        """Forget both gradients."""
        self._kept.clear()
        self._products.clear()

    @torch.no_grad()
    def keep(self, master: Tensor, gradient: Tensor) -> None:
        """Keep the gradient of a master."""
        self._kept[master] = gradient.reshape(-1).clone()

    @torch.no_grad()
    def compare(self, master: Tensor, gradient: Tensor) -> None:
        """Compare the later gradient of a master with the kept one, which is forgotten."""
        later = gradient.reshape(-1)
        self._add(master, self._kept.pop(master, _zeros_like(later)), later)

    @torch.no_grad()
    def products(self) -> list[float]:
        """Return the dot product and the squared norms, of the kept gradient first, over all ranks; forget both.

        A collective.
        """
        for master, kept in self._kept.items():  # the later gradient has none
            self._add(master, kept, _zeros_like(kept))
        total = torch.zeros(3, dtype=torch.float64, device=self._device)
        for part in self._products:
            total += part.to(self._device)
        self.clear()
        if not self._shared:
            torch.distributed.all_reduce(total)
        return [float(number) for number in total.tolist()]

    def _add(self, master: Tensor, kept: Tensor, later: Tensor) -> None:
        for place in self._slices[master]:
            for parts in zip(torch.split(kept[place], _CHUNK), torch.split(later[place], _CHUNK), strict=True):
                one, two = (part.double() for part in parts)
                self._products.append(torch.stack([one @ two, one @ one, two @ two]))


def _zeros_like(vector: Tensor) -> Tensor:
    """Return zeros that take the memory of one."""
    return vector.new_zeros(1).expand(vector.shape)
