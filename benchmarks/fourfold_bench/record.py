"""Writes a result of a benchmark of this folder."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fourfold_bench import record_result

RESULTS = Path(__file__).resolve().parents[1] / "results"


def summary(milliseconds: Sequence[float]) -> dict[str, Any]:
    """Return median and best of some runs, and the runs themselves, in milliseconds."""
    return {
        "median_ms": round(statistics.median(milliseconds), 2),
        "min_ms": round(min(milliseconds), 2),
        "runs_ms": [round(value, 2) for value in milliseconds],
    }


def write(
    name: str, *, parameters: Mapping[str, Any], results: Mapping[str, Any], libraries: Sequence[str], label: str = ""
) -> Path:
    """Write `results/LABEL-DATE.json`, LABEL `name` unless given; return its path. One of the same day is replaced."""
    result = record_result.document(
        name,
        command="python " + " ".join(["-m", "fourfold_bench." + name, *sys.argv[1:]]),
        parameters=parameters,
        results=results,
        libraries=libraries,
    )
    return record_result.write(RESULTS, result, label)
