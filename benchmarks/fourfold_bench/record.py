"""Makes the result of a benchmark: parameters, numbers, hardware, versions, commit, and the command to repeat it."""

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
from typing import Any, Final

from fourfold.cli.doctor import find_gpus
from fourfold.errors import ConfigError

RESULTS: Final = Path("benchmarks/results")
# Options whose values are places of this machine; the command in a result leaves them out.
_PLACES: Final = ("--json", "--keep", "--out", "--profile")


def document(
    name: str, *, command: str, parameters: Mapping[str, Any], results: Mapping[str, Any], libraries: Sequence[str]
) -> dict[str, Any]:
    """Return a result as JSON values.

    Args:
        name: of the benchmark and its configuration.
        command: repeats the measurement.
        parameters: sizes and counts.
        results: the numbers.
        libraries: distributions whose versions matter; "|" separates alternatives. Those not installed are left out.
    """
    return {
        "benchmark": name,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **_commit(),
        "command": command,
        "hardware": _hardware(),
        "versions": {"python": platform.python_version()} | _versions(libraries),
        "parameters": dict(parameters),
        "results": dict(results),
    }


def write(folder: Path, result: Mapping[str, Any]) -> Path:
    """Write `folder/BENCHMARK-DATE.json` and return its path. A file of the same day is replaced."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{result['benchmark']}-{result['time'][:10]}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return path


def results_folder() -> Path:
    """Return the folder of the repository's results.

    Raises:
        ConfigError: the working directory is not the repository's root.
    """
    if not RESULTS.is_dir():
        raise ConfigError(f"--save writes to {RESULTS} of the repository, not found here; elsewhere use --json FILE")
    return RESULTS


def command_again(argv: Sequence[str] | None = None) -> str:
    """Return the command, by default that of this process, without places of this machine."""
    program, *words = sys.argv if argv is None else argv
    script = Path(program)
    start = f"python -m fourfold_bench.{script.stem}" if script.parent.name == "fourfold_bench" else "fourfold"
    kept = [
        word
        for at, word in enumerate(words)
        if word.partition("=")[0] not in _PLACES and (at == 0 or words[at - 1] not in _PLACES)
    ]
    return " ".join([start, *kept])


def medians(milliseconds: Sequence[float]) -> dict[str, Any]:
    """Return median and minimum of some runs, and the runs, in milliseconds."""
    return {
        "median_ms": round(statistics.median(milliseconds), 2),
        "min_ms": round(min(milliseconds), 2),
        "runs_ms": [round(value, 2) for value in milliseconds],
    }


def percentiles(seconds: Sequence[float]) -> dict[str, Any]:
    """Return median and 95th percentile of some runs in seconds, and the runs, in milliseconds."""
    return {
        "median_ms": round(1000 * statistics.median(seconds), 3),
        "p95_ms": round(1000 * percentile_95(seconds), 3),
        "runs_ms": [round(1000 * value, 3) for value in seconds],
    }


def percentile_95(values: Sequence[float]) -> float:
    """Return the value that is nearest to the 95th percentile."""
    ordered = sorted(values)
    return ordered[round(0.95 * (len(ordered) - 1))]


def _versions(libraries: Sequence[str]) -> dict[str, str]:
    found = {}
    for names in libraries:
        for name in names.split("|"):
            try:
                found[name] = importlib.metadata.version(name)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def _hardware() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(models, "unknown"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": find_gpus(),
        # A value well above the benchmark's own load shows that other processes disturbed it.
        "load_average_1min": round(os.getloadavg()[0], 2),
    }


def _commit() -> dict[str, Any]:
    """Return the commit of the code. FOURFOLD_COMMIT gives it in a copy without `.git`; an installation has none."""
    if given := os.environ.get("FOURFOLD_COMMIT"):
        return {"commit": given.removesuffix("-dirty"), "uncommitted_changes": given.endswith("-dirty")}
    try:
        # An installation may be inside a repository of something else, which does not track this file.
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        return {
            "commit": _git("rev-parse", "HEAD"),
            "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return {"commit": "", "uncommitted_changes": False}


def _git(*arguments: str) -> str:
    folder = Path(__file__).parent
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip()
