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

# A folder has this name until its owner has the lock. A young one is left alone: the owner may be about to take it.
_UNLOCKED: Final = "fourfold-new-"
_YOUNG_SECONDS: Final = 60.0


class Scratch:
    """A folder that only this user can enter, for as long as this process and those forked from it live."""

    def __init__(self, purpose: str, *, root: Path | None = None) -> None:
        """Make it, and remove what dead processes left.

        Args:
            purpose: part of its name; letters and dashes.
            root: folder to make it in; default: the system's temporary folder.

        Raises:
            OSError: it cannot be made.
        """
        prefix = f"fourfold-{purpose}-"
        root = root or Path(tempfile.gettempdir())
        _sweep(root, prefix)
        _sweep(root, _UNLOCKED, younger_than=_YOUNG_SECONDS)
        made = Path(tempfile.mkdtemp(prefix=_UNLOCKED, dir=root))  # mode 0700
        self._lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # The random part is not in use: `mkdtemp` chose it, and 8 characters do not come twice in one folder.
        self.path = made.rename(made.with_name(prefix + made.name.removeprefix(_UNLOCKED)))

    def remove(self) -> None:
        """Remove the folder with all that is in it. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _sweep(root: Path, prefix: str, *, younger_than: float = 0.0) -> None:
    """Remove the folders of this user that nobody holds, but for those younger than so many seconds."""
    for path in root.glob(f"{prefix}*"):
        with suppress(OSError):  # held, gone meanwhile, or not ours
            status = path.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < younger_than:
                continue
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
