"""Computes the checksums of weights, as defined in digest.py, from tensors on the CPU or a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from fourfold.weights.manifest import Manifest, Span

_MODULUS_MASK: Final = (1 << 64) - 1
# Words per row, and rows per block, of the CPU loop: a block fits the cache, and no 32-bit accumulator of 16-bit words
# overflows (2048 * 65535 < 2**32).
_ROW: Final = 2048
_ROWS: Final = 256
_DEVICE_BLOCK: Final = 1 << 24

Part = tuple[Span, torch.Tensor]  # a span and its elements, 1-D [span.count] in the manifest's dtype, on any device


class TensorSums:
    """Accumulates the sums of a manifest's tensors from spans, on the device where the spans are."""

    def __init__(self, manifest: Manifest) -> None:
        self._sums = [[0, 0] for _ in manifest.tensors]
        self._on_device: torch.Tensor | None = None  # int64 [tensors, 2]

    def add(self, parts: Iterable[Part]) -> None:
        """Add parts. Parts on a GPU are read in the order of its current stream, and must live until then."""
        on_device: list[Part] = []
        for span, values in parts:
            if values.is_cuda and values.element_size() == 2:  # the kernel handles 16-bit types only
                on_device.append((span, values))
                continue
            plain, weighted = span_sums(values, span.start)
            self._sums[span.tensor][0] += plain
            self._sums[span.tensor][1] += weighted
        if on_device:
            self._launch(on_device)

    def to_bytes(self) -> bytes:
        """Return all sums, 16 bytes per tensor; waits for the GPU."""
        device = [[0, 0]] * len(self._sums) if self._on_device is None else self._on_device.tolist()
        both = zip(self._sums, device, strict=True)
        masked = [[(a + x) & _MODULUS_MASK, (b + y) & _MODULUS_MASK] for (a, b), (x, y) in both]
        return np.array(masked, "<u8").tobytes()

    def _launch(self, parts: list[Part]) -> None:
        from fourfold.weights.tensor_sums_kernel import add_sums_  # needs triton, which the CPU build of torch lacks

        if self._on_device is None:
            self._on_device = torch.zeros(len(self._sums), 2, dtype=torch.int64, device=parts[0][1].device)
            # Kernels of other streams add to it too, and must not run before it is zero.
            torch.cuda.current_stream(self._on_device.device).synchronize()
        add_sums_(self._on_device, [v for _, v in parts], [s.start for s, _ in parts], [s.tensor for s, _ in parts])


def warm_up(device: torch.device) -> None:
    """Compile the GPU kernel now, so that the first update does not wait for it; does nothing for a CPU."""
    if device.type == "cuda":
        from fourfold.weights.tensor_sums_kernel import add_sums_

        values = torch.zeros(9, dtype=torch.int16, device=device)
        sums = torch.zeros(1, 2, dtype=torch.int64, device=device)
        add_sums_(sums, [values[:8], values[1:]], [0, 0], [0, 0])  # both variants: aligned to 16 bytes and to 2


def partial_sums(manifest: Manifest, parts: Iterable[Part]) -> bytes:
    """Return the sums of some spans of the tensors of `manifest`."""
    sums = TensorSums(manifest)
    sums.add(parts)
    return sums.to_bytes()


def span_sums(values: torch.Tensor, start: int) -> tuple[int, int]:
    """Return both sums, in [0, 2**64), of elements of which the first has index `start` in its tensor."""
    flat = values.detach().reshape(-1)
    plain, weighted = _cpu_sums(flat) if flat.device.type == "cpu" else _device_sums(flat)
    return plain & _MODULUS_MASK, (weighted + start * plain) & _MODULUS_MASK


def _cpu_sums(flat: torch.Tensor) -> tuple[int, int]:
    """Return both sums for start = 0, from sums over rows and columns instead of one product per word."""
    small = flat.element_size() == 2
    words: NDArray[Any] = flat.view(torch.int16 if small else torch.int32).numpy()
    words = words.view(np.uint16 if small else np.uint32)
    narrow = np.uint32 if small else np.uint64
    columns = np.arange(1, _ROW + 1, dtype=np.uint64)
    rows = np.arange(_ROWS, dtype=np.uint64) * np.uint64(_ROW)
    whole = len(words) // _ROW * _ROW
    plain = weighted = 0
    for base in range(0, whole, _ROW * _ROWS):
        block = words[base : min(base + _ROW * _ROWS, whole)].reshape(-1, _ROW)
        by_row = block.sum(axis=1, dtype=narrow).astype(np.uint64)
        by_column = block.sum(axis=0, dtype=narrow).astype(np.uint64)
        block_sum = int(by_row.sum())
        plain += block_sum
        weighted += base * block_sum + int((by_row * rows[: len(by_row)]).sum()) + int((by_column * columns).sum())
    tail = words[whole:].astype(np.uint64)
    tail_sum = int(tail.sum())
    return plain + tail_sum, weighted + whole * tail_sum + int((tail * columns[: len(tail)]).sum())


def _device_sums(flat: torch.Tensor) -> tuple[int, int]:
    """Return both sums for start = 0 on an accelerator, where int64 also wraps around at 2**64."""
    small = flat.element_size() == 2
    mask = 0xFFFF if small else 0xFFFFFFFF
    words = flat.view(torch.int16 if small else torch.int32)
    positions = torch.arange(1, min(len(words), _DEVICE_BLOCK) + 1, device=flat.device, dtype=torch.int64)
    sums = torch.zeros(2, device=flat.device, dtype=torch.int64)
    for base in range(0, len(words), _DEVICE_BLOCK):
        block = words[base : base + _DEVICE_BLOCK].to(torch.int64) & mask
        block_sum = block.sum()
        sums[0] += block_sum
        sums[1] += (block * positions[: len(block)]).sum() + base * block_sum
    plain, weighted = sums.tolist()
    return plain, weighted
