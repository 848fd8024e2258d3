"""The folder of a run: creation, lock, coordinator address, and whether the run in it is finished."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from fourfold import config as configuration
from fourfold.config import Config
from fourfold.errors import ConfigError

ADDRESS_FILE: Final = "coordinator.address"
CONFIG_FILE: Final = "config.toml"
REPORT_FILE: Final = "report.json"
# In the environment of a coordinator that the launcher restarted: how the one before it died.
DEATH_VARIABLE: Final = "FOURFOLD_COORDINATOR_DEATH"


def make_run_dir(config: Config, name: str, root: Path = Path("runs")) -> tuple[Path, Config]:
    """Make runs/<name>, or <name>-2, -3 ... when it exists, and write config.toml; return both, under that name."""
    number = 1
    while True:
        candidate = name if number == 1 else f"{name}-{number}"
        try:
            named = Config.model_validate({**config.model_dump(), "name": candidate})
        except ValueError:
            raise ConfigError(f"name = {candidate!r}: 1 to 64 characters of A-Z a-z 0-9 _ -; choose another") from None
        try:
            (root / candidate).mkdir(parents=True)
            (root / candidate / CONFIG_FILE).write_text(configuration.dump(named), encoding="utf-8")
            return root / candidate, named
        except FileExistsError:
            number += 1
        except OSError as error:
            raise ConfigError(f"{root / candidate}: cannot make the folder of the run ({error.strerror})") from None


@contextmanager
def locked(file: Path, holder: str) -> Iterator[None]:
    """Hold an exclusive lock on a file; raise ConfigError when another process, a `holder`, has it.

    The kernel releases the lock when this process dies.
    """
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{file.parent}: another {holder} uses this folder; stop it first") from None
        yield


def read_address(run_dir: Path) -> str:
    """Return the address of the run's coordinator; raise ConfigError when no run was started in the folder."""
    file = run_dir / ADDRESS_FILE
    if not file.is_file():
        raise ConfigError(f"{run_dir}: no run was started here (no {ADDRESS_FILE}); give a folder of runs/")
    return file.read_text(encoding="utf-8").strip()


def is_finished(run_dir: Path, config: Config) -> bool:
    """Return whether the run has done all steps of `config` and has written its report."""
    try:
        done = json.loads((run_dir / REPORT_FILE).read_text(encoding="utf-8"))["steps"]
    except (OSError, ValueError, KeyError, TypeError):  # no report, or one that must be written again
        return False
    return isinstance(done, int) and done >= config.steps
