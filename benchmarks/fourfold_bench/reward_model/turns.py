"""Lets the benchmark and its child processes take turns: the benchmark asks for a round, and one child measures it.

    child: NAME.ready; benchmark: NAME.ask.N (JSON) --> child: round --> NAME.answer.N (JSON)

A file appears under its name when it is complete. Only one round runs at a time, so that the ways do not disturb each
other on the device that they share.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

_POLL_SECONDS: Final = 0.005
_IDLE_SECONDS: Final = 900.0


def ask(folder: Path, name: str, number: int, request: dict[str, Any]) -> Path:
    """Ask a child for its round `number`, from 0; return the file of the answer."""
    _write(folder / f"{name}.ask.{number}", request)
    return folder / f"{name}.answer.{number}"


def ready(folder: Path, name: str) -> Path:
    """Return the file that a child makes when it can answer."""
    return folder / f"{name}.ready"


def serve(folder: Path, name: str, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer requests; return if none comes for 15 minutes. The benchmark ends its children before."""
    ready(folder, name).touch()
    number, deadline = 0, time.monotonic() + _IDLE_SECONDS
    while time.monotonic() < deadline:
        path = folder / f"{name}.ask.{number}"
        if not path.exists():
            time.sleep(_POLL_SECONDS)
            continue
        request = json.loads(path.read_text(encoding="utf-8"))
        _write(folder / f"{name}.answer.{number}", answer(request))
        number, deadline = number + 1, time.monotonic() + _IDLE_SECONDS


def _write(path: Path, value: dict[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(value), encoding="utf-8")
    partial.replace(path)
