"""Describes the weights and their layout over the trainer's ranks: the contract between trainer and engines. No torch.

A tensor has the name of the Hugging Face checkpoint, which every weight loader understands. Each trainer rank holds one
shard, a run of bytes. A `Span` maps elements of a tensor to a place in a shard. The spans of all ranks tile every
tensor exactly once.

    tensor t   [0 .................. count)          flat elements, row major
    rank 0     [0 ....... a)                         span (t, 0, a)      at shard 0 + offset
    rank 1              [a ......... count)          span (t, a, rest)   at shard 1 + offset

A `Manifest` is checked when it is made, so every instance is valid. Its bytes are canonical JSON (equal manifests have
equal bytes), and its identity is their SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from fourfold.errors import InvalidInput

FORMAT: Final = 1
MAX_MANIFEST_BYTES: Final = 8 << 20
# Bytes of an element, by the name of the dtype in torch.
ITEM_BYTES: Final[dict[str, int]] = {"bfloat16": 2, "float16": 2, "float32": 4}
# Tensors start at multiples of this in a shard, so that any element can be read in place.
ALIGNMENT: Final = 64
_MAX_BYTES: Final = 1 << 50
_MAX_NAME: Final = 512
_FINGERPRINT: Final = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, dtype and shape of a checkpoint tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def byte_count(self) -> int:
        return self.count * self.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Elements [start, start + count) of tensor `tensor` lie at byte `offset` of the shard of `rank`."""

    tensor: int
    start: int
    count: int
    rank: int
    offset: int

    @property
    def stop(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """Tells that the tensors are LoRA adapters, A [rank, in] and B [out, rank] under PEFT's names, and no weights."""

    rank: int
    scale: float
    """Factor of B A."""
    base: str
    """Fingerprint of the weights that they are added to (`fourfold.weights.base_fingerprint`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Tensors, spans (sorted by tensor and start) and the bytes of every rank's shard. Raises InvalidInput."""

    tensors: tuple[TensorSpec, ...]
    spans: tuple[Span, ...]
    shard_bytes: tuple[int, ...]
    adapter: AdapterSpec | None = None
    _encoded: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_tensors(self.tensors)
        _check_shards(self.shard_bytes)
        _check_tiling(self.tensors, self.spans)
        _check_places(self)
        document = {
            "format": FORMAT,
            "shard_bytes": self.shard_bytes,
            "spans": [(s.tensor, s.start, s.count, s.rank, s.offset) for s in self.spans],
            "tensors": [(t.name, t.dtype, t.shape) for t in self.tensors],
        }
        if self.adapter is not None:
            _check_adapter(self.adapter)
            document["adapter"] = asdict(self.adapter)
        encoded = json.dumps(document, separators=(",", ":"), sort_keys=True).encode("ascii")
        if len(encoded) > MAX_MANIFEST_BYTES:
            raise InvalidInput(f"the manifest has {len(encoded)} bytes; at most {MAX_MANIFEST_BYTES} can be sent")
        object.__setattr__(self, "_encoded", encoded)

    def to_bytes(self) -> bytes:
        return self._encoded

    @staticmethod
    def from_bytes(data: bytes) -> Manifest:
        """Return the manifest that `data` encodes. Raises InvalidInput: not the canonical bytes of a valid manifest."""
        if len(data) > MAX_MANIFEST_BYTES:
            raise InvalidInput(f"the manifest has {len(data)} bytes; at most {MAX_MANIFEST_BYTES} are read")
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            raise InvalidInput(
                f"the manifest ({len(data)} bytes) is not JSON; pass GetManifest's bytes unchanged"
            ) from None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise InvalidInput(f"the manifest is not of format {FORMAT}; trainer and engine must run the same release")
        try:
            manifest = Manifest(
                tensors=tuple(
                    TensorSpec(name=_string(name), dtype=_string(dtype), shape=tuple(map(_integer, shape)))
                    for name, dtype, shape in document["tensors"]
                ),
                spans=tuple(
                    Span(tensor=t, start=start, count=count, rank=rank, offset=offset)
                    for t, start, count, rank, offset in (map(_integer, span) for span in document["spans"])
                ),
                shard_bytes=tuple(map(_integer, document["shard_bytes"])),
                adapter=_adapter(document["adapter"]) if "adapter" in document else None,
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InvalidInput):
                raise
            raise InvalidInput(
                f"the manifest has a field of a wrong type ({error}); pass GetManifest's bytes unchanged"
            ) from None
        if manifest.to_bytes() != data:
            raise InvalidInput("the manifest is not in canonical form; pass GetManifest's bytes unchanged")
        return manifest

    @property
    def sha256(self) -> bytes:
        """SHA-256 of the canonical bytes (32 bytes)."""
        return hashlib.sha256(self._encoded).digest()

    @property
    def rank_count(self) -> int:
        """Number of trainer ranks; a rank that sends nothing has 0 shard bytes."""
        return len(self.shard_bytes)

    @property
    def byte_count(self) -> int:
        """Bytes of all tensors, without padding between them."""
        return sum(tensor.byte_count for tensor in self.tensors)

    def spans_of_rank(self, rank: int) -> list[Span]:
        """Return the spans in the shard of `rank`, sorted by tensor and start."""
        return [span for span in self.spans if span.rank == rank]


def layout_of_rank_0(tensors: Sequence[TensorSpec], rank_count: int, *, adapter: AdapterSpec | None = None) -> Manifest:
    """Return the manifest of tensors that rank 0 sends whole; the other ranks have empty shards."""
    spans, offset = [], 0
    for index, spec in enumerate(tensors):
        spans.append(Span(tensor=index, start=0, count=spec.count, rank=0, offset=offset))
        offset = aligned(offset + spec.byte_count)
    shards = (offset, *([0] * (rank_count - 1)))
    return Manifest(tensors=tuple(tensors), spans=tuple(spans), shard_bytes=shards, adapter=adapter)


def aligned(offset: int) -> int:
    """Return `offset` rounded up to a multiple of ALIGNMENT."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def partition_count(count: int, rank_count: int) -> int:
    """Return the elements, padding included, of one of `rank_count` equal partitions of `count` elements."""
    return -(-count // rank_count)


def partition_spans(first: int, specs: Sequence[TensorSpec], rank_count: int, offset: int) -> list[Span]:
    """Return the spans of the tensors of a parameter that the ranks hold in equal partitions.

    The tensors lie back to back, have one dtype and are the whole parameter; the first has index `first`. A partition,
    which begins at byte `offset` of every shard, may hold the end of one tensor, whole ones, and the start of another.
    """
    size = partition_count(sum(spec.count for spec in specs), rank_count)
    result, begin = [], 0  # of the tensor, in the parameter
    for tensor, spec in enumerate(specs, first):
        end, place = begin + spec.count, begin
        while place < end:
            rank, inside = divmod(place, size)
            stop = min(end, (rank + 1) * size)
            at = offset + inside * spec.item_bytes
            result.append(Span(tensor=tensor, start=place - begin, count=stop - place, rank=rank, offset=at))
            place = stop
        begin = end
    return result


def _check_tensors(tensors: Iterable[TensorSpec]) -> None:
    names: set[str] = set()
    for tensor in tensors:
        name = tensor.name
        if not 0 < len(name) <= _MAX_NAME or not name.isprintable() or not name.isascii():
            raise InvalidInput(
                f"manifest: tensor name {name[:80]!r}; it must have 1 to {_MAX_NAME} printable ASCII characters"
            )
        if name in names:
            raise InvalidInput(f"manifest: tensor {name} occurs twice; send tied weights once")
        names.add(name)
        if tensor.dtype not in ITEM_BYTES:
            raise InvalidInput(f"manifest: tensor {name} has dtype {tensor.dtype!r}; known are {sorted(ITEM_BYTES)}")
        if not all(size >= 1 for size in tensor.shape) or tensor.byte_count > _MAX_BYTES:
            raise InvalidInput(
                f"manifest: tensor {name} has shape {tensor.shape}; sizes must be positive, with at most 2**50 bytes"
            )
    if not names:
        raise InvalidInput("manifest: no tensors; there is nothing to send")


def _check_shards(shard_bytes: tuple[int, ...]) -> None:
    if not 1 <= len(shard_bytes) <= 65_536 or not all(0 <= size <= _MAX_BYTES for size in shard_bytes):
        raise InvalidInput(
            f"manifest: {len(shard_bytes)} shards of {shard_bytes[:8]} bytes; allowed are 1 to 65536 shards of at most "
            f"2**50 bytes"
        )


def _check_tiling(tensors: tuple[TensorSpec, ...], spans: tuple[Span, ...]) -> None:
    """Check that every element of every tensor lies in exactly one span, and that the spans are sorted."""
    tensor, reached = 0, 0
    for span in spans:
        if not 0 <= span.tensor < len(tensors):
            raise InvalidInput(f"manifest: a span names tensor number {span.tensor}; there are {len(tensors)}")
        if span.tensor == tensor + 1 and reached == tensors[tensor].count:
            tensor, reached = span.tensor, 0
        if span.tensor != tensor or span.start != reached or span.count < 1:
            raise InvalidInput(
                f"manifest: the spans of tensor {tensors[tensor].name} do not tile it in order: after element "
                f"{reached} comes tensor {tensors[span.tensor].name}, start {span.start}, count {span.count}"
            )
        reached += span.count
        if reached > tensors[tensor].count:
            raise InvalidInput(f"manifest: the spans of tensor {tensors[tensor].name} reach past its end")
    if tensor != len(tensors) - 1 or reached != tensors[tensor].count:
        raise InvalidInput(f"manifest: the spans end at element {reached} of tensor {tensors[tensor].name}, too early")


def _check_places(manifest: Manifest) -> None:
    """Check that every span lies inside its shard, on an element boundary, and that no two overlap."""
    ends = [0] * manifest.rank_count
    for span in sorted(manifest.spans, key=lambda s: (s.rank, s.offset)):
        spec = manifest.tensors[span.tensor]
        if not 0 <= span.rank < manifest.rank_count:
            raise InvalidInput(f"manifest: tensor {spec.name} is at rank {span.rank} of {manifest.rank_count}")
        end = span.offset + span.count * spec.item_bytes
        if span.offset < 0 or span.offset % spec.item_bytes or end > manifest.shard_bytes[span.rank]:
            raise InvalidInput(
                f"manifest: tensor {spec.name} lies at bytes {span.offset} to {end} of rank {span.rank}, whose shard "
                f"has {manifest.shard_bytes[span.rank]} bytes; it must be inside, at a multiple of {spec.item_bytes}"
            )
        if span.offset < ends[span.rank]:
            raise InvalidInput(f"manifest: tensor {spec.name} overlaps another one in the shard of rank {span.rank}")
        ends[span.rank] = end


def _check_adapter(adapter: AdapterSpec) -> None:
    if adapter.rank < 1 or not 0 < adapter.scale < math.inf or not _FINGERPRINT.fullmatch(adapter.base):
        raise InvalidInput(
            f"manifest: an adapter of rank {adapter.rank} and scale {adapter.scale} on the base {adapter.base[:80]!r}; "
            f"rank and scale must be positive, and the base 64 hexadecimal digits"
        )


def _adapter(found: Any) -> AdapterSpec:
    scale = found["scale"]
    if type(scale) is not float:
        raise TypeError(f"{scale!r} is not a number with a point")
    return AdapterSpec(rank=_integer(found["rank"]), scale=scale, base=_string(found["base"]))


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not an integer")
    return value


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value
