"""Runs `.ci/run` with commands that only sleep: what ends it, and that nothing is left over."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
_INSTALLED: Final = ("go", "slurmctld", "promtool", "chromium", "chromedriver")  # otherwise `.ci/run` installs them
_COMMAND: Final = """#!/bin/bash
name=${1:-check}
echo "ran $name"
touch began-$name
# Bash starts a command with SIGINT ignored, so that one before `timeout` has its own handler is lost.
[ $name != check ] || until [ -e began-test-slow ]; do sleep 0.05; done
[ ! -e wait-$name ] || sleep 97
[ ! -e fail-$name ]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with `.ci/run` and commands that note their names, and that fail or wait if a file says so."""
    for name in (".ci/run", "bin/make", "scripts/check", *(f"bin/{name}" for name in _INSTALLED)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(_COMMAND)
        (tmp_path / name).chmod(0o755)
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    return tmp_path


def start(folder: Path, seconds: int = 60) -> subprocess.Popen[str]:
    env = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "CI_SECONDS": str(seconds)}
    return subprocess.Popen(
        [folder / ".ci/run"], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def waiting(folder: Path) -> bool:
    """Return whether a command of the folder is left."""
    found = subprocess.run(["pgrep", "-f", f"{folder}/bin/make"], capture_output=True, check=False)
    return not found.returncode


def test_the_steps_run_in_order_and_the_output_of_the_checks_is_last(folder: Path) -> None:
    process = start(folder)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert out.splitlines() == ["ran test", "ran lock", "ran test-slow", "ran check"]


def test_a_failed_step_is_the_end(folder: Path) -> None:
    (folder / "fail-lock").touch()
    process = start(folder)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 1 and out.splitlines() == ["ran test", "ran lock"]


def test_failed_checks_end_the_slow_tests(folder: Path) -> None:
    (folder / "wait-test-slow").touch()
    (folder / "fail-check").touch()
    process = start(folder)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 1 and out.endswith("ran check\n")
    assert not waiting(folder)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("step", ["test", "test-slow"])
def test_a_signal_ends_all(folder: Path, step: str, number: signal.Signals, code: int) -> None:
    (folder / f"wait-{step}").touch()
    process = start(folder)
    end = time.monotonic() + 30
    while not (folder / f"began-{step}").exists() and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(number)  # to the script alone, as a terminal's Ctrl-C does not reach other process groups
    process.communicate(timeout=30)
    assert process.returncode == code and not waiting(folder)


def test_the_limit_ends_all_and_is_named(folder: Path) -> None:
    (folder / "wait-lock").touch()
    process = start(folder, seconds=3)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 124 and out.splitlines() == ["ran test", "ran lock"]
    assert err == "CI: the limit of 3 s has passed; the last command was: make lock\n"
    assert not waiting(folder)
