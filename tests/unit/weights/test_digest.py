"""Tests that sums add up over any split and device, and that digests detect the errors of an update."""

from __future__ import annotations

import pytest
import torch

from fourfold.errors import InvalidInput
from fourfold.weights import tensor_sums
from fourfold.weights.digest import add_sums, differing_tensors, digest_of
from fourfold.weights.manifest import Manifest, TensorSpec, partition_spans
from fourfold.weights.tensor_sums import partial_sums, span_sums

_MODULUS = 1 << 64


def _reference(values: torch.Tensor, start: int) -> tuple[int, int]:
    size = values.element_size()
    words = [
        int.from_bytes(bytes(w), "little") for w in values.contiguous().view(torch.uint8).reshape(-1, size).tolist()
    ]
    return sum(words) % _MODULUS, sum((start + i + 1) * w for i, w in enumerate(words)) % _MODULUS


def _random(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("count", [1, 15, 16, 17, 64, 3 * 64 + 5])
def test_sums_are_what_their_definition_says(dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_sums, "_ROW", 16)
    monkeypatch.setattr(tensor_sums, "_ROWS", 4)
    values = _random(count, dtype)
    assert span_sums(values, 12345) == _reference(values, 12345)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_accelerator_path_gives_the_same_sums(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_sums, "_DEVICE_BLOCK", 100)
    values = _random(1234, dtype)
    plain, weighted = tensor_sums._device_sums(values)
    assert (plain % _MODULUS, weighted % _MODULUS) == tensor_sums._cpu_sums(values) == _reference(values, 0)


def test_sums_wrap_around_at_64_bits() -> None:
    values = torch.full((10_000,), -1, dtype=torch.int32).view(torch.float32)
    for start in (0, 1 << 40):
        assert span_sums(values, start) == _reference(values, start)
    assert sum(((1 << 40) + i + 1) * 0xFFFFFFFF for i in range(10_000)) > _MODULUS


def test_blocks_of_full_size_do_not_overflow() -> None:
    values = torch.full((tensor_sums._ROW * tensor_sums._ROWS + 3,), -1, dtype=torch.int16).view(torch.bfloat16)
    n = len(values)
    assert span_sums(values, 0) == (n * 0xFFFF % _MODULUS, n * (n + 1) // 2 * 0xFFFF % _MODULUS)


def _manifest(counts: list[int], ranks: int) -> Manifest:
    tensors = [TensorSpec(name=f"t{i}", dtype="bfloat16", shape=(n,)) for i, n in enumerate(counts)]
    spans = [s for i, t in enumerate(tensors) for s in partition_spans(i, [t], ranks, 1000 * i)]
    return Manifest(tensors=tuple(tensors), spans=tuple(spans), shard_bytes=(1000 * len(counts),) * ranks)


def _sums(manifest: Manifest, tensors: list[torch.Tensor], rank: int | None = None) -> bytes:
    spans = manifest.spans if rank is None else manifest.spans_of_rank(rank)
    return partial_sums(manifest, ((s, tensors[s.tensor][s.start : s.start + s.count]) for s in spans))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_digest_of_the_ranks_together_is_that_of_the_whole(ranks: int) -> None:
    counts = [5, 100, 1, 333]
    tensors = [_random(n, torch.bfloat16, seed=n) for n in counts]
    manifest = _manifest(counts, ranks)
    parts = [_sums(manifest, tensors, rank) for rank in range(ranks)]
    assert all(len(part) == 16 * len(counts) for part in parts)
    assert add_sums(manifest, parts) == _sums(manifest, tensors)
    assert len(digest_of(manifest, add_sums(manifest, parts))) == 32


def test_swapped_and_changed_and_moved_elements_change_the_digest_and_name_the_tensor() -> None:
    counts = [64, 64]
    manifest = _manifest(counts, 2)
    tensors = [_random(n, torch.bfloat16, seed=i) for i, n in enumerate(counts)]
    before = _sums(manifest, tensors)
    assert differing_tensors(manifest.to_bytes(), before, before) == []

    swapped = [tensors[0], tensors[1].clone()]
    swapped[1][3], swapped[1][40] = tensors[1][40], tensors[1][3]
    assert differing_tensors(manifest.to_bytes(), before, _sums(manifest, swapped)) == ["t1"]

    flipped = [tensors[0].clone(), tensors[1]]
    flipped[0].view(torch.int16)[63] ^= 1
    assert differing_tensors(manifest.to_bytes(), before, _sums(manifest, flipped)) == ["t0"]

    exchanged = [tensors[1], tensors[0]]
    assert differing_tensors(manifest.to_bytes(), before, _sums(manifest, exchanged)) == ["t0", "t1"]
    assert digest_of(manifest, before) != digest_of(manifest, _sums(manifest, exchanged))


def test_the_digest_depends_on_the_manifest() -> None:
    tensors = [_random(10, torch.bfloat16)]
    one, two = _manifest([10], 1), _manifest([10], 2)
    assert _sums(one, tensors) == _sums(two, tensors)
    assert digest_of(one, _sums(one, tensors)) != digest_of(two, _sums(two, tensors))


def test_sums_of_a_wrong_length_are_refused() -> None:
    manifest = _manifest([4, 4], 1)
    with pytest.raises(InvalidInput, match="2 tensors need 32"):
        add_sums(manifest, [b"\0" * 16])
    with pytest.raises(InvalidInput, match="2 tensors need 32"):
        digest_of(manifest, b"\0" * 16)
