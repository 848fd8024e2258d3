"""Holds rows out of training, and reads those of sets of their own."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fourfold.arrays import Int64Array
from fourfold.config.schema import Config
from fourfold.errors import ConfigError
from fourfold.sample.sample import Sample

from .row_source import CALL_TOKENS, RowSource, to_sample
from .store import TokenStore

log = logging.getLogger("fourfold.coordinator")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutRows:
    """A held-out set: some units of token stores, which are numbered one store after another."""

    name: str
    stores: Sequence[TokenStore]
    units: Int64Array  # [n], ascending

    def samples(self) -> Iterator[tuple[Sample, int]]:
        """Yield the samples, each with a number that rows with the same prompt share."""
        firsts = np.cumsum([0, *map(len, self.stores)], dtype=np.int64)
        for unit in self.units.tolist():
            number = int(np.searchsorted(firsts, unit, side="right")) - 1
            store = self.stores[number]
            for i in store.samples_of(unit - int(firsts[number])):
                name = f"{self.name}-{unit}-{i}"
                sample = to_sample(store.sample(i), sample_id=name, group_id=name, default_score=1.0)
                yield sample, int(store.index["group"][i])

    def steps(self, config: Config) -> RowSource:
        """Return the units in steps like those of the training, in the order of the files, each once.

        Raises:
            ConfigError: there is one labelled answer, which has no answer of another prompt beside it.
        """
        distant = config.algorithm.loss.measures_distance
        if distant and len(self.units) < 2:
            raise ConfigError(
                f"the held-out set {self.name} has {len(self.units)} row, and algorithm.loss.kind = "
                f"`{config.algorithm.loss.kind}` joins prompts with the answers of other rows; hold out at least 2"
            )
        most = len(self.units)
        if distant:  # the answers of other prompts, on which the distance is measured, must be in the same call
            most = min(most, max(CALL_TOKENS // (3 * max(store.meta.longest_unit for store in self.stores)), 2))
        return RowSource(
            self.stores,
            units=self.units,
            rows_per_step=min(config.batch.rows_per_step, most),
            seed=config.seed,
            shuffled=False,
            passes=1.0,
            mismatched_tokens=config.model.max_context_tokens if distant else 0,
        )


def check_overlap(held_out: HeldOutRows, train: Sequence[TokenStore], *, fails: bool) -> None:
    """Compare the prompts of a set with those of the training rows.

    Raises:
        ConfigError: some are equal, and the recipe does not say that this is a warning.
    """
    both = np.isin(_prompts(held_out.stores), np.concatenate([_prompts([store]) for store in train]))
    if not (count := int(np.count_nonzero(both))):
        return
    text = f"data.eval {held_out.name}: {count:,} of {len(both):,} rows have a prompt that is trained on"
    if fails:
        raise ConfigError(f'{text}; remove these rows, or set data.eval_overlap = "warn"')
    log.warning("%s", text)


def _prompts(stores: Sequence[TokenStore]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return the numbers of the prompts; rows that have none, or only a begin token, are left out."""
    return np.concatenate([store.index["group"][store.index["prompt"] > 1] for store in stores])
