"""Describes the progress of a stopped run and how to continue it, for the terminal and for `fourfold view`."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from fourfold.host.program import resume_command

from ..state.ledger import Progress, read_progress
from .run_folder import read_stop_reason
from .run_names import LEDGER_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedRun:
    """A run of this machine that has stopped."""

    how: str  # "stopped", or "was stopped by" a signal
    resumption: str  # step at which it continues
    command: str  # command that continues it
    log: str  # log file that ends with the reason; empty if a signal stopped the run


def last_progress(run_dir: Path) -> Progress:
    """Return the progress of the run in a folder; step 0 if its coordinator never started."""
    try:
        return read_progress(run_dir / LEDGER_FILE)
    except sqlite3.Error:
        return Progress(0, None)


def describe_stop(run_dir: Path, progress: Progress) -> StoppedRun:
    """Return the description of a stopped run from its folder."""
    reason = read_stop_reason(run_dir)
    if progress.checkpoint_step is None:
        done = f" of its {_steps(progress.step)}" if progress.step else ""
        resumption = f"The run has no checkpoint{done}. To start it again"
    else:
        lost = max(progress.step - progress.checkpoint_step, 0)
        repeated = f", and repeats {_steps(lost)}" if lost else ""
        resumption = f"It continues from the checkpoint of step {progress.checkpoint_step}{repeated}"
    return StoppedRun(
        how=f"was stopped by {reason}" if reason else "stopped",
        resumption=resumption,
        command=resume_command(run_dir),
        log="" if reason else log_of(run_dir),
    )


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


def log_of(run_dir: Path) -> str:
    """Return the log file that ends with the reason of the run's end."""
    return str(run_dir / "logs" / "coordinator-0.log")
