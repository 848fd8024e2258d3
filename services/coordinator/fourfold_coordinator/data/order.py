"""Computes the endless order of the training prompts: passes over one pool of rows, or a weighted mixture of sources.

Every position is a function of the seed and of the position alone, so that a checkpoint stores nothing but a position.

    mixture of a and b, 3 : 1     block 0: a a b a ...   block 1: a b a a ...   each block has the same counts
    the rank in the block         position of the source's own passes: no row is repeated before all were drawn
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np

from fourfold.arrays import Int32Array
from fourfold.config.sources import MIXTURE_BLOCK, block_counts
from fourfold.seeds import derive_seed

# Number of shuffled passes and blocks in memory. Groups in flight may be in the pass before the newest one.
_KEPT: Final = 4


class PassOrder:
    """Endless passes over a number of rows, each of which has every row once."""

    def __init__(self, count: int, *, seed: int, stream: Sequence[object] = ("order",), shuffled: bool = True) -> None:
        """Shuffle each pass by the seed and the names of its stream; without `shuffled`, all passes are 0, 1, 2 ..."""
        self._count, self._seed, self._stream, self._shuffled = count, seed, stream, shuffled
        self._pass = lru_cache(maxsize=_KEPT)(self._shuffle)

    def at(self, position: int) -> int:
        """Return the row at a position, both from 0. Takes constant time, besides one shuffle of each pass."""
        number, offset = divmod(position, self._count)
        return int(self._pass(number)[offset]) if self._shuffled else offset

    def _shuffle(self, number: int) -> Int32Array:
        order = list(range(self._count))
        random.Random(derive_seed(self._seed, *self._stream, number)).shuffle(order)
        return np.array(order, np.int32)


class MixtureOrder:
    """Draws from several sources, each in passes of its own, with exact shares in every block of positions."""

    def __init__(
        self, sources: Sequence[Sequence[int]], weights: Sequence[float], *, seed: int, shuffled: bool = True
    ) -> None:
        """Mix the rows of sources, given as their indices, by relative weights."""
        self._seed, self._counts = seed, block_counts(weights)
        self._rows = [np.asarray(rows, np.int32) for rows in sources]
        self._passes = [
            PassOrder(len(rows), seed=seed, stream=("order", number), shuffled=shuffled)
            for number, rows in enumerate(sources)
        ]
        self._block = lru_cache(maxsize=_KEPT)(self._shuffle)

    def at(self, position: int) -> int:
        """Return the row at a position from 0. Takes constant time, besides one shuffle of each block and pass."""
        block, offset = divmod(position, MIXTURE_BLOCK)
        sources, ranks = self._block(block)
        source = int(sources[offset])
        own = block * self._counts[source] + int(ranks[offset])
        return int(self._rows[source][self._passes[source].at(own)])

    def _shuffle(self, block: int) -> tuple[Int32Array, Int32Array]:
        """Return source and rank (number of earlier positions of the source) of each position of a block, int32."""
        order = [source for source, count in enumerate(self._counts) for _ in range(count)]
        random.Random(derive_seed(self._seed, "mixture", block)).shuffle(order)
        sources, ranks = np.array(order, np.int32), np.empty(MIXTURE_BLOCK, np.int32)
        for source, count in enumerate(self._counts):
            ranks[sources == source] = np.arange(count, dtype=np.int32)
        return sources, ranks
