"""Keeps an exponential moving average of a model's weights over optimizer steps, on the masters of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

# Elements that are swapped at once. Only one chunk is copied, where a whole copy of the masters might not fit.
_CHUNK: Final = 1 << 24


class WeightAverage:
    """The average of one rank's masters. It needs no communication, because every ZeRO stage shards elementwise."""

    @torch.no_grad()
    def __init__(self, masters: Sequence[Tensor], *, decay: float) -> None:
        """Begin with the current weights.

        Args:
            masters: float32; kept by reference.
            decay: share of the average that remains at each update, in (0, 1).
        """
        self._masters, self._decay = masters, decay
        self.tensors = [master.detach().clone() for master in masters]
        """One average for each master."""

    @torch.no_grad()
    def update(self) -> None:
        """Set average = decay * average + (1 - decay) * weights."""
        for average, master in zip(self.tensors, self._masters, strict=True):
            average.mul_(self._decay).add_(master, alpha=1 - self._decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Swap the average into the masters for the block, and the weights back at its end, bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, master in zip(self.tensors, self._masters, strict=True):
            flat, flat_master = average.view(-1), master.view(-1)
            for mine, theirs in zip(torch.split(flat, _CHUNK), torch.split(flat_master, _CHUNK), strict=True):
                kept = mine.clone()
                mine.copy_(theirs)
                theirs.copy_(kept)
