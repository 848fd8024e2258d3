"""Finds the words with which a user's shell starts this program again, or continues a run."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path


def program() -> str:
    """Return `fourfold` if that is this program in the user's PATH, else its path, relative if it is below here.

    `make quickstart` runs .venv/bin/fourfold while the environment is not activated.
    """
    own, found = Path(sys.executable).parent / "fourfold", shutil.which("fourfold")
    if not own.exists() or (found is not None and own.samefile(found)):
        return "fourfold"
    here = Path.cwd()
    return str(own.relative_to(here) if own.is_relative_to(here) and own.parent != here else own)


def resume_command(run_dir: Path) -> str:
    """Return the command that continues the run of a folder."""
    return f"{program()} run --resume {shlex.quote(str(run_dir))}"
