"""On the way into a sink: spans cut into parts, and sums taken in passing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from fourfold.weights.manifest import ALIGNMENT, Manifest, Span, aligned
from fourfold.weights.source.base import torch_dtype
from fourfold.weights.tensor_sums import TensorSums
from fourfold.weights.transport.base import Sink

# A collective of this size runs at the speed of the wire, and as much memory holds what cannot go in place.
WINDOW_BYTES: Final = 128 << 20
# Calls that are launched together.
WINDOW_PARTS: Final = 128


def cut(span: Span, item_bytes: int, limit: int) -> Iterator[Span]:
    """Yield a span in parts of at most `limit` bytes."""
    count = max(1, limit // item_bytes)
    for begin in range(0, span.count, count):
        yield Span(
            tensor=span.tensor,
            start=span.start + begin,
            count=min(count, span.count - begin),
            rank=span.rank,
            offset=span.offset + begin * item_bytes,
        )


def windows(manifest: Manifest, spans: Sequence[Span]) -> list[list[Span]]:
    """Return spans in their order, cut into parts that make windows of WINDOW_BYTES and WINDOW_PARTS at most."""
    result: list[list[Span]] = []
    filled = WINDOW_BYTES
    for span in spans:
        item = manifest.tensors[span.tensor].item_bytes
        for part in cut(span, item, WINDOW_BYTES):
            if filled + part.count * item > WINDOW_BYTES or len(result[-1]) == WINDOW_PARTS:
                result.append([])
                filled = 0
            result[-1].append(part)
            filled += part.count * item
    return result


class Staging:
    """Memory for the parts of one window that cannot be sent or received where they belong; made when it is needed."""

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        """Stage parts of `manifest` on `device`."""
        self._manifest, self._device = manifest, device
        self._buffer: torch.Tensor | None = None
        self._filled = 0

    def begin(self) -> None:
        """Begin a window: slots handed out so far are used again."""
        self._filled = 0

    def slot(self, part: Span) -> torch.Tensor:
        """Return memory for a part, 1-D [part.count] in its type."""
        if self._buffer is None:
            room = WINDOW_BYTES + WINDOW_PARTS * ALIGNMENT
            self._buffer = torch.empty(room, dtype=torch.uint8, device=self._device)
        spec = self._manifest.tensors[part.tensor]
        end = self._filled + part.count * spec.item_bytes
        slot = self._buffer[self._filled : end].view(torch_dtype(spec.dtype))
        self._filled = aligned(end)
        return slot


class SummingSink:
    """Sums up what arrives, and passes it on."""

    def __init__(self, sink: Sink, sums: TensorSums) -> None:
        """Wrap a sink.

        Args:
            sink: that takes.
            sums: of this version; complete when the transport is done and `finish` was called.
        """
        self._sink, self._sums = sink, sums
        self._in_place: list[tuple[Span, torch.Tensor]] = []

    def slot(self, span: Span) -> torch.Tensor | None:
        """Return the slot of the sink; it is summed up when all has arrived."""
        if (slot := self._sink.slot(span)) is not None:
            self._in_place.append((span, slot))
        return slot

    def take(self, span: Span, values: torch.Tensor) -> None:
        """Sum up and pass on; what goes into a slot is summed up there, so that the copy is checked, too."""
        if self.slot(span) is None:
            self._sums.add([(span, values)])
        self._sink.take(span, values)

    def flush(self) -> None:
        """Pass on."""
        self._sink.flush()

    def finish(self) -> bytes:
        """Return the sums, see `digest`."""
        self._sums.add(self._in_place)
        return self._sums.to_bytes()
