"""The shared table of log-probabilities: rows, missing values, misuse."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from fourfold.errors import Internal, Overloaded
from fourfold_rollout.vllm.logprob_table import NO_SLOT, SLOT, LogprobTable, open_table, slot_of


@pytest.fixture
def table() -> Iterator[LogprobTable]:
    made = LogprobTable(3, 8)
    yield made
    made.close()


def test_what_a_worker_writes_is_taken_in_order(table: LogprobTable) -> None:
    cells = open_table(table.path, 3, 8)
    row = table.acquire(5)
    cells[row.slot, :5] = [-1, -2, -3, 0, -5]
    assert row.take(2).tolist() == [-1, -2]
    assert row.take(0).tolist() == []
    last = row.take(3)
    assert last.tolist() == [-3, 0, -5]
    assert last.dtype == np.float32
    cells[row.slot] = 7
    assert last.tolist() == [-3, 0, -5]  # a copy


def test_a_missing_value_is_an_error(table: LogprobTable) -> None:
    cells = open_table(table.path, 3, 8)
    row = table.acquire(4)
    cells[row.slot, [0, 1, 3]] = -1
    assert row.take(2).tolist() == [-1, -1]
    with pytest.raises(Internal, match="tokens 2 to 3"):
        row.take(2)


def test_nobody_finds_the_values_of_the_row_s_last_owner(table: LogprobTable) -> None:
    cells = open_table(table.path, 3, 8)
    old = table.acquire(8)
    slot = old.slot
    cells[slot] = -3
    old.release()
    for _ in range(2):
        assert table.acquire(8).slot != slot  # the others were free for longer
    row = table.acquire(8)
    assert row.slot == slot
    with pytest.raises(Internal, match="did not write it"):
        row.take(1)


def test_samples_that_find_no_room_are_to_come_again(table: LogprobTable) -> None:
    rows = [table.acquire(8) for _ in range(2)]
    table.check_room(1)
    with pytest.raises(
        Overloaded, match=r"2 samples are in the engine, .* and 2 more would pass its limit of 3"
    ) as caught:
        table.check_room(2)
    assert caught.value.retry_after
    rows[0].release()
    table.check_room(2)


def test_rows_come_back_once(table: LogprobTable) -> None:
    rows = [table.acquire(8) for _ in range(3)]
    assert sorted(row.slot for row in rows) == [0, 1, 2]
    with pytest.raises(Internal, match="more than 3 samples"):
        table.acquire(1)
    rows[1].release()
    rows[1].release()
    assert table.free_count == 1
    assert rows[1].slot == NO_SLOT
    with pytest.raises(Internal, match="given back"):
        rows[1].take(1)


def test_a_sample_longer_than_a_row_is_refused(table: LogprobTable) -> None:
    with pytest.raises(Internal, match="9 tokens; the rows for log-probabilities have 8 cells"):
        table.acquire(9)
    assert table.free_count == 3
    row = table.acquire(8)
    with pytest.raises(Internal, match="tokens 0 to 8"):
        row.take(9)


def test_a_closed_table_cannot_be_opened(table: LogprobTable) -> None:
    path = table.path
    cells = open_table(path, 3, 8)
    table.close()
    table.close()
    with pytest.raises(OSError):
        open_table(path, 3, 8)
    cells[0, 0] = 1  # it stays mapped


def test_memory_is_taken_when_it_is_touched() -> None:
    table = LogprobTable(4096, 1 << 17)  # 2 GiB
    table.acquire(10)
    descriptor = int(table.path.rsplit("/", 1)[1])
    assert os.fstat(descriptor).st_blocks * 512 < 1 << 20
    table.close()


@pytest.mark.parametrize(
    ("extra", "slot"), [({SLOT: 5}, 5), ({SLOT: 0}, 0), ({"other": 1}, NO_SLOT), ({}, NO_SLOT), (None, NO_SLOT)]
)
def test_the_slot_of_a_request(extra: dict[str, int] | None, slot: int) -> None:
    assert slot_of(SimpleNamespace(extra_args=extra)) == slot
    assert slot_of(None) == NO_SLOT
