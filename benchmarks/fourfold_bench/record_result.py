"""A benchmark's result: what was measured, on what, of which commit, by which command."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fourfold.cli.doctor import find_gpus


def document(
    name: str, *, command: str, parameters: Mapping[str, Any], results: Mapping[str, Any], libraries: Sequence[str]
) -> dict[str, Any]:
    """Return a result as JSON values.

    Args:
        name: of the benchmark.
        command: that runs it again.
        parameters: sizes and counts.
        results: what came out.
        libraries: distributions that matter to the numbers; "|" separates alternatives, and one that is not installed
            is left out.
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


def write(folder: Path, result: Mapping[str, Any], label: str = "") -> Path:
    """Write `folder/LABEL-DATE.json`, LABEL the benchmark unless given; return its path. One of that day is lost."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{label or result['benchmark']}-{result['time'][:10]}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return path


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
    """Return which code runs; a copy without its git folder is told by FOURFOLD_COMMIT, an installation has none."""
    if told := os.environ.get("FOURFOLD_COMMIT"):
        return {"commit": told.removesuffix("-dirty"), "uncommitted_changes": told.endswith("-dirty")}
    try:
        # The code's folder, not the caller's; and not one that an installation happens to be in.
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
