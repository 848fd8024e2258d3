"""Scratch folders of dead processes are removed, and those of running processes are kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.host.scratch import Scratch

HOLD = (
    "import sys; from fourfold.host.scratch import Scratch; print(Scratch('test').path, flush=True); sys.stdin.read()"
)


def hold() -> tuple[subprocess.Popen[str], Path]:
    """Start a process that holds a folder; return it and the folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    with process:
        process.kill()


def test_folders_of_killed_processes_are_removed_and_those_of_running_ones_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    (dead, left), (living, held) = hold(), hold()
    (left / "file").touch()
    end(dead)
    other = tmp_path / "fourfold-other-1"
    other.mkdir()
    os.utime(other, (0, 0))
    young, old = tmp_path / "fourfold-new-young", tmp_path / "fourfold-new-old"
    young.mkdir()
    old.mkdir()
    os.utime(old, (0, 0))
    mine = Scratch("test")
    assert not left.exists(), "its process is dead, so its age does not matter"
    assert not old.exists(), "its process was killed before it took the lock"
    assert held.exists() and young.exists() and other.exists()
    assert mine.path.parent == tmp_path and mine.path.stat().st_mode & 0o777 == 0o700
    mine.remove()
    mine.remove()
    assert not mine.path.exists()
    end(living)
