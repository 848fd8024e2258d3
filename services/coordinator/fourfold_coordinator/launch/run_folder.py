"""The folder of a run: creation, lock, coordinator address, and whether the run finished, stopped or failed to start.

runs/demo           the first run with this name
runs/demo-2         the second one
runs/demo.failed    the last start that failed before a step was done; its name is free again
runs/latest         symbolic link to the folder of the run that was started last
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import sqlite3
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from pydantic import ValidationError

from fourfold import config as configuration
from fourfold import hub
from fourfold.config.schema import Config
from fourfold.errors import ConfigError
from fourfold.host.disk import make_private_folder
from fourfold.host.program import resume_command
from fourfold.model import runs
from fourfold.text import clean, nearest_name

from ..state.ledger import Progress, read_progress
from .run_names import (
    ADDRESS_FILE,
    CONFIG_FILE,
    FAILED_SUFFIX,
    LATEST,
    LEDGER_FILE,
    METRICS_FILE,
    REPORT_FILE,
    STOP_FILE,
)

_HOLDER_CHARACTERS: Final = 200
# `is_locked` holds a lock for a moment; a starting process waits this long for it.
_PROBE_SECONDS: Final = 0.5
_MOST_REASON: Final = 100  # characters


def make_run_dir(config: Config, name: str, root: Path = Path("runs")) -> tuple[Path, Config]:
    """Make runs/<name>, or <name>-2, -3 ... when it exists, and write config.toml; return both, under that name.

    Sources of the hub are pinned to the commits that are in the cache, and the date of chat templates to now: a
    resumed run has the same prompts.
    """
    number = 2 if name == LATEST else 1  # runs/latest is the link
    tables = pin_sources(configuration.fix_date(config, None).model_dump())
    while True:
        candidate = name if number == 1 else f"{name}-{number}"
        try:
            named = Config.model_validate({**tables, "name": candidate})
        except ValidationError as error:
            if any(each["loc"] != ("name",) for each in error.errors()):
                raise
            raise ConfigError(f"name = {candidate!r}: 1 to 64 characters of A-Z a-z 0-9 _ -; choose another") from None
        try:
            make_private_folder(root / candidate, exist_ok=False)
            (root / candidate / CONFIG_FILE).write_text(configuration.dump(named), encoding="utf-8")
            return root / candidate, named
        except FileExistsError:
            number += 1
        except OSError as error:
            raise ConfigError(f"{root / candidate}: cannot make the folder of the run ({error.strerror})") from None


def pin_sources(value: Any, key: str = "") -> Any:
    """Return tables of a recipe in which models and data sets of the hub have their commits, and `@best` its step."""
    if isinstance(value, Mapping):
        return {name: pin_sources(entry, name) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [pin_sources(entry, key) for entry in value]
    if key in ("source", "path") and isinstance(value, str) and value.startswith(hub.PREFIX):
        return hub.pin(value, "model" if key == "source" else "dataset")
    if key == "source" and isinstance(value, str) and value.startswith(runs.PREFIX):
        return runs.pin(value, key)
    return value


def link_latest(run_dir: Path) -> None:
    """Let runs/latest point to the folder of a run. Without it, users have to write the name."""
    link, new = run_dir.parent / LATEST, run_dir.parent / f".{LATEST}-{os.getpid()}"
    with suppress(OSError):  # a file system without links, or a folder of that name
        new.symlink_to(run_dir.name)
        new.replace(link)
    with suppress(OSError):
        new.unlink(missing_ok=True)


def find_run(path: Path) -> Path:
    """Return the folder of a run; runs/latest is resolved, and other paths are returned unchanged.

    Raises ConfigError: there is no such path, but a run with a similar name; or the path cannot be read by this user.
    """
    try:
        if path.is_symlink():
            path = path.parent / path.readlink()
        exists = path.exists()
        closed = path.is_dir() and not os.access(path, os.R_OK | os.X_OK)
    except OSError as error:  # such as a name that is too long
        raise ConfigError(
            f"{clean(str(path), 80)}: cannot be read ({error.strerror}); give the name of a folder"
        ) from None
    if closed:
        raise ConfigError(
            f"{path}: the folder is private to the user with uid {path.stat().st_uid}; run this command as that user, "
            f"or change the rights of the folder"
        )
    if not exists and ":" not in str(path):  # not hf:OWNER/NAME
        runs = {
            file.parent.name: file.parent
            for root in (Path("runs"), path.parent)
            for file in root.glob(f"*/{CONFIG_FILE}")
        }
        if near := nearest_name(path.name, runs):
            raise ConfigError(f"{path} does not exist; did you mean {runs[near]}?")
    return path


def free_name(run_dir: Path) -> Path:
    """Rename the folder of a run that failed before its first step, if there is none; return where it is.

    Otherwise the next start could not have the name of the failed one.
    """
    try:
        if (run_dir / METRICS_FILE).stat().st_size:
            return run_dir
    except OSError:
        pass
    failed = run_dir.with_name(run_dir.name + FAILED_SUFFIX)
    try:
        shutil.rmtree(failed, ignore_errors=True)
        run_dir.rename(failed)
    except OSError:
        return run_dir
    link_latest(failed)
    return failed


@contextmanager
def locked(file: Path, holder: str) -> Iterator[None]:
    """Hold an exclusive lock on a file, as `holder`; raise ConfigError with the process that has it, if another has.

    The kernel releases the lock when this process dies.
    """
    with file.open("a+", encoding="utf-8", errors="replace") as lock:  # its text describes the holder
        end = time.monotonic() + _PROBE_SECONDS
        while not _try_lock(lock, fcntl.LOCK_EX):
            if time.monotonic() >= end:
                lock.seek(0)
                found = clean(lock.read(_HOLDER_CHARACTERS)) or f"another {holder}"  # it has not written yet
                raise ConfigError(f"{file.parent}: {found} uses this folder; wait for its end, or stop it")
            time.sleep(_PROBE_SECONDS / 10)
        with suppress(OSError):  # the disk is full
            os.ftruncate(lock.fileno(), 0)
            os.write(lock.fileno(), f"{holder} (process {os.getpid()} on {socket.gethostname()})".encode())
        yield


def is_locked(file: Path) -> bool:
    """Return whether a process of this machine holds the lock on a file."""
    try:
        with file.open() as lock:
            return not _try_lock(lock, fcntl.LOCK_SH)  # NFS refuses LOCK_EX on a file that is open for reading
    except OSError:  # there is no such file
        return False


def _try_lock(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_address(run_dir: Path) -> str:
    """Return the address of the run's coordinator; raise ConfigError when no run was started in the folder."""
    file = run_dir / ADDRESS_FILE
    if not file.is_file():
        raise ConfigError(f"{run_dir}: no run was started here (no {ADDRESS_FILE}); give a folder of runs/")
    return file.read_text(encoding="utf-8", errors="replace").strip()


