"""Appends write all lines or none, errors of a full disk are recognised, and a run needs free space to start."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import pytest

from fourfold.errors import ConfigError
from fourfold.host.disk import append_lines, check_room, explain_no_space, is_full


def test_lines_are_appended_after_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_lines(path, b"1\n2\n", sync=True)
    with path.open("ab") as file:
        file.write(b"torn" * 40_000)  # by a process that was killed; longer than one block of the search
    append_lines(path, b"3\n")
    assert path.read_bytes() == b"1\n2\n3\n"
    path.write_bytes(b"torn from the start")
    append_lines(path, b"1\n")
    assert path.read_bytes() == b"1\n"


@pytest.mark.parametrize("failing", ["write", "fsync"])
def test_an_append_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "rows.jsonl"
    append_lines(path, b"1\n")
    write = os.write

    def half(descriptor: int, data: memoryview) -> int:
        if len(data) < 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[: len(data) // 2])

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, half if failing == "write" else refuse)
        with pytest.raises(OSError, match="No space left"):
            append_lines(path, b'{"step": 2}\n', sync=True)
    assert path.read_bytes() == b"1\n"
    append_lines(path, b"2\n", sync=True)
    assert path.read_bytes() == b"1\n2\n"


def sqlite_error(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("told by SQLite")
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, ""), True),
        (OSError(errno.EDQUOT, ""), True),
        (OSError(errno.EFBIG, ""), True),
        (PermissionError(errno.EACCES, ""), False),
        (sqlite_error(sqlite3.SQLITE_FULL), True),
        (sqlite_error(sqlite3.SQLITE_IOERR_WRITE), True),
        (sqlite_error(sqlite3.SQLITE_CONSTRAINT), False),
        (sqlite3.OperationalError("no such table"), False),
        (ValueError(), False),
    ],
)
def test_errors_of_a_full_disk_are_recognised(error: Exception, full: bool) -> None:
    assert is_full(error) is full


def test_free_space_is_checked_against_what_a_run_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, warning in ((7 << 30, ""), (5 << 30, "5.0 GiB of disk free, runs and models take about 6 GiB")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _folder, free=free: SimpleNamespace(free=free))
        assert warning in check_room(tmp_path) and bool(check_room(tmp_path)) is bool(warning)
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=100 << 20))
    with pytest.raises(
        ConfigError, match="100 MiB of disk free, a run needs at least 256 MiB to start; free some space"
    ):
        check_room(tmp_path)


def test_an_error_is_explained_without_a_disk_that_cannot_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, usage, failing = os.strerror(errno.ENOSPC), shutil.disk_usage(tmp_path), {Path("/dev/shm")}

    def disk_usage(path: Path) -> object:
        if path in failing:
            raise PermissionError
        return usage

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    assert explain_no_space(text, tmp_path).startswith(f"{tmp_path} has ")
    failing.add(tmp_path)
    assert explain_no_space(text, tmp_path) == explain_no_space("killed", tmp_path) == ""
