"""Finds spans in shards, cuts spans into windows, and stages parts that cannot be sent or received in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import torch

from fourfold.weights.manifest import ALIGNMENT, Manifest, Span, aligned
from fourfold.weights.source.base import torch_dtype
from fourfold.weights.transport.base import Sink

# Also the size of a staging buffer. A broadcast of 64 MiB already reaches 336 of 371 GB/s over NVLink.
WINDOW_BYTES: Final = 128 << 20
# Broadcasts in one launch.
WINDOW_PARTS: Final = 128


def windows(manifest: Manifest, spans: Sequence[Span]) -> list[list[Span]]:
    """Return spans in order, cut into parts, in windows of at most WINDOW_BYTES and WINDOW_PARTS."""
    result: list[list[Span]] = []
    filled = WINDOW_BYTES
    for span in spans:
        item = manifest.tensors[span.tensor].item_bytes
        for part in _cut(span, item, WINDOW_BYTES):
            if filled + part.count * item > WINDOW_BYTES or len(result[-1]) == WINDOW_PARTS:
                result.append([])
                filled = 0
            result[-1].append(part)
            filled += part.count * item
    return result


def shard_bytes(manifest: Manifest, spans: Sequence[Span]) -> int:
    """Return the bytes of spans, without the padding between them."""
    return sum(span.count * manifest.tensors[span.tensor].item_bytes for span in spans)


def span_view(manifest: Manifest, shard: torch.Tensor, span: Span) -> torch.Tensor:
    """Return the place of a span in its rank's shard, uint8 [bytes]: 1-D [span.count] in the manifest's dtype."""
    spec = manifest.tensors[span.tensor]
    return shard[span.offset : span.offset + span.count * spec.item_bytes].view(torch_dtype(spec.dtype))


def hand_to_sink(manifest: Manifest, shards: Sequence[torch.Tensor], sink: Sink) -> None:
    """Hand the complete shards of all ranks to a sink, without a copy."""
    for span in manifest.spans:
        sink.take(span, span_view(manifest, shards[span.rank], span))
    sink.flush()


class Staging:
    """A buffer for the staged parts of one window, allocated when the first part needs it."""

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self._manifest, self._device = manifest, device
        self._buffer: torch.Tensor | None = None
        self._filled = 0

    def begin(self) -> None:
        self._filled = 0

    def slot(self, part: Span) -> torch.Tensor:
        """Return memory for a part: 1-D [part.count] in the manifest's dtype."""
        if self._buffer is None:
            room = WINDOW_BYTES + WINDOW_PARTS * ALIGNMENT
            self._buffer = torch.empty(room, dtype=torch.uint8, device=self._device)
        spec = self._manifest.tensors[part.tensor]
        end = self._filled + part.count * spec.item_bytes
        slot = self._buffer[self._filled : end].view(torch_dtype(spec.dtype))
        self._filled = aligned(end)
        return slot


def _cut(span: Span, item_bytes: int, limit: int) -> Iterator[Span]:
    count = max(1, limit // item_bytes)
    for begin in range(0, span.count, count):
        stop = min(begin + count, span.count)
        yield replace(span, start=span.start + begin, count=stop - begin, offset=span.offset + begin * item_bytes)
