"""Digests of weights: per-tensor sums that any rank computes of its part and that add up. Needs no torch.

Each tensor has two sums over its raw 16- or 32-bit words w[i], read as unsigned numbers, modulo 2**64:

    sum(w[i])    and    sum((i + 1) * w[i])        i is the index in the whole tensor

The second sum detects swapped elements. The sums of spans, and therefore of ranks, add up to those of the whole tensor,
however it is split. The digest is the SHA-256 of the manifest's SHA-256 and all sums.

Sums travel as bytes: two little-endian uint64 per tensor, in manifest order. They detect stale, torn, misplaced or cast
data, not deliberate forgery. `tensor_sums` computes them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Final

import numpy as np

from fourfold.errors import InvalidInput
from fourfold.weights.manifest import Manifest

_ENTRY_BYTES: Final = 16


def add_sums(manifest: Manifest, parts: Sequence[bytes]) -> bytes:
    """Return the sums of all parts together. Raises InvalidInput: a part has a wrong length."""
    total = np.zeros(2 * len(manifest.tensors), np.uint64)
    for part in parts:
        _check_length(manifest, part)
        total += np.frombuffer(part, "<u8")  # uint64 wraps around at 2**64, as the sums do
    return total.astype("<u8").tobytes()


def digest_of(manifest: Manifest, sums: bytes) -> bytes:
    """Return the digest (32 bytes) of weights whose sums are complete. Raises InvalidInput: a wrong length."""
    _check_length(manifest, sums)
    return hashlib.sha256(manifest.sha256 + sums).digest()


def unsummed_digest(manifest: Manifest, policy_version: int) -> bytes:
    """Return the stand-in (32 bytes) for the digest of a version that was sent without sums."""
    version = policy_version.to_bytes(8, "little", signed=True)
    return hashlib.sha256(b"unsummed" + manifest.sha256 + version).digest()


def differing_tensors(manifest: bytes, left: bytes, right: bytes) -> list[str]:
    """Return the names of the tensors whose sums differ, in manifest order; none if a side computed no sums.

    `manifest` is canonical bytes; `left` and `right` are the sums of both sides, 16 bytes per tensor, or empty.
    """
    names = [str(tensor[0]) for tensor in json.loads(manifest)["tensors"]]
    if len(left) != len(names) * _ENTRY_BYTES or len(left) != len(right):
        return []
    places = [slice(i * _ENTRY_BYTES, (i + 1) * _ENTRY_BYTES) for i in range(len(names))]
    return [name for name, place in zip(names, places, strict=True) if left[place] != right[place]]


def join_names(names: Sequence[str], most: int = 3) -> str:
    """Return names for a message, such as "a, b, c and 5 more"."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _check_length(manifest: Manifest, sums: bytes) -> None:
    expected = _ENTRY_BYTES * len(manifest.tensors)
    if len(sums) != expected:
        raise InvalidInput(f"the sums have {len(sums)} bytes; {len(manifest.tensors)} tensors need {expected}")
