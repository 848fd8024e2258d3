"""Defines the prompts of a run: held-out sets, and the others in an endless order.

The order is passes over one pool of rows, or a weighted mixture of sources. It is a function of the seed and the
position alone: `at(position)` is the same in every process, so that a checkpoint needs to store nothing but the
position.

    mixture of a and b, 3 : 1     block 0: a a b a ...   block 1: a b a a ...   each block has the same counts
    the rank in the block         position of the source's own passes: no row is repeated before all were drawn
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from fourfold.arrays import Int32Array
from fourfold.config.sources import MIXTURE_BLOCK, EvalSet, block_counts
from fourfold.errors import ConfigError
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """One task: the text for the policy, and the fields for a scorer."""

    index: int  # index of its row from 0; the rows of all training sources are numbered consecutively
    text: str  # with the chat template
    messages_json: str = ""  # its chat messages, a JSON array; empty: a plain text
    token_ids: Int32Array  # [n], n >= 1
    answer: str  # reference answer as text; empty if the task has none
    metadata_json: str  # the other fields of the row, a JSON object
    group_key: str  # task group; held out as a whole, and one cluster in the confidence interval of the evaluation
    source: str = ""  # name of its training source; empty if the recipe names none


def group_seed(seed: int, position: int, prompt: Prompt) -> int:
    """Return the request seed of the group of a prompt at a position of the order of training."""
    return derive_seed(seed, "train", position, prompt.index)


def own_prompt(text: str, *, answer: str, metadata_json: str) -> Prompt:
    """Return the prompt of a group of the agents' own, without row and tokens."""
    return Prompt(
        index=0,
        text=text,
        token_ids=np.empty(0, np.int32),
        answer=answer,
        metadata_json=metadata_json or "{}",
        group_key="",
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldOutSet:
    """The prompts of a held-out set and their sampling parameters."""

    rule: EvalSet
    prompts: tuple[Prompt, ...]

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def answer_count(self) -> int:
        """Number of answers to all prompts."""
        return len(self.prompts) * self.rule.samples_per_prompt


class PromptSet:
    """Training prompts in an endless, reproducible order, and held-out sets."""

    def __init__(
        self,
        *,
        train: Sequence[Prompt],
        held_out: Sequence[HeldOutSet],
        seed: int,
        weights: Mapping[str, float] | None = None,
        shuffled: bool = True,
        left_out: int = 0,
        warnings: Sequence[str] = (),
    ) -> None:
        """Order the training prompts by `seed`; own groups of agents need none.

        Args:
            train: prompts in the order of their files.
            held_out: sets that are never trained on.
            seed: of the order.
            weights: relative share of each training source, by name. Empty: all prompts form one pool.
            shuffled: whether every pass is shuffled; otherwise each is in the order of the files.
            left_out: number of training rows that are longer than `data.max_prompt_tokens`.
            warnings: probable mistakes in the data.

        Raises:
            ConfigError: a source has no training prompt.
        """
        self.train = tuple(train)
        self.held_out = tuple(held_out)
        self.left_out = left_out
        self.warnings = tuple(warnings)
        self._weights, self._shuffled = dict(weights or {}), shuffled
        self._order: PassOrder | MixtureOrder
        if self._weights and self.train:
            rows = defaultdict[str, list[int]](list)
            for number, prompt in enumerate(self.train):
                rows[prompt.source].append(number)
            if empty := next((name for name in self._weights if name not in rows), ""):
                raise ConfigError(f"the holdout leaves no training prompt of {empty!r}; lower data.holdout.groups")
            sources = [rows[name] for name in self._weights]
            self._order = MixtureOrder(sources, list(self._weights.values()), seed=seed, shuffled=shuffled)
        else:
            self._order = PassOrder(len(self.train), seed=seed, shuffled=shuffled)

    def at(self, position: int) -> Prompt:
        """Return the training prompt at `position` of the endless order, from 0."""
        return self.train[self._order.at(position)]

    @property
    def held_out_prompts(self) -> list[Prompt]:
        """Return the prompts of all held-out sets, in order."""
        return [prompt for held_out in self.held_out for prompt in held_out.prompts]

    def digest(self) -> str:
        """Return a SHA-256 (hex) of tokens, reference answers and order; a resumed run must have the same data."""
        digest = hashlib.sha256()
        for prompt in (*self.train, *self.held_out_prompts):
            for part in (prompt.token_ids.astype("<i4").tobytes(), prompt.answer.encode()):
                digest.update(len(part).to_bytes(8, "little") + part)
        if self._weights or not self._shuffled:
            digest.update(f"{block_counts([*self._weights.values()])} {self._shuffled}".encode())
        return digest.hexdigest()
