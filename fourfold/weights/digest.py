"""Digests of weights: sums that any rank can compute of its part, and that add up.

Of every tensor two sums over its raw 16- or 32-bit words w[i], as unsigned numbers, are kept
modulo 2**64:  sum(w[i])  and  sum((i + 1) * w[i]),  i being the index in the whole tensor.
The second one sees swapped elements. Sums of spans, and so of ranks, simply add up, whatever
the split; the digest is the SHA-256 of all of them behind the manifest's.

The sums travel as `bytes`: 16 little-endian bytes per tensor, in manifest order. They guard
against stale, torn, misplaced or cast data, not against somebody who forges weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from fourfold.errors import InvalidInput
from fourfold.weights.manifest import Manifest, Span

_MODULUS_MASK: Final = (1 << 64) - 1
# Words per row and rows per block of the CPU loop: a block fits the cache, and no 32-bit
# accumulator of 16-bit words overflows (2048 * 65535 < 2**32).
_ROW: Final = 2048
_ROWS: Final = 256
_DEVICE_BLOCK: Final = 1 << 24

_Sums = NDArray[np.uint64]  # [tensors, 2]
Part = tuple[Span, torch.Tensor]
"""A span and its elements, 1-D [span.count] in the manifest's dtype, any device."""


class Summer:
    """Adds up the sums of spans that come one after the other, where they are."""

    def __init__(self, manifest: Manifest) -> None:
        """Begin with nothing."""
        self._sums = [[0, 0] for _ in manifest.tensors]
        self._on_device: torch.Tensor | None = None

    def add(self, parts: Iterable[Part]) -> None:
        """Add parts; those on a GPU are read in the order of its present stream."""
        on_device: list[Part] = []
        for span, values in parts:
            if values.is_cuda and values.element_size() == 2:
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
        from fourfold.weights.digest_kernel import add_sums_  # needs triton, which the CPU build of torch lacks

        if self._on_device is None:
            self._on_device = torch.zeros(len(self._sums), 2, dtype=torch.int64, device=parts[0][1].device)
            torch.cuda.current_stream(self._on_device.device).synchronize()  # others add to it, too
        add_sums_(self._on_device, [v for _, v in parts], [s.start for s, _ in parts], [s.tensor for s, _ in parts])


def warm_up(device: torch.device) -> None:
    """Compile what a GPU sums up with, so that the first update does not wait for it; nothing elsewhere."""
    if device.type == "cuda":
        from fourfold.weights.digest_kernel import add_sums_

        values = torch.zeros(9, dtype=torch.int16, device=device)
        sums = torch.zeros(1, 2, dtype=torch.int64, device=device)
        add_sums_(sums, [values[:8], values[1:]], [0, 0], [0, 0])  # aligned, and not


def partial_sums(manifest: Manifest, parts: Iterable[Part]) -> bytes:
    """Return the sums of some spans of the tensors of `manifest`."""
    summer = Summer(manifest)
    summer.add(parts)
    return summer.to_bytes()


def add_sums(manifest: Manifest, parts: Sequence[bytes]) -> bytes:
    """Return the sums of all parts together.

    Raises:
        InvalidInput: a part has a wrong length.
    """
    total: _Sums = np.zeros((len(manifest.tensors), 2), np.uint64)
    for part in parts:
        total += _decode(manifest, part)  # wraps around
    return total.astype("<u8").tobytes()


def digest_of(manifest: Manifest, sums: bytes) -> bytes:
    """Return the digest (32 bytes) of whole weights, from their sums."""
    _decode(manifest, sums)
    return hashlib.sha256(manifest.sha256 + sums).digest()


def unsummed_digest(manifest: Manifest, policy_version: int) -> bytes:
    """Return what stands for the digest (32 bytes) of a version whose sums were left out."""
    version = policy_version.to_bytes(8, "little", signed=True)
    return hashlib.sha256(b"unsummed" + manifest.sha256 + version).digest()


def combine_digest(manifest: Manifest, parts: Sequence[bytes]) -> bytes:
    """Return the digest (32 bytes) of whole weights, from the sums of every rank's share.

    Raises:
        InvalidInput: a part has a wrong length.
    """
    return digest_of(manifest, add_sums(manifest, parts))


def span_sums(values: torch.Tensor, start: int) -> tuple[int, int]:
    """Return both sums, as non-negative numbers below 2**64, of elements whose first has index `start`."""
    flat = values.detach().reshape(-1)
    plain, weighted = _cpu_sums(flat) if flat.device.type == "cpu" else _device_sums(flat)
    return plain & _MODULUS_MASK, (weighted + start * plain) & _MODULUS_MASK


def _cpu_sums(flat: torch.Tensor) -> tuple[int, int]:
    """The sums as if `start` were 0; two passes of row and column sums instead of a product per word."""
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
    """The same on an accelerator: 64-bit integers wrap around there, too."""
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


def _decode(manifest: Manifest, sums: bytes) -> _Sums:
    expected = 16 * len(manifest.tensors)
    if len(sums) != expected:
        raise InvalidInput(f"sums of {len(sums)} bytes; {len(manifest.tensors)} tensors need {expected}")
    return np.frombuffer(sums, "<u8").reshape(-1, 2).astype(np.uint64)
