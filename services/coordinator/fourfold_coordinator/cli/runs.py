"""`fourfold runs`: lists the runs of a folder, and deletes some of them.

fourfold runs                                 list runs/
fourfold runs delete runs/demo runs/*.failed  delete these, after a question
fourfold runs delete --older-than 30          all that ended more than 30 days ago
fourfold runs delete runs/demo --only checkpoints
"""

from __future__ import annotations

import argparse
import os
import shutil
import sqlite3
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fourfold.cli.numbers import number
from fourfold.errors import ConfigError
from fourfold.text import align_columns, format_bytes, format_duration, format_short_score

from ..launch.run_folder import find_run, is_finished, is_locked, locked
from ..launch.run_names import (
    CONFIG_FILE,
    COORDINATOR_LOCK,
    CRITIC_FOLDER,
    EMA_FOLDER,
    EVALUATIONS_FOLDER,
    FAILED_SUFFIX,
    LATEST,
    LEDGER_FILE,
    MODEL_FOLDER,
    RUN_LOCK,
    STEP_FOLDER,
)
from ..state.eval_results import EvalRow
from ..state.ledger import read_evals, read_progress

_ROOT: Final = Path("runs")
_DELETED_SUFFIX: Final = ".deleted"  # suffix of a folder whose deletion was interrupted
_DAY_SECONDS: Final = 86_400
_USED: Final = ("running", "evaluating")  # states in which the folder may not be deleted
# Folders of a run by the part that `--only` names.
_PARTS: Final[Mapping[str, Sequence[str]]] = {
    "checkpoints": ("checkpoints",),
    "model": (MODEL_FOLDER, f"{STEP_FOLDER}*", EMA_FOLDER, CRITIC_FOLDER),
    "evaluations": (EVALUATIONS_FOLDER,),
    "logs": ("logs",),
    "experiences": ("experiences",),
}


@dataclass(frozen=True, slots=True)
class Run:
    """A run in its folder."""

    folder: Path
    state: str  # running, evaluating, finished, stopped or failed
    step: int
    evaluation: EvalRow | None  # the last one on held-out prompts
    changed: float  # when a file in its folder changed last, in seconds since 1970


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=["list", "delete"], default="list", help="default: list")
    parser.add_argument("folders", nargs="*", type=Path, metavar="RUN_DIR", help="delete: folders of runs")
    parser.add_argument(
        "--older-than", type=number, metavar="DAYS", help="delete: all runs that changed last before so many days"
    )
    parser.add_argument(
        "--only", choices=[*_PARTS], action="append", default=[], help="delete: only this part of each run; repeatable"
    )
    parser.add_argument("--yes", action="store_true", help="delete: do not ask")
    parser.add_argument("--root", type=Path, default=_ROOT, metavar="FOLDER", help="folder of the runs, default: runs")


def main(args: argparse.Namespace) -> int:
    """List or delete runs; return the exit code."""
    if args.action == "list":
        if args.folders or args.older_than is not None or args.only:
            raise ConfigError("`fourfold runs list` takes --root alone; to delete runs: fourfold runs delete RUN_DIR")
        return _list(args.root)
    if not args.folders and args.older_than is None:
        raise ConfigError("`fourfold runs delete` needs folders of runs, or --older-than DAYS")
    if args.older_than is not None and not args.older_than >= 0:
        raise ConfigError(f"--older-than {args.older_than:g}: it must be a number of days, at least 0")
    return _delete(_chosen(args), args.only, ask=not args.yes)


def find_runs(root: Path) -> list[Run]:
    """Return the runs in a folder, those that changed last at the end."""
    folders = [path.parent for path in root.glob(f"*/{CONFIG_FILE}") if not path.parent.is_symlink()]
    return sorted(map(read_run, folders), key=lambda run: run.changed)


def read_run(folder: Path) -> Run:
    """Return what is known about the run in a folder."""
    changed = max((_change_time(each) for each in folder.iterdir() if not _is_touched(each)), default=0.0)
    evaluation, step = None, 0
    with suppress(sqlite3.Error):  # a start that failed has no ledger
        step = read_progress(folder / LEDGER_FILE).step
        evaluation = max(read_evals(folder / LEDGER_FILE), key=lambda row: row.step, default=None)
    if is_locked(folder / COORDINATOR_LOCK) or is_locked(folder / RUN_LOCK):
        state = "running"
    elif any(map(is_locked, folder.glob(f"{EVALUATIONS_FOLDER}/*/{RUN_LOCK}"))):
        state = "evaluating"
    elif is_finished(folder):
        state = "finished"
    else:
        state = "failed" if folder.suffix == FAILED_SUFFIX else "stopped"
    return Run(folder, state, step, evaluation, changed)


