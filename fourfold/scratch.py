"""Folders in the system's temporary folder that do not pile up there.

A folder is held by a lock that the kernel drops with its last holder, kill -9 included. Whoever
makes a new one removes those of the same purpose that nobody holds any more.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

# Younger ones are left alone: their owner may be about to take the lock.
_YOUNG_SECONDS: Final = 60.0


class Scratch:
    """A folder that only this user can enter, for as long as this process and those forked from it live."""

    def __init__(self, purpose: str) -> None:
        """Make it, and remove what dead processes left.

        Args:
            purpose: part of its name; letters and dashes.

        Raises:
            OSError: it cannot be made.
        """
        prefix = f"fourfold-{purpose}-"
        _sweep(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))  # mode 0700
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove the folder with all that is in it. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _sweep(prefix: str) -> None:
    """Remove the folders of this user that nobody holds."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # held, gone meanwhile, or not ours
            status = path.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _YOUNG_SECONDS:
                continue
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
