"""Keeps config.toml of a run equal to the present recipe, and records each change in recipe-changes.jsonl.

    {"time": "2026-11-26T13:40:06.000Z", "step": 1, "changes": {"steps": [6, 4], "retry.restarts": [3, 5]}}

`step` is the last step with the old values. An unset key has the value null. The ledger has the recipe of the last
start, so that edits of config.toml are found, too.
"""

from __future__ import annotations

import json
import logging
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fourfold import config as configuration
from fourfold.config.schema import Config
from fourfold.host.clock import SYSTEM_CLOCK, utc_text
from fourfold.host.disk import append_lines

from .files import DiskWriter, replace_file
from .ledger import Ledger

log = logging.getLogger("fourfold.coordinator")

CHANGES_FILE: Final = "recipe-changes.jsonl"
_RECIPE_KEY: Final = "recipe"  # key in the ledger


class RecipeHistory:
    """Records the recipe of one coordinator process."""

    def __init__(
        self, ledger: Ledger, disk: DiskWriter, file: Path, recipe: Path, assignments: Sequence[str] = ()
    ) -> None:
        """Keep `file`, the run's config.toml; this process was started with `recipe` and `assignments` of keys."""
        self._ledger, self._disk, self._file = ledger, disk, file
        # A file that the user edits has the new values already.
        self._has_own = recipe.absolute() == file.absolute()
        self._is_own = self._has_own and not assignments
        self.assignments = () if self._has_own else assignments
        """Assignments that `recipe` does not have after `record`."""

    def changes(self, config: Config) -> dict[str, tuple[Any, Any]]:
        """Return old and new value of each key of `config` that differs from the recipe that was recorded last."""
        old = self._ledger.get(_RECIPE_KEY) or self._read()
        return changed_keys(tomllib.loads(old), tomllib.loads(configuration.dump(config))) if old else {}

    async def record(self, config: Config) -> None:
        """Record `config`, the recipe of the next step; log the keys that changed."""
        new = configuration.dump(config)
        if changes := self.changes(config):
            step, words = self._ledger.last_step(), describe_changes(changes)
            log.warning("recipe changed: after_step=%d file=%s changes: %s", step, self._file, words)
            entry = {"time": utc_text(SYSTEM_CLOCK.now()), "step": step, "changes": changes}
            line = json.dumps(entry, default=str) + "\n"  # TOML also has dates
            await self._disk.write(append_lines, self._file.with_name(CHANGES_FILE), line.encode())
        # A file without data.date gets it.
        kept = self._is_own and config.data.date in self._read()
        if not kept and new != self._read():
            await self._disk.write(replace_file, self._file, [new])
        self._is_own = self._has_own  # with the assignments
        if new != self._ledger.get(_RECIPE_KEY):
            await self._disk.write(self._ledger.put, {_RECIPE_KEY: new})

    def _read(self) -> str:
        """Return the text of the run's config.toml; empty if there is none, or a broken one."""
        try:
            text = self._file.read_text(encoding="utf-8")
            tomllib.loads(text)
        except (OSError, ValueError):
            return ""
        return text


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return old and new value of each key of a recipe that differs; None for one that is unset."""
    before, after = configuration.flatten(old), configuration.flatten(new)
    return {key: (before.get(key), after.get(key)) for key in before | after if before.get(key) != after.get(key)}


def describe_changes(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Return changes of keys as text, such as "seed 5 -> 7"."""
    return ", ".join(f"{key} {_text(before)} -> {_text(after)}" for key, (before, after) in changes.items())


def _text(value: Any) -> str:
    return "unset" if value is None else configuration.toml_value(value)
