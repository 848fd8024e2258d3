"""Tests manifests: layouts tile every tensor, bad bytes are refused, and scattered tensors are reassembled."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.errors import InvalidInput
from fourfold.weights.manifest import (
    MAX_MANIFEST_BYTES,
    AdapterSpec,
    Manifest,
    Span,
    TensorSpec,
    aligned,
    partition_count,
    partition_spans,
)

_DTYPES = ("bfloat16", "float16", "float32")


@st.composite
def layouts(draw: st.DrawFn) -> Manifest:
    """A ZeRO-3 layout: equal partitions, padded, in the order of parameter groups."""
    shapes = draw(st.lists(st.lists(st.integers(1, 7), min_size=0, max_size=3), min_size=1, max_size=6))
    dtype = draw(st.sampled_from(_DTYPES))
    ranks = draw(st.integers(1, 8))
    group_order = draw(st.permutations(range(len(shapes))))
    gap = draw(st.integers(0, 3))
    tensors = [TensorSpec(name=f"layer.{i}", dtype=dtype, shape=tuple(shape)) for i, shape in enumerate(shapes)]
    places: dict[int, int] = {}
    element = 0
    for index in group_order:
        places[index] = element
        element += partition_count(tensors[index].count, ranks) + gap
    item = tensors[0].item_bytes
    spans = [s for i, t in enumerate(tensors) for s in partition_spans(i, [t], ranks, places[i] * item)]
    return Manifest(tensors=tuple(tensors), spans=tuple(spans), shard_bytes=(element * item,) * ranks)


@settings(max_examples=40, deadline=None)
@given(layouts())
def test_bytes_are_canonical_and_round_trip(manifest: Manifest) -> None:
    data = manifest.to_bytes()
    again = Manifest.from_bytes(data)
    assert again == manifest
    assert again.to_bytes() == data
    assert again.sha256 == manifest.sha256
    assert len(manifest.sha256) == 32


def test_the_bytes_of_weights_stay_as_they_were() -> None:
    """Processes of other versions compare these digests."""
    digest = Manifest.from_bytes(_bytes(_document())).sha256.hex()
    assert digest == "c10db45d62276203dd04d81ccb5760a4813640236f43dc8ae41f3f4192dd4a5b"


def test_an_adapter_is_told_in_the_manifest() -> None:
    told = {"base": "0f" * 32, "rank": 8, "scale": 2.0}
    manifest = Manifest.from_bytes(_bytes({**_document(), "adapter": told}))
    assert manifest.adapter == AdapterSpec(rank=8, scale=2.0, base="0f" * 32)
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_a_tensor_with_fewer_elements_than_ranks_leaves_ranks_empty() -> None:
    spans = partition_spans(0, [TensorSpec(name="t", dtype="bfloat16", shape=(3,))], 8, 64)
    assert [(s.rank, s.start, s.count) for s in spans] == [(0, 0, 1), (1, 1, 1), (2, 2, 1)]


def test_aligned_rounds_up() -> None:
    assert [aligned(n) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]


def _document() -> dict[str, Any]:
    return {
        "format": 1,
        "shard_bytes": [24, 8],
        "spans": [[0, 0, 4, 0, 0], [0, 4, 2, 1, 0], [1, 0, 4, 0, 8]],
        "tensors": [["a", "bfloat16", [2, 3]], ["b", "float32", [4]]],
    }


def _bytes(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()


def _break(path: list[Any], value: Any) -> bytes:
    document = _document()
    target: Any = document
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    return _bytes(document)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (["format"], 2, "format 1"),
        (["tensors", 0, 0], "b", "occurs twice"),
        (["tensors", 0, 0], "", "tensor name"),
        (["tensors", 0, 0], "x" * 600, "tensor name"),
        (["tensors", 0, 1], "int8", "dtype 'int8'"),
        (["tensors", 0, 2], [2, 4], "do not tile"),
        (["tensors", 0, 2], [1, 3], "reach past its end"),
        (["tensors", 0, 2], [0, 3], "shape"),
        (["tensors", 1, 2], [5], "too early"),
        (["tensors", 0, 2], [True, 6], "wrong type"),
        (["tensors", 0, 2], 6, "wrong type"),
        (["tensors"], [], "no tensors"),
        (["spans", 1, 0], 1, "do not tile"),
        (["spans", 1, 0], 7, "tensor number 7"),
        (["spans", 1, 1], 3, "do not tile"),
        (["spans", 1, 2], 0, "do not tile"),
        (["spans", 1, 3], 2, "at rank 2 of 2"),
        (["spans", 1, 3], -1, "at rank -1 of 2"),
        (["spans", 0, 4], 2, "overlaps"),
        (["spans", 2, 4], 10, "multiple of 4"),
        (["spans", 2, 4], 12, "lies at bytes 12 to 28"),
        (["spans", 2, 4], -8, "lies at bytes -8"),
        (["spans", 2, 4], 8.0, "wrong type"),
        (["spans", 2], [1, 0, 4, 0], "wrong type"),
        (["spans"], [], "too early"),
        (["spans"], None, "wrong type"),
        (["shard_bytes", 0], 16, "lies at bytes 8 to 24"),
        (["shard_bytes"], [], "0 shards"),
        (["adapter"], {"base": "0f" * 32, "rank": 0, "scale": 2.0}, "an adapter of rank 0"),
        (["adapter"], {"base": "0f" * 32, "rank": 8, "scale": -1.0}, "scale -1.0"),
        (["adapter"], {"base": "0f" * 32, "rank": 8, "scale": 2}, "wrong type"),
        (["adapter"], {"base": "0F" * 32, "rank": 8, "scale": 2.0}, "64 hexadecimal digits"),
        (["adapter"], {"rank": 8, "scale": 2.0}, "wrong type"),
        (["adapter"], None, "wrong type"),
        (["shard_bytes", 0], 1 << 60, r"2\*\*50"),
    ],
)
def test_a_broken_manifest_is_refused_with_the_reason(path: list[Any], value: Any, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        Manifest.from_bytes(_break(path, value))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "format"),
        (_bytes(_document()) + b" ", "canonical"),
        (json.dumps(_document(), indent=1).encode(), "canonical"),
        (_bytes({**_document(), "extra": 1}), "canonical"),
        (b" " * (MAX_MANIFEST_BYTES + 1), "at most"),
    ],
)
def test_bytes_that_are_no_canonical_manifest_are_refused(data: bytes, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        Manifest.from_bytes(data)


def test_a_manifest_cannot_be_made_wrong() -> None:
    spec = TensorSpec(name="a", dtype="bfloat16", shape=(4,))
    with pytest.raises(InvalidInput, match="too early"):
        Manifest(tensors=(spec,), spans=(Span(tensor=0, start=0, count=3, rank=0, offset=0),), shard_bytes=(8,))
