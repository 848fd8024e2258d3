"""The everyday tests find each fault of mutants.toml."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.lock.mutants import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.lock, pytest.mark.timeout(600)]


def test_every_fault_of_the_list_is_found() -> None:
    command = [sys.executable, "-m", "tests.lock.mutants"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
