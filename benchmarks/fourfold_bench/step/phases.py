"""Divides the time of a step into phases, from metrics.jsonl."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fourfold import metrics as m
from fourfold.errors import Internal

PHASES: Final[Mapping[str, str]] = {name.removeprefix("time/"): name for name in m.TIMES_OF_A_STEP}
"""Metrics of the phases that follow each other. A phase that a step does not have takes no time."""
OTHER: Final = "other"
WALL: Final = "wall"
# Prefixes of metrics that divide a phase further, in seconds.
_PARTS: Final = ("weights/", "train/seconds_")
_SPEEDS: Final = (m.ROLLOUT_SPEED, m.TRAIN_SPEED, m.TRAIN_TFLOPS, m.GPU_PEAK, m.MISMATCH_MEAN, m.MISMATCH_MAX)


def read_steps(run_dir: Path, *, warm_up: int, steps: int) -> list[dict[str, float]]:
    """Return the metrics of the measured steps.

    Raises:
        Internal: a step is missing, or was skipped because it had nothing to learn.
    """
    path = run_dir / "metrics.jsonl"
    rows = {row["step"]: row for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
    measured = []
    for step in range(warm_up + 1, warm_up + steps + 1):
        if not {step - 1, step} <= rows.keys():
            raise Internal(f"step {step - 1} or {step} is not in {path}")
        if rows[step][m.SKIPPED_STEPS] > rows[step - 1][m.SKIPPED_STEPS]:  # counted since the start of the run
            raise Internal(f"step {step} changed nothing: {rows[step]['diagnosis']}")
        measured.append(rows[step])
    return measured


def phases(row: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each phase of one step, of `other` (in no phase), and of the whole step (`wall`)."""
    every = {**PHASES, OTHER: m.TIME_OTHER, WALL: m.TIME_STEP}
    return {name: float(row[metric]) for name, metric in every.items() if row.get(metric) is not None}


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
