"""The exponential moving average of a model's weights, over optimizer steps.

Each rank averages its own masters: no communication, and right at every ZeRO stage. Until the first update it is the
weights that training began with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

# Elements that are exchanged at once: a copy of so many is all that it needs.
_CHUNK: Final = 1 << 24


class Average:
    """The average of one rank's masters."""

    @torch.no_grad()
    def __init__(self, masters: Sequence[Tensor], *, decay: float) -> None:
        """Begin with the present weights.

        Args:
            masters: float32; remembered, not copied.
            decay: share of the average that stays with each update, in (0, 1).
        """
        self._masters, self._decay = masters, decay
        self.tensors = [master.detach().clone() for master in masters]
        """One for each master."""

    @torch.no_grad()
    def update(self) -> None:
        """Take the present weights in: average = decay * average + (1 - decay) * weights."""
        for average, master in zip(self.tensors, self._masters, strict=True):
            average.mul_(self._decay).add_(master, alpha=1 - self._decay)

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """Put the average into the masters for as long as the block runs, bit for bit back at its end."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, master in zip(self.tensors, self._masters, strict=True):
            flat, flat_master = average.view(-1), master.view(-1)
            for begin in range(0, len(flat), _CHUNK):
                mine, theirs = flat[begin : begin + _CHUNK], flat_master[begin : begin + _CHUNK]
                kept = mine.clone()
                mine.copy_(theirs)
                theirs.copy_(kept)
