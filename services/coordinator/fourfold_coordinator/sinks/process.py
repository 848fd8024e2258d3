"""Sends a run to one tracker: `python -m fourfold_coordinator.sinks.process RUN_DIR SINK`, and `fourfold log`.

The process that the coordinator starts follows metrics.jsonl until its stdin ends. Then it sends the rest and ends.
With `index` in place of a sink, it updates the index of the samples for `fourfold view`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fourfold import config as configuration
from fourfold.config import Config
from fourfold.errors import FourfoldError
from fourfold.host.process_tree import die_with_parent

from ..launch.run_folder import locked
from ..launch.run_names import CONFIG_FILE, LEDGER_FILE, METRICS_FILE
from ..state.trajectory_index import TrajectoryIndex
from .rows import NewRows
from .sink import FOLDER, INDEX, RunFacts, open_sink

_POLL_SECONDS: Final = 1.0
_NICENESS: Final = 10


def send(run_dir: Path, config: Config, name: str, *, has_ended: Callable[[], bool] = lambda: True) -> int:
    """Send the steps that a sink lacks until the run has ended; return the number of sent steps.

    Raises what the tracker's library raises, and ConfigError if another process sends to the same sink.
    """
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    with locked(folder / f"{name}.lock", f"process for the sink {name}"):
        rows = NewRows(run_dir / METRICS_FILE, run_dir / LEDGER_FILE, folder / f"{name}.sent")
        run_id = _run_id(folder / f"{name}.id")
        sink = open_sink(name, RunFacts(folder=run_dir, config=config, run_id=run_id, last_step=rows.last_step))
        count, ended = 0, False
        while not ended:
            ended = has_ended()  # checked before the rows are read, so that none is missed
            for row in rows:
                sink.log(row)
                count += 1
        sink.finish()
    return count


def _run_id(path: Path) -> str:
    """Return the id of this run in the tracker; make it if there is none."""
    with contextlib.suppress(FileNotFoundError):
        if text := path.read_text(encoding="ascii").strip():
            return text
    run_id = secrets.token_hex(4)
    path.write_text(f"{run_id}\n", encoding="ascii")
    return run_id


def _stdin_has_ended() -> bool:
    """Wait for a moment; return whether the coordinator has closed our stdin."""
    return bool(select.select([sys.stdin], [], [], _POLL_SECONDS)[0])


def _update_index(run_dir: Path) -> int:
    index, ended = TrajectoryIndex(run_dir), False
    while not ended:
        ended = _stdin_has_ended()
        index.update()
    return 0


def main(run_dir: Path, name: str) -> int:
    """Follow a run; return the exit code."""
    die_with_parent()
    os.nice(_NICENESS)
    if name == INDEX:
        return _update_index(run_dir)
    try:
        send(run_dir, configuration.load(run_dir / CONFIG_FILE), name, has_ended=_stdin_has_ended)
    except FourfoldError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