def _is_touched(path: Path) -> bool:
    """Return whether the file is a link, or may change when the run is read, like SQLite's files beside the ledger."""
    return path.name.startswith((f"{LEDGER_FILE}-", RUN_LOCK)) or path.is_symlink()


def _change_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # deleted meanwhile: a run replaces some of its files
        return 0.0


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder on the disk; files with several names count once."""
    found = {}
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                stat = (Path(place) / name).lstat()
            except FileNotFoundError:  # deleted meanwhile
                continue
            found[stat.st_dev, stat.st_ino] = stat.st_size
    return sum(found.values())


def _list(root: Path) -> int:
    runs = find_runs(root)
    if not runs:
        print(f"no runs in {root}; start one: fourfold run RECIPE.toml, or name another folder with --root")
        return 0
    rows = [["run", "state", "step", "held-out score", "size", "last change"]]
    for run in runs:
        score = "-" if run.evaluation is None else _score(run.evaluation, run.step)
        age = _age(time.time() - run.changed)
        rows.append([str(run.folder), run.state, str(run.step), score, format_bytes(folder_bytes(run.folder)), age])
    print("\n".join(align_columns(rows)))
    return 0


def _score(row: EvalRow, step: int) -> str:
    """Return a held-out score, with its step if later ones are done."""
    notes: list[str] = [row.measure] if row.measure != "score" else []
    notes += [f"step {row.step}"] if row.step != step else []
    return format_short_score(row.score, row.answer_count, row.missing_count, *notes, measure=row.measure)


def _chosen(args: argparse.Namespace) -> list[Run]:
    """Return the runs to delete. Raises ConfigError: a folder is no run, or in use."""
    runs = (
        [read_run(_checked(folder)) for folder in dict.fromkeys(args.folders)] if args.folders else find_runs(args.root)
    )
    if args.older_than is not None:
        limit = time.time() - args.older_than * _DAY_SECONDS
        runs = [run for run in runs if run.changed < limit and run.state not in _USED]
    _check_unused(runs)
    return runs


def _check_unused(runs: Iterable[Run]) -> None:
    for run in runs:
        if run.state in _USED:
            user = "`fourfold eval`" if run.state == "evaluating" else "a run"
            raise ConfigError(f"{run.folder} is in use by {user}; wait for its end, or stop it")


def _checked(folder: Path) -> Path:
    if folder.is_symlink():
        raise ConfigError(f"{folder} is a link to {folder.readlink()}; name the folder itself")
    if not (find_run(folder) / CONFIG_FILE).is_file():
        raise ConfigError(f"{folder}: not the folder of a run (no {CONFIG_FILE}); nothing was deleted")
    return folder


def _delete(runs: Sequence[Run], only: Sequence[str], *, ask: bool) -> int:
    patterns = [pattern for part in only for pattern in _PARTS[part]]
    found = (sorted(run.folder.glob(pattern)) for run in runs for pattern in patterns)
    targets = [path for paths in found for path in paths if path.is_dir()] if only else [run.folder for run in runs]
    if not targets:
        print("nothing to delete")
        return 0
    sizes = {path: folder_bytes(path) for path in targets}
    print("\n".join(align_columns([[str(path), format_bytes(size)] for path, size in sizes.items()])))
    total = f"{len(targets)} folder{'s' * (len(targets) > 1)}, {format_bytes(sum(sizes.values()))}"
    if ask and not _confirmed(f"Delete {total}? [y/N] "):
        print("nothing was deleted")
        return 1
    _check_unused([read_run(_checked(run.folder)) for run in runs])  # the run may have started since the question
    for run in runs:
        gone = run.folder.with_name(run.folder.name + _DELETED_SUFFIX)
        shutil.rmtree(gone, ignore_errors=True)
        with locked(run.folder / RUN_LOCK, "`fourfold runs delete`"):
            if not only:
                run.folder.rename(gone)
            for path in targets if only else ():
                if path.is_relative_to(run.folder):
                    shutil.rmtree(path)
        if not only:
            shutil.rmtree(gone)  # after the lock is released: NFS keeps an open file and its folder
    _unlink_latest(run.folder.parent for run in runs)
    print(f"deleted {total}")
    return 0


def _confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("nothing was deleted, because stdin is no terminal that could answer; add --yes")
    return input(question).strip().lower() in ("y", "yes")


def _unlink_latest(roots: Iterable[Path]) -> None:
    """Remove links runs/latest to folders that are gone."""
    for root in set(roots):
        link = root / LATEST
        if link.is_symlink() and not link.exists():
            link.unlink()


def _age(seconds: float) -> str:
    days = seconds / _DAY_SECONDS
    return f"{days:.0f} days ago" if days >= 2 else f"{format_duration(max(seconds, 0.0))} ago"