def write_stop_reason(run_dir: Path, reason: str) -> None:
    """Store the reason of a run's stop, for its coordinator and for later reports; an empty reason deletes it."""
    with suppress(OSError):
        if reason:
            (run_dir / STOP_FILE).write_text(reason, encoding="utf-8")
        else:
            (run_dir / STOP_FILE).unlink(missing_ok=True)


def read_stop_reason(run_dir: Path) -> str:
    """Return the signal that stopped the run, such as "SIGINT (Ctrl-C)"; empty if there was none."""
    try:
        with (run_dir / STOP_FILE).open(encoding="utf-8", errors="replace") as file:
            return clean(file.read(_MOST_REASON)).strip()
    except OSError:
        return ""


def is_finished(run_dir: Path, config: Config | None = None) -> bool:
    """Return whether the run has done all steps of `config`, by default of its config.toml, and has written its report.

    A run that was extended keeps the report of fewer steps until its new end.
    """
    try:
        done = json.loads((run_dir / REPORT_FILE).read_text(encoding="utf-8"))["steps"]
        # `configuration.load` may refuse the file: it may be of another release, or a copy from another machine.
        steps = config.steps if config else tomllib.loads((run_dir / CONFIG_FILE).read_text(encoding="utf-8"))["steps"]
        return bool(done >= steps)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # no report, or one that must be written again
        return False


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
