"""Follows the keys of a recipe that may change during a run: the table [asynchrony]."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from fourfold import config as configuration
from fourfold.config.rules import check_tables
from fourfold.config.schema import Config
from fourfold.errors import ConfigError

log = logging.getLogger("fourfold.coordinator")


class LiveRecipe:
    """The recipe of a run, read again when its file changes. Implements `RecipeFile`."""

    def __init__(self, path: Path, config: Config, assignments: Sequence[str] = ()) -> None:
        """Follow the file that `config` was read from, with `assignments`; it may be missing."""
        self._path, self.config, self._assignments = path, config, assignments
        self._stamp = self._read_stamp()

    async def update(self) -> bool:
        stamp = await asyncio.to_thread(self._read_stamp)
        if stamp is None or stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            found = await asyncio.to_thread(configuration.load, self._path, self._assignments)
            if not found.data.date:  # only the copy in the run's folder has a fixed date
                found = configuration.with_date(found, self.config.data.date)
            new = self.config.model_copy(update={"asynchrony": found.asynchrony})
            check_tables(new)  # check the lag with the tables of the run: those of the file are ignored
        except (ConfigError, ValueError) as error:
            log.warning("recipe changed and is ignored: %s", error)
            return False
        if found != new:
            log.warning("%s: only [asynchrony] can change during a run; other keys count after --resume", self._path)
        changed, self.config = new != self.config, new
        return changed

    def _read_stamp(self) -> tuple[int, int, int] | None:
        """Return a value that changes when the file is written or replaced; None without a file."""
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino
