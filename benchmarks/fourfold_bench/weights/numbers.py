"""Arithmetic on times: gaps between tokens, medians, percentiles."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any, Final

Seconds = dict[str, float]
"""What one round took, by name."""
Phase = dict[str, list[float]]
"""What all rounds of a kind took."""

_RECENT_TOKENS: Final = 500


def usual_gap(tokens: Sequence[list[float]]) -> float:
    """Return the median time between two tokens of a stream; 0 without streams. Rounds are too few to matter for it.

    Args:
        tokens: when each stream got its tokens; lists that may grow meanwhile.
    """
    recent = [times[-_RECENT_TOKENS:] for times in tokens]
    gaps = [b - a for times in recent for a, b in itertools.pairwise(times)]
    return statistics.median(gaps) if gaps else 0.0


def longest_gap(times: list[float], began: float, end: float) -> float:
    """Return the longest time between two tokens that touches [began, end]."""
    recent = times[-_RECENT_TOKENS:]
    return max((b - a for a, b in itertools.pairwise(recent) if b >= began and a <= end), default=0.0)


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Return median and 95th percentile of some runs, and the runs, in milliseconds."""
    ordered = sorted(seconds)
    high = ordered[round(0.95 * (len(ordered) - 1))]
    return {
        "median_ms": round(1000 * statistics.median(ordered), 3),
        "p95_ms": round(1000 * high, 3),
        "runs_ms": [round(1000 * value, 3) for value in seconds],
    }
