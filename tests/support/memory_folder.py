"""A temporary folder that no disk can stall."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_SHARED_MEMORY: Final = "/dev/shm"


@contextmanager
def memory_folder() -> Iterator[Path]:
    """Yield an empty folder in memory, or on disk on machines without /dev/shm; remove it afterwards."""
    place = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="test-run-", dir=place) as folder:
        yield Path(folder)
