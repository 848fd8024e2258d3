"""Tests the cost model of weight updates: its formulas against a simulation, and the sentence of the plan."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from fourfold.bounds import chunk_bytes
from fourfold.plan.weight_update import Link, chain_seconds, copies_seconds
from fourfold.weights.manifest import ALIGNMENT

_GB = 1 << 30


def simulate_chain(byte_count: int, links: Sequence[Link]) -> list[float]:
    """Return when each engine of a chain has everything; `links`: from the trainer to the first, and so on.

    A link carries one chunk at a time, in order; a chunk departs when it has arrived whole.
    """
    size = min(chunk_bytes(byte_count), byte_count)
    arrivals = [0.0] * math.ceil(byte_count / size)
    done: list[float] = []
    for link in links:
        seconds, free = link.seconds(size), 0.0
        for number, arrived in enumerate(arrivals):
            free = max(free, arrived) + seconds
            arrivals[number] = free
        done.append(free)
    return done


@pytest.mark.parametrize("engines", [1, 2, 64, 1024])
@pytest.mark.parametrize("byte_count", [1000, 100 << 20, 15 * _GB])
def test_the_formula_is_the_simulation_of_equal_links(engines: int, byte_count: int) -> None:
    link = Link(bytes_per_second=1.25e9)
    assert simulate_chain(byte_count, [link] * engines)[-1] == pytest.approx(chain_seconds(byte_count, engines, link))


def test_a_chain_of_a_thousand_takes_little_longer_than_one_copy() -> None:
    link = Link(bytes_per_second=12.5e9)
    one, many = chain_seconds(15 * _GB, 1, link), chain_seconds(15 * _GB, 1000, link)
    assert many < 3 * one
    assert copies_seconds(15 * _GB, 1000, link) == pytest.approx(1000 * one)


def test_one_slow_link_sets_the_pace_of_all_behind_it() -> None:
    fast, slow = Link(bytes_per_second=10e9), Link(bytes_per_second=1e9)
    done = simulate_chain(_GB, [fast, fast, slow, fast])
    assert done[1] < 0.3 * done[2] and done[3] == pytest.approx(done[2], rel=0.1)


def test_no_chunk_ends_within_an_element() -> None:
    sizes = [(256 << 20) + (_GB * number) // 100 // ALIGNMENT * ALIGNMENT for number in range(150)]
    assert {chunk_bytes(size) % ALIGNMENT for size in sizes} == {0}


def test_chunks_grow_with_the_shard_within_bounds() -> None:
    assert [chunk_bytes(size) for size in (0, 1 << 20, 512 << 20, 100 * _GB)] == [1 << 20, 1 << 20, 2 << 20, 8 << 20]
