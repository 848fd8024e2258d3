"""Rows that are read in advance: they count as taken when the loop takes them, and not before."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fourfold import metrics as m
from fourfold.config.schema import AsynchronyConfig
from fourfold.errors import WrongState
from fourfold.sample import Sample
from fourfold_coordinator.rows.row_source import RowBatch, RowSource
from fourfold_coordinator.state.run_position import RunPosition
from fourfold_coordinator.training.prepared_reference import PreparedReference
from fourfold_coordinator.training.row_feed import RowFeed
from tests.unit.sample import made


class CountedRows:
    """Steps of two rows out of ten; `gate` holds a read."""

    def __init__(self) -> None:
        self.position, self.gate, self.reading = 0, threading.Event(), threading.Event()
        self.gate.set()

    @property
    def passes_done(self) -> float:
        return self.position / 10

    def take(self, step: int) -> RowBatch | None:
        if self.position >= 10:
            return None
        self.reading.set()
        assert self.gate.wait(10)
        first, self.position = self.position, self.position + 2
        samples = (made.row(), made.row())
        return RowBatch(samples=samples, slots=(0, 0), first_position=first, next_position=self.position)


async def resume(feed: RowFeed, position: int) -> None:
    at: Any = SimpleNamespace(next_position=position)
    await feed.resume(cast(RunPosition, at), version=0, rule=AsynchronyConfig(), lag_limit=0)


@pytest.fixture
def rows() -> CountedRows:
    return CountedRows()


@pytest.fixture
def feed(rows: CountedRows) -> RowFeed:
    return RowFeed(cast(RowSource, rows))


async def test_rows_that_were_only_read_are_not_counted(rows: CountedRows, feed: RowFeed) -> None:
    await resume(feed, 4)
    batch = await feed.take(3)
    await feed.look_ahead(4)
    assert (rows.position, feed.data_position) == (8, 6)
    assert feed.metrics(batch, policy_version=0)[m.DATA_PASS] == 0.6
    await feed.take(4)
    assert (rows.position, feed.data_position) == (8, 8)
    await feed.take(5)
    await feed.look_ahead(6)
    with pytest.raises(WrongState, match="all passes over the rows are done after 5 steps"):
        await feed.take(6)


async def test_rows_that_cannot_be_read_fail_their_own_step(rows: CountedRows) -> None:
    class Damaged:
        def attach(self, batch: RowBatch, step: int) -> tuple[Sample, ...]:
            if step == 2:
                raise WrongState("step 2 has no reference")
            return tuple(replace(sample, scorer="reference") for sample in batch.samples)

    feed = RowFeed(cast(RowSource, rows), cast(PreparedReference, Damaged()))
    ahead = await feed.look_ahead(1)
    taken = (await feed.take(1)).rows
    assert all(one is other and one.scorer == "reference" for one, other in zip(ahead, taken, strict=True))
    assert await feed.look_ahead(2) == ()
    with pytest.raises(WrongState, match="step 2 has no reference"):
        await feed.take(2)
    assert feed.data_position == 2


async def test_a_resumed_feed_forgets_what_was_read_in_advance(rows: CountedRows, feed: RowFeed) -> None:
    await feed.take(1)
    rows.gate.clear()
    rows.reading.clear()
    ahead = asyncio.create_task(feed.look_ahead(2))
    await asyncio.to_thread(rows.reading.wait, 10)
    ahead.cancel()
    await asyncio.sleep(0)
    assert not ahead.done(), "the thread would move the position after the resume"
    rows.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await ahead
    await feed.look_ahead(2)
    await resume(feed, 2)
    assert (rows.position, feed.data_position) == (2, 2)
    await feed.take(2)
    assert (rows.position, feed.data_position) == (4, 4)
