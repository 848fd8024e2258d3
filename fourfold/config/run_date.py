"""Fixes the date that chat templates write: a run has the same prompts on every day and in every process."""

from __future__ import annotations

import datetime
import tomllib
from contextlib import suppress
from pathlib import Path

from fourfold.config.schema import Config


def fix_date(config: Config, run_dir: Path | None) -> Config:
    """Return a recipe in which `data.date` is set: its own, that of the run in `run_dir`, or else the local time.

    If the config.toml of the run has no date, because an earlier release wrote it, the date is that of the file.
    """
    if config.data.date:
        return config
    now = datetime.datetime.now()
    if run_dir is not None:
        file = run_dir / "config.toml"
        with suppress(OSError, ValueError, KeyError, TypeError):  # no file or date, or a file that its user is editing
            now = datetime.datetime.fromtimestamp(file.stat().st_mtime)
            now = datetime.datetime.fromisoformat(tomllib.loads(file.read_text(encoding="utf-8"))["data"]["date"])
    return with_date(config, now.isoformat(timespec="seconds"))


def with_date(config: Config, date: str) -> Config:
    """Return a recipe with another `data.date`."""
    return config.model_copy(update={"data": config.data.model_copy(update={"date": date})})
