"""Divides the wall time of a step into phases, from metrics.jsonl and the coordinator's log."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from fourfold import metrics as m
from fourfold.errors import Internal

PHASES: Final[Mapping[str, str]] = {name.removeprefix("time/"): name for name in m.TIMES_OF_A_STEP}
"""Metrics of the phases that follow each other. A phase that a step does not have takes no time."""
OTHER: Final = "other"
WALL: Final = "wall"
# The coordinator logs this message at the end of each step (`step_report`).
_DONE: Final = re.compile(r"step (\d+) of \d+ is done")
# Prefixes of metrics that divide a phase further, in seconds.
_PARTS: Final = ("weights/", "train/seconds_")
_SPEEDS: Final = (m.ROLLOUT_SPEED, m.TRAIN_SPEED, m.TRAIN_TFLOPS, m.MISMATCH_MEAN, m.MISMATCH_MAX)


def read_steps(run_dir: Path, *, warm_up: int, steps: int) -> list[dict[str, float]]:
    """Return the metrics of the measured steps, each with its wall time: from the end of the step before to its end.

    Raises:
        Internal: a step is missing, or was skipped because it had nothing to learn.
    """
    rows = {row["step"]: row for row in _json_lines(run_dir / "metrics.jsonl")}
    ends = _ends(run_dir / "logs" / "coordinator-0.log")
    measured = []
    for step in range(warm_up + 1, warm_up + steps + 1):
        if step not in rows or step not in ends or step - 1 not in ends:
            raise Internal(f"step {step} is not in {run_dir / 'metrics.jsonl'} or in the coordinator's log")
        if rows[step][m.SKIPPED_STEPS] > rows[step - 1][m.SKIPPED_STEPS]:  # counted since the start of the run
            raise Internal(f"step {step} changed nothing: {rows[step]['diagnosis']}")
        measured.append({**rows[step], WALL: ends[step] - ends[step - 1]})
    return measured


def phases(row: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each phase of one step, of `other` (in no phase), and of the whole step (`wall`)."""
    found = {name: float(row[metric]) for name, metric in PHASES.items() if row.get(metric) is not None}
    wall = float(row[WALL])
    return found | {OTHER: wall - sum(found.values()), WALL: wall}


def parts(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of one step that divide its phases further."""
    found = {
        name: float(value) for name, value in row.items() if name.startswith(_PARTS) and isinstance(value, int | float)
    }
    found |= {name: float(row[name]) for name in _SPEEDS if row.get(name) is not None}
    if row.get(m.TRAIN_SPEED) and row.get(m.TOTAL_LENGTH) and row.get(m.TRAINED_SAMPLES):
        # The trainer's rate counts its own time only. The rest of time/train is spent outside of it, in the call.
        inside = row[m.TOTAL_LENGTH] * row[m.TRAINED_SAMPLES] / row[m.TRAIN_SPEED]
        found |= {"train/inside_seconds": inside, "train/outside_seconds": row[m.TIME_TRAIN] - inside}
    return found


def means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of every key that all rows have."""
    names = [name for name in rows[0] if all(name in row for row in rows)]
    return {name: statistics.fmean(row[name] for row in rows) for name in names}


def _ends(log: Path) -> dict[int, float]:
    """Return the time at which each step was done, in seconds since 1970."""
    found = {}
    for line in _json_lines(log):
        if match := _DONE.match(str(line.get("message", ""))):
            found[int(match[1])] = datetime.fromisoformat(line["time"]).timestamp()
    return found


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file; other lines in a log come from libraries."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
