"""Bounds the log file of a process that does not know about it: what a launcher redirects stdout and stderr to.

The process holds the file open for appending, so the file cannot be renamed under it. Its content is copied to
NAME.log.1 and cut off, but for the end, which tells why the process died if it does so next.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

MAX_BYTES: Final = 32 << 20
"""Largest log; NAME.log.1 has as many bytes again."""
KEPT_BYTES: Final = 64 << 10
"""Bytes at the end of a log that stay in it when it is cut; the first line of them is whole."""


def rotate(log: Path) -> bool:
    """Cut a log that others have open for appending off if it is too long; return whether it was.

    What they write in the microseconds between the last look and the cut is lost.
    """
    try:
        if log.stat().st_size <= MAX_BYTES:
            return False
        with log.open("rb") as source, log.with_name(f"{log.name}.1").open("w+b") as older, log.open("ab") as file:
            shutil.copyfileobj(source, older, 1 << 20)
            while os.fstat(file.fileno()).st_size > older.tell():  # it has grown meanwhile
                shutil.copyfileobj(source, older)
            os.truncate(log, 0)
            older.seek(max(0, older.tell() - KEPT_BYTES))
            end = older.read()
            file.write(end.partition(b"\n")[2] if len(end) == KEPT_BYTES else end)
    except OSError:  # no space left, or the file is gone: the next round tries again
        return False
    return True
