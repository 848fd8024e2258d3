"""Describes the rows of a recipe for `fourfold plan`: their number, how steps fill micro-batches, and some as text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from fourfold.config import Config
from fourfold.model.tokenizer import Tokenizer
from fourfold.nn.batching import split_by_tokens
from fourfold.plan.preflight import RenderedRow
from fourfold.text import format_bytes

from .normal import READS
from .row_source import RowSource
from .store import StoredSample, StoreMeta, TokenStore

_STEPS: Final = 20  # whose micro-batches are measured
_SHOWN_ROWS: Final = 3
_SIDES: Final = ("chosen", "rejected")


def describe_store(meta: StoreMeta) -> str:
    """Return form and counts of a source."""
    dropped = "; ".join(f"{count:,} {reason}" for reason, count in meta.dropped.items())
    unit = "pair" if READS[meta.form] == "pairs" else "sample"
    return (
        f"{meta.source}: {meta.rows:,} rows of the form {meta.form}; kept {meta.kept_rows:,}, dropped "
        f"{dropped or 'none'}. {meta.samples:,} samples with {meta.tokens:,} tokens, {meta.loss_tokens:,} of them "
        f"({meta.loss_tokens / meta.tokens:.0%}) in the loss; the longest {unit} has {meta.longest_unit:,}."
    )


def describe_steps(rows: RowSource, config: Config) -> str:
    """Return the steps of a pass, and what the first of them have."""
    groups, most = config.trainer.ranks // config.trainer.sequence_parallel_size, config.batch.tokens_per_micro_batch
    steps = [lengths for lengths in _lengths_of_steps(rows, config.batch.rows_per_step) if lengths]
    tokens, passes = sum(map(sum, steps)), 0
    for lengths in steps:
        ordered = sorted(lengths, reverse=True)
        passes += max(len(split_by_tokens(ordered[rank::groups], max_tokens=most)) for rank in range(groups))
    first = (
        f"The first {len(steps)} have on average {tokens / len(steps):,.0f} tokens, in {passes / len(steps):.3g} "
        f"micro-batches per rank that are {tokens / most / groups / passes:.0%} full."
    )
    return f"A pass has {rows.steps_of_pass:,} steps. {first}" if rows.steps_of_pass else first


def describe_reference(stores: Iterable[TokenStore], config: Config) -> str:
    """Return what the reference of all rows takes, which is computed before step 1."""
    tokens = sum(store.meta.tokens for store in stores)
    tokens *= 2 if config.algorithm.loss.measures_distance else 1
    by = f"reference services with {config.reference.source}" if config.needs_reference else "the trainer"
    return (
        f"computed by {by} before step 1: a forward pass over at most {tokens:,} tokens, which takes "
        f"{format_bytes(4 * tokens)} in data.cache, which runs share."
    )


def _lengths_of_steps(rows: RowSource, rows_per_step: int) -> Iterator[list[int]]:
    """Yield the tokens of each unit of the first steps."""
    for first in range(0, min(_STEPS * rows_per_step, len(rows)), rows_per_step):
        units = (rows.unit_at(position) for position in range(first, min(first + rows_per_step, len(rows))))
        yield [int(store.index["length"][numbers.start : numbers.stop].sum()) for store, numbers in units]


def render_rows(rows: RowSource, tokenizer: Tokenizer) -> list[RenderedRow]:
    """Return the first rows of step 1 as text."""
    found = list[RenderedRow]()
    for position in range(min(_SHOWN_ROWS, len(rows))):
        found += render_unit(*rows.unit_at(position), tokenizer)
    return found


def render_unit(store: TokenStore, numbers: Sequence[int], tokenizer: Tokenizer) -> Iterator[RenderedRow]:
    """Yield the samples of a unit, whose numbers in the store are given, as text."""
    reads = READS[store.meta.form]
    for number, i in enumerate(numbers):
        sample = store.sample(i)
        title = f"Row {sample.row:,} of {store.meta.source}"
        if reads == "pairs":
            title += f", {_SIDES[number]}"
        if reads == "labels":
            title += f", label {sample.value:g}"
        count = int(np.count_nonzero(sample.loss_mask))
        title += f": {len(sample.token_ids):,} tokens, {count:,} in the loss"
        yield RenderedRow(title=title, parts=tuple(_parts(sample, tokenizer)))


def _parts(sample: StoredSample, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    edges = [0, *(np.flatnonzero(np.diff(sample.loss_mask)) + 1).tolist(), len(sample.token_ids)]
    for begin, end in itertools.pairwise(edges):
        text = tokenizer.decode(sample.token_ids[begin:end].tolist(), skip_special=False)
        yield text, bool(sample.loss_mask[begin])
