"""Writes a result: what was measured, on what, of which commit, by which command."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fourfold.doctor import find_gpus

RESULTS = Path(__file__).resolve().parent / "results"


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
    now = datetime.now(UTC)
    document = {
        "benchmark": name,
        "time": now.isoformat(timespec="seconds"),
        **_commit(),
        "command": "python " + " ".join(["-m", "benchmarks." + name, *sys.argv[1:]]),
        "hardware": _hardware(),
        "versions": {"python": platform.python_version()} | {n: importlib.metadata.version(n) for n in libraries},
        "parameters": dict(parameters),
        "results": dict(results),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{label or name}-{now:%Y-%m-%d}.json"
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return path


def _hardware() -> dict[str, Any]:
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": find_gpus(),
        # Anything well above what the benchmark itself keeps busy says that it was not alone.
        "load_average_1min": round(os.getloadavg()[0], 2),
    }


def _commit() -> dict[str, Any]:
    """Return which code runs; a copy without its git folder is told by FOURFOLD_COMMIT."""
    if told := os.environ.get("FOURFOLD_COMMIT"):
        return {"commit": told.removesuffix("-dirty"), "uncommitted_changes": told.endswith("-dirty")}
    return {
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip()
