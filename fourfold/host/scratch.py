"""Creates temporary folders that are removed even if their process is killed.

Each folder is locked by its process. The kernel releases the lock when the process ends, also after kill -9. Creating a
folder removes all unlocked folders of the same purpose.
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

# A folder has this prefix until it is locked. A young one is kept, because its process may be about to lock it.
_UNLOCKED: Final = "fourfold-new-"
_YOUNG_SECONDS: Final = 60.0


class Scratch:
    """A folder that only this user can enter. It exists as long as this process and its forked children live."""

    def __init__(self, purpose: str, *, root: Path | None = None) -> None:
        """Create the folder in `root` or the system's temporary folder, and remove the folders of dead processes.

        `purpose`, letters and dashes, is part of the name.
        """
        prefix = f"fourfold-{purpose}-"
        root = root or Path(tempfile.gettempdir())
        _remove_unlocked(root, prefix)
        _remove_unlocked(root, _UNLOCKED, min_age_seconds=_YOUNG_SECONDS)
        made = Path(tempfile.mkdtemp(prefix=_UNLOCKED, dir=root))  # mode 0700
        self._lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # The new name is free: `mkdtemp` chose its 8 random characters for this folder.
        self.path = made.rename(made.with_name(prefix + made.name.removeprefix(_UNLOCKED)))

    def remove(self) -> None:
        """Remove the folder and its content. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _remove_unlocked(root: Path, prefix: str, *, min_age_seconds: float = 0.0) -> None:
    """Remove unlocked folders of this user that have a minimum age."""
    for path in root.glob(f"{prefix}*"):
        with suppress(OSError):  # locked, removed in the meantime, or another user's
            status = path.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < min_age_seconds:
                continue
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
