"""Collects the times of update rounds, and makes the results that both paths of the benchmark share."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fourfold.weights.manifest import Manifest
from fourfold_bench.record import percentiles

Seconds = dict[str, float]
"""Seconds of one round, by name."""
Phase = dict[str, list[float]]
"""Seconds of all rounds of a kind, by name."""

_RECENT: Final = 500  # newest messages of a stream; older ones tell nothing about the current round


def add_round(phase: Phase, row: Seconds) -> None:
    for name, value in row.items():
        phase.setdefault(name, []).append(value)


def summaries(phase: Phase) -> dict[str, Any]:
    """Return median, 95th percentile and runs of each name, in milliseconds."""
    return {name: percentiles(values) for name, values in phase.items()}


def common_results(
    manifest: Manifest, *, direct: int, reload: int, opens: Sequence[float], plain: Phase, verified: Phase,
    memory: Sequence[Mapping[str, float]], token_gap: float,
) -> dict[str, Any]:  # fmt: skip
    """Return the results of both paths.

    Args:
        manifest: of the weights.
        direct: tensors that are written in place.
        reload: tensors that vLLM loads anew.
        opens: seconds of each time that an epoch was opened.
        plain: rounds without sums.
        verified: rounds with sums.
        memory: MiB by device: before the first epoch, with an open epoch, and the peak of the rounds.
        token_gap: usual seconds between two tokens of a stream.
    """
    before, opened, peak = memory
    return {
        "bytes": manifest.byte_count,
        "tensors": len(manifest.tensors),
        "applied": {"direct": direct, "reload": reload},
        "open": percentiles(opens),
        "gigabytes_per_second": round(manifest.byte_count / statistics.median(plain["receive"]) / 1e9, 2),
        "gpu_mib": {d: {"open": round(opened[d] - before[d]), "most": round(peak[d] - before[d])} for d in before},
        "plain": summaries(plain),
        "verified": summaries(verified),
        "token_gap": percentiles([token_gap]),
    }


def usual_gap(times: Sequence[list[float]]) -> float:
    """Return the median time between two messages of a stream; 0 without streams.

    `times` is when each stream got its messages; the lists may grow meanwhile.
    """
    gaps = [b - a for recent in (one[-_RECENT:] for one in times) for a, b in itertools.pairwise(recent)]
    return statistics.median(gaps) if gaps else 0.0


def longest_gap(times: list[float], began: float, end: float) -> float:
    """Return the longest time between two messages that touches [began, end]."""
    recent = itertools.pairwise(times[-_RECENT:])
    return max((b - a for a, b in recent if b >= began and a <= end), default=0.0)
