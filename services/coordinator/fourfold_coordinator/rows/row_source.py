"""Takes the samples of each step out of token stores, in the order of `data/prompts.py`.

A step has `rows_per_step` units: answers, or pairs. The last step of a pass is smaller, so that each unit is in exactly
one step of a pass. A checkpoint stores one number, the position of the next unit.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from fourfold.arrays import EMPTY_FLOATS, Int64Array
from fourfold.config.sources import block_counts
from fourfold.errors import ConfigError
from fourfold.sample.mismatched import mismatched
from fourfold.sample.sample import Sample
from fourfold.seeds import derive_seed

from ..data.prompts import MixtureOrder, PassOrder
from .normal import READS, Reads
from .store import StoredSample, TokenStore

_DEFAULT_SCORE: dict[Reads, float | None] = {"answers": 1.0, "pairs": 1.0, "labels": None, "steps": 1.0}
"""Score of a row without a value of its own: weight 1, also of steps, whose labels are token rewards; of the chosen
answer of a pair, whose other one has 0."""

CALL_TOKENS: Final = 700_000
"""Most tokens of a call to the trainer: of 9 bytes with reference log-probabilities. A call takes at most 8 MiB."""

_LEAST_MARGIN: Final = 2.0**-100
"""Score of the chosen answer of a pair with a margin of 0: above that of the other one, and 0 in every sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """The samples of one step."""

    samples: tuple[Sample, ...]  # the samples of a unit are neighbours; of a pair, the chosen answer is the first
    slots: tuple[int, ...]  # of each sample, the place of its first token in the `ReferenceFile`
    first_position: int
    next_position: int  # of the unit after the step

    @property
    def units(self) -> int:
        """Number of answers or of pairs."""
        return self.next_position - self.first_position

    def parts(self) -> Iterator[RowBatch]:
        """Yield the samples in parts that one call can carry; the samples of a unit stay together.

        A larger step has other micro-batches at the borders of its parts, and the first update then sees rounding
        there.
        """
        begin, tokens = 0, 0
        for i, sample in enumerate(self.samples):
            new_unit = i and sample.group_id != self.samples[i - 1].group_id
            if new_unit and tokens + 2 * len(sample.token_ids) > CALL_TOKENS:
                yield self._part(begin, i)
                begin, tokens = i, 0
            tokens += len(sample.token_ids)
        yield self._part(begin, len(self.samples))

    def _part(self, begin: int, end: int) -> RowBatch:
        return replace(self, samples=self.samples[begin:end], slots=self.slots[begin:end])


