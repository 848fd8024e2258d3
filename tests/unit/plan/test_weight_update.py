"""Tests the cost model of weight updates."""

from __future__ import annotations

from fourfold.bounds import chunk_bytes
from fourfold.plan.weight_update import chain_seconds
from fourfold.weights.manifest import ALIGNMENT

_GB = 1 << 30


def test_a_chain_of_a_thousand_takes_little_longer_than_one_copy() -> None:
    one, many = (chain_seconds(15 * _GB, engines, 12.5e9) for engines in (1, 1000))
    assert 15 * _GB / 12.5e9 < one < many < 3 * one


def test_no_chunk_ends_within_an_element() -> None:
    sizes = [(256 << 20) + (_GB * number) // 100 // ALIGNMENT * ALIGNMENT for number in range(150)]
    assert {chunk_bytes(size) % ALIGNMENT for size in sizes} == {0}


def test_chunks_grow_with_the_shard_within_bounds() -> None:
    assert [chunk_bytes(size) for size in (0, 1 << 20, 512 << 20, 100 * _GB)] == [1 << 20, 1 << 20, 2 << 20, 8 << 20]
