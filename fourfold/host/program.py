"""Returns the shell commands that start this program again, or continue a run."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from fourfold.text import clean

_LAUNCH_FILE: Final = ".launch.json"
_MOST_CHARACTERS: Final = 300  # of a value
# Options of `fourfold run` about the place of services, with their defaults. A resumed run needs the same values.
LAUNCH_OPTIONS: Final[Mapping[str, str]] = {"launcher": "local", "ray_address": "", "listen": "127.0.0.1:0"}


def program() -> str:
    """Return `fourfold` if the user's PATH finds this program, else its path, relative if below this folder.

    `make quickstart` runs .venv/bin/fourfold while the environment is not activated.
    """
    own, found = Path(sys.executable).parent / "fourfold", shutil.which("fourfold")
    if not own.exists() or (found is not None and own.samefile(found)):
        return "fourfold"
    here = Path.cwd()
    return shlex.quote(str(own.relative_to(here) if own.is_relative_to(here) and own.parent != here else own))


def write_launch_options(run_dir: Path, options: Mapping[str, str]) -> None:
    """Store the values of LAUNCH_OPTIONS with which a run is started, for `resume_command`."""
    with suppress(OSError):  # the disk is full
        (run_dir / _LAUNCH_FILE).write_text(json.dumps({name: options[name] for name in LAUNCH_OPTIONS}))


def resume_command(run_dir: Path) -> str:
    """Return the command that continues the run of a folder with the options of its last start."""
    words = ["run", "--resume", str(run_dir)]
    with suppress(OSError, ValueError, AttributeError, RecursionError):  # started by hand, or a damaged file
        words += launch_words(json.loads((run_dir / _LAUNCH_FILE).read_text(encoding="utf-8")))
    return f"{program()} {shlex.join(words)}"


def launch_words(options: Mapping[str, object]) -> list[str]:
    """Return the words of a command that set LAUNCH_OPTIONS to these values, where they differ from the defaults."""
    found = {name: options.get(name, default) for name, default in LAUNCH_OPTIONS.items()}
    given = {name: value for name, value in found.items() if value != LAUNCH_OPTIONS[name]}
    return [
        word
        for name, value in given.items()
        for word in (f"--{name.replace('_', '-')}", clean(str(value), _MOST_CHARACTERS))
    ]
