"""Which tensors differ between what was sent and what arrived. No torch here.

What the sums are, `fourfold.weights.digest` says; the coordinator compares them without it.
"""

from __future__ import annotations

import json
from typing import Final

_ENTRY_BYTES: Final = 16
_NAMED: Final = 3


def differing_tensors(manifest: bytes, left: bytes, right: bytes) -> list[str]:
    """Return the names of the tensors whose sums differ, in manifest order; none when there is nothing to compare.

    Args:
        manifest: canonical bytes, from the trainer.
        left: sums of one side, 16 bytes per tensor; empty when they were left out.
        right: those of the other.
    """
    names = [str(tensor[0]) for tensor in json.loads(manifest)["tensors"]]
    if len(left) != len(names) * _ENTRY_BYTES or len(left) != len(right):
        return []
    places = [slice(i * _ENTRY_BYTES, (i + 1) * _ENTRY_BYTES) for i in range(len(names))]
    return [name for name, place in zip(names, places, strict=True) if left[place] != right[place]]


def naming(tensors: list[str]) -> str:
    """Return e.g. "a, b, c and 5 more"."""
    more = len(tensors) - _NAMED
    return ", ".join(tensors[:_NAMED]) + (f" and {more} more" if more > 0 else "")
