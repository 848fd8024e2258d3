"""Recognises errors of a full disk, checks free space before a run, and appends whole lines to files."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Final

from fourfold.errors import ConfigError

RUN_GIB: Final = 6
"""Disk of a quickstart: three checkpoints (the oldest is deleted last), the exported and the converted model."""
LEAST_MIB: Final = 256
"""Less than this does not even suffice for the ledger, samples and logs of a run."""
_GIB: Final = 1 << 30
# EFBIG: a limit of the process (ulimit -f). EIO: from some network file systems when they are full.
_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
# SQLite returns FULL for ENOSPC, IOERR for the others, and CANTOPEN if it cannot create its write-ahead log.
_SQLITE_CODES: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN})
_PRIMARY_CODE: Final = 0xFF
_SCAN_BYTES: Final = 1 << 16
_SHARED_MEMORY: Final = Path("/dev/shm")


def is_full(error: BaseException) -> bool:
    """Return whether a write failed because the disk is full or a quota or file size limit is reached."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", 0) & _PRIMARY_CODE in _SQLITE_CODES
    return isinstance(error, OSError) and error.errno in _ERRNOS


def free_gib(folder: Path) -> float:
    """Return the GiB that this user may still write to the file system of `folder`."""
    return shutil.disk_usage(folder).free / _GIB


def check_room(folder: Path) -> str:
    """Return a warning if a run usually takes more space than is free; raise ConfigError if no run can start."""
    free = free_gib(folder)
    if free * 1024 < LEAST_MIB:
        raise ConfigError(
            f"{folder}: {free * 1024:.0f} MiB of disk free, a run needs at least {LEAST_MIB} MiB to start; free some "
            f"space, or work in another folder"
        )
    if free < RUN_GIB:
        return (
            f"{folder}: {free:.1f} GiB of disk free, runs and models take about {RUN_GIB} GiB; the run waits "
            f"while the disk is full: free some space, or lower checkpoint.keep"
        )
    return ""


def explain_no_space(text: str, folder: Path) -> str:
    """Return what is free on a folder's disk and in /dev/shm if a text has the error of both; otherwise nothing.

    Call it on the machine on which the text was written.
    """
    if os.strerror(errno.ENOSPC) not in text or str(_SHARED_MEMORY) in text:
        return ""
    free = list[str]()
    for path in (folder, _SHARED_MEMORY):
        with suppress(OSError):
            usage = shutil.disk_usage(path)
            free.append(f"{path} has {usage.free >> 20:,} of {usage.total >> 20:,} MiB free")
    return f"{', '.join(free)}; make room there (shared memory of a container: --shm-size)" if free else ""


def make_private_folder(folder: Path, *, exist_ok: bool = True) -> None:
    """Make a folder that only this user can enter; its parents have the usual rights. One that exists keeps its own.

    Raises ConfigError: it cannot be made. FileExistsError: it exists, without `exist_ok`.
    """
    try:
        with suppress(FileExistsError):  # or it is a file, which the next line refuses
            folder.parent.mkdir(parents=True)
        folder.mkdir(mode=0o700, exist_ok=exist_ok)
    except OSError as error:
        if isinstance(error, FileExistsError) and not exist_ok:
            raise
        raise ConfigError(f"{folder}: cannot make the folder of the run ({error.strerror})") from None


def append_lines(path: Path, lines: bytes | bytearray, *, sync: bool = False) -> None:
    """Append lines, each with its newline, to a file: all of them, or none if it raises OSError.

    A missing file is created. An incomplete last line, left by a killed process, is removed first. `sync` flushes the
    file to the disk.
    """
    # Unbuffered: a buffer that cannot be written would be written again when the file is closed.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        end = _end_of_last_line(descriptor)
        os.ftruncate(descriptor, end)
        try:
            rest = memoryview(lines)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            if sync:
                os.fsync(descriptor)
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, end)
            raise
    finally:
        os.close(descriptor)


def _end_of_last_line(descriptor: int) -> int:
    """Return the offset after the last newline of a file; 0 if there is none."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        begin = max(end - _SCAN_BYTES, 0)
        newline = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0
