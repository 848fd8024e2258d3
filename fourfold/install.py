"""Finds what other distributions register by entry points, and the command that installs what is missing."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import shutil
import sys
from contextlib import suppress
from importlib.metadata import EntryPoint
from pathlib import Path
from urllib.parse import unquote, urlsplit

from fourfold.errors import ConfigError


def install_command(*requirements: str, options: str = "") -> str:
    """Return the command that installs requirements, such as `fourfold-trainer[lora]`, in this environment.

    Fourfold's own distributions come from the checkout that `fourfold` is installed from, if it is from one: they may
    be in no package index.
    """
    python, found = Path(sys.executable), shutil.which("pip")
    own = python.with_name("pip")
    if found and own.exists() and own.samefile(found):
        program = "pip"
    elif version_of("pip"):  # not `find_spec`: setuptools warns when that looks for pip after distutils was imported
        program = f"{shlex.quote(_shown(python))} -m pip"
    else:
        program, options = "uv pip", f"--python {shlex.quote(_shown(python))} {options}".strip()
    words = [word for requirement in requirements for word in _source(requirement)]
    return " ".join(filter(None, [program, "install", options, shlex.join(words)]))


def find_tool(name: str, purpose: str) -> EntryPoint:
    """Return the entry point of a tool; `fourfold-tools` registers them, and no other distribution imports it.

    gguf-reader    module: `python -m MODULE FILE.gguf FOLDER` converts a GGUF file into a model folder
    gguf-writer    function that writes a model folder as a GGUF file
    step-time      class that predicts step times for `fourfold plan` (`fourfold.plan.speed.SpeedPredictor`)

    Raises:
        ConfigError: `fourfold-tools` is not installed; the message begins with `purpose`, which needs it.
    """
    if (entry := find_entry("fourfold.tools", name)) is None:
        how = install_command("fourfold-tools")
        raise ConfigError(f"{purpose} needs fourfold-tools, which is not installed; {how}")
    return entry


def find_entry(group: str, name: str) -> EntryPoint | None:
    """Return an entry point without loading it; None if no installed distribution registers it."""
    return next(iter(importlib.metadata.entry_points(group=group, name=name)), None)


def version_of(package: str) -> str:
    """Return the installed version of a package; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _source(requirement: str) -> list[str]:
    """Return the words of a requirement: its folder in the checkout, if there is one."""
    name, bracket, extras = requirement.partition("[")
    folders = {"fourfold": "", "fourfold-bench": "benchmarks", "fourfold-tools": "tools"}
    folder = folders.get(name, f"services/{name.removeprefix('fourfold-')}")
    root, editable = _checkout() if name.startswith("fourfold") else (None, False)
    if root is None or not (root / folder / "pyproject.toml").is_file():
        return [requirement]
    shown = _shown(root / folder)
    place = (shown if os.sep in shown or shown == "." else f"./{shown}") + bracket + extras
    return ["-e", place] if editable else [place]


def _checkout() -> tuple[Path | None, bool]:
    """Return the folder that `fourfold` was installed from, None if from no folder, and whether it is in place."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        # `python -m` and `python -c` in a checkout find its fourfold.egg-info first, which has no direct_url.json.
        for distribution in importlib.metadata.distributions(name="fourfold"):
            if text := distribution.read_text("direct_url.json"):
                found = json.loads(text)
                return Path(unquote(urlsplit(found["url"]).path)), bool(found["dir_info"].get("editable"))
    return None, False


def _shown(path: Path) -> str:
    """Return a path relative to the working directory if it is inside."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