class RowSource:
    """The samples of a run of rows, step by step."""

    def __init__(
        self,
        stores: Sequence[TokenStore],
        *,
        rows_per_step: int,
        seed: int,
        units: Int64Array | None = None,
        weights: Sequence[float] = (),
        shuffled: bool = True,
        passes: float | None = None,
        position: int = 0,
        mismatched_tokens: int = 0,
    ) -> None:
        """Order the units of some stores, which are numbered one store after another.

        Args:
            stores: at least one.
            rows_per_step: units of a step.
            seed: of the order.
            units: numbers of the units to train on, ascending, int64 [n]; None: all.
            weights: relative share of each store, or none: then all units form one pool.
            shuffled: whether every pass is shuffled; otherwise each is in the order of the files.
            passes: number of passes over the units of one pool; None: endless.
            position: of the first unit to take.
            mismatched_tokens: most tokens of a prompt with the answer of another unit, which every step gets beside
                its units; 0: it gets none. In one pool alone, and with at least 2 rows per step.

        Raises:
            ConfigError: there are fewer units than a step has, a store has no unit, or a mixture is to have passes.
        """
        self._mismatched_tokens = mismatched_tokens
        self._first_tokens = [0, *itertools.accumulate(store.meta.tokens for store in stores)]
        self.stores, self._rows_per_step, self.position = tuple(stores), rows_per_step, position
        self._firsts = np.cumsum([0, *map(len, stores)], dtype=np.int64)
        self._units = np.arange(self._firsts[-1], dtype=np.int64) if units is None else units
        count = len(self._units)
        if count < rows_per_step:
            raise ConfigError(
                f"batch.rows_per_step = {rows_per_step}, and the data has {count} rows to train on; lower it, or give "
                f"more data"
            )
        self._order: PassOrder | MixtureOrder
        if weights:
            if passes is not None:
                raise ConfigError(
                    f"data.passes = {passes:g}: a mixture with weights draws its sources at different rates, so that a "
                    f"pass has no end; set steps, or remove the weights"
                )
            self._order = MixtureOrder(self._ranges(), weights, seed=seed, shuffled=shuffled)
        else:
            self._order = PassOrder(count, seed=seed, shuffled=shuffled)
        self._digest_parts = [
            *(store.meta.digest for store in stores), repr(block_counts(weights)), repr(shuffled),
            hashlib.sha256(self._units.astype("<i8").tobytes()).hexdigest(),
        ]  # fmt: skip
        self._pass_units = 0 if weights else count  # 0: passes have no end
        self._end = None if passes is None else max(math.floor(passes * count + 0.5), 1)

    def _ranges(self) -> list[range]:
        """Return the places of each store's units among all; raise ConfigError if a store has none."""
        edges = np.searchsorted(self._units, self._firsts)
        sources = [range(int(a), int(b)) for a, b in itertools.pairwise(edges)]
        if empty := next((s for s, source in zip(self.stores, sources, strict=True) if not source), None):
            raise ConfigError(f"{empty.meta.source}: no row is left to train on; give more data, or remove it")
        return sources

    @property
    def token_count(self) -> int:
        """Tokens of all stores; slots of joined samples begin there."""
        return self._first_tokens[-1]

    @property
    def steps_of_first_pass(self) -> int:
        """Number of steps until a unit comes again; 0: that is not known."""
        return math.ceil(min(self._pass_units, self._end or self._pass_units) / self._rows_per_step)

    @property
    def steps(self) -> int | None:
        """Number of steps of all passes from position 0; None: endless."""
        if self._end is None:
            return None
        whole, rest = divmod(self._end, self._pass_units)
        return whole * self.steps_of_pass + math.ceil(rest / self._rows_per_step)

    @property
    def steps_of_pass(self) -> int:
        """Number of steps of one pass; 0: a mixture has no passes."""
        return math.ceil(self._pass_units / self._rows_per_step)

    def __len__(self) -> int:
        """Return the number of units to train on."""
        return len(self._units)

    @property
    def passes_done(self) -> float:
        """Passes over the data that have been taken, as 0.38; of a mixture, by the number of units alone."""
        return self.position / len(self._units)

    def digest(self) -> str:
        """Return a SHA-256 (hex) of tokens, units and order; a resumed run must have the same data."""
        return hashlib.sha256("\n".join(self._digest_parts).encode()).hexdigest()

    def take(self, step: int) -> RowBatch | None:
        """Return the samples of the next step and go on behind them; None: all passes are done.

        Args:
            step: number of the step, for the ids of the samples.
        """
        first, end = self.position, self.position + self._rows_per_step
        if self._pass_units:
            end = min(end, (first // self._pass_units + 1) * self._pass_units)
        if self._end is not None and (end := min(end, self._end)) <= first:
            return None
        self.position = end
        found = [sample for position in range(first, end) for sample in self._samples_at(position, step)]
        if self._mismatched_tokens:
            found += self._mismatched(first, [sample.group_id for sample, _ in found], step)
        samples, slots = zip(*found, strict=True)
        return RowBatch(samples=samples, slots=slots, first_position=first, next_position=end)

    def _mismatched(self, position: int, groups: Sequence[str], step: int) -> list[tuple[Sample, int]]:
        """Return the joined samples of the step of the first pass that began at the same place, in these groups.

        Later passes join the same prompts and answers, because their reference is computed before the first step. A
        last step of one unit has those of the step before.
        """
        start = position % self._pass_units
        stop = min(start + self._rows_per_step, self._pass_units, self._end or self._pass_units)
        if stop - start < 2:
            start, stop = start - self._rows_per_step, start
        found = [sample for place in range(start, stop) for sample in self._samples_at(place, step)]
        joined = mismatched([sample for sample, _ in found], max_tokens=self._mismatched_tokens)
        return [
            (replace(sample, sample_id=f"s{step:07d}-{start + i}-mismatched", group_id=groups[i % len(groups)]),
             self.token_count + found[(i + 1) % len(found)][1])
            for i, sample in enumerate(joined)
        ]  # fmt: skip

    def unit_at(self, position: int) -> tuple[TokenStore, range]:
        """Return the unit at a position of the order: its store, and the numbers of its samples there."""
        number, unit = self._unit_at(position)
        store = self.stores[number]
        return store, store.samples_of(unit)

    def _unit_at(self, position: int) -> tuple[int, int]:
        """Return the number of the store of a position of the order, and that of the unit there."""
        unit = int(self._units[self._order.at(position)])
        number = int(np.searchsorted(self._firsts, unit, side="right")) - 1
        return number, unit - int(self._firsts[number])

    def _samples_at(self, position: int, step: int) -> list[tuple[Sample, int]]:
        """Return the samples of the unit at a position, each with its slot."""
        number, unit = self._unit_at(position)
        store, group_id = self.stores[number], f"s{step:07d}-{position}"
        reads, found = READS[store.meta.form], list[tuple[Sample, int]]()
        for side, i in enumerate(store.samples_of(unit)):
            stored, name = store.sample(i), f"{group_id}-{side}"
            sample = to_sample(stored, sample_id=name, group_id=group_id, default_score=_DEFAULT_SCORE[reads])
            if reads == "pairs":
                sample = replace(sample, score=max(sample.score or 0.0, _LEAST_MARGIN) if side == 0 else 0.0)
            found.append((sample, self._first_tokens[number] + int(store.index[i]["offset"])))
        return found


def to_sample(stored: StoredSample, *, sample_id: str, group_id: str, default_score: float | None) -> Sample:
    """Return a stored sample as one for the trainer: without log-probabilities and versions, as no engine sampled it.

    `action_mask` is 1 from the first token of the loss on. The score is the row's weight, margin or label. The arrays
    are copies, so that the disk is read here, in a thread, and not by the event loop while it sends the batch.
    """
    loss_mask = stored.loss_mask.copy()
    action_mask = np.arange(len(loss_mask)) >= stored.prompt_length
    return Sample(
        sample_id=sample_id,
        group_id=group_id,
        token_ids=stored.token_ids.copy(),
        behavior_logprobs=EMPTY_FLOATS,
        action_mask=action_mask,
        loss_mask=loss_mask,
        version_spans=(),
        temperature=1.0,
        score=default_score if stored.value is None else stored.value,
        token_rewards=stored.labels,
    )


def split_held_out(stores: Sequence[TokenStore], groups: int, *, seed: int) -> tuple[Int64Array, Int64Array]:
    """Return the numbers of the units to train on and of those that are held out, int64, ascending.

    The seed draws `groups` prompts; all units with one of them are held out, so that no prompt is in both.

    Raises:
        ConfigError: the data has no more prompts than that.
    """
    found = np.concatenate([store.groups() for store in stores])
    distinct = np.unique(found)
    if len(distinct) <= groups:
        raise ConfigError(
            f"data.holdout.groups = {groups}, but the data has {len(distinct)} prompts; hold fewer out, or give "
            f"more data"
        )
    drawn = random.Random(derive_seed(seed, "holdout")).sample(range(len(distinct)), groups)
    held = np.isin(found, distinct[drawn])
    return np.flatnonzero(~held).astype(np.int64), np.flatnonzero(held).astype(np.int64)
