"""Derives seeds of single requests from the seed of a run."""

from __future__ import annotations

import hashlib
from typing import Final

# Sample i of a request uses seed + i, and seeds must stay below 2^53, where JSON numbers are exact.
_SEED_BITS: Final = 52


def derive_seed(seed: int, *parts: object) -> int:
    """Return an int in [0, 2^52) that is a function of the arguments, the same on every machine."""
    text = "/".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> (64 - _SEED_BITS)
