"""What the last release wrote and promised still holds: a folder of its run, and its contract."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.lock.seeded_run import (
    CONTRACT,
    NEXT_TOKENS,
    ROOT,
    SAMPLES,
    STEPS,
    STEPS_OF_RELEASE,
    next_tokens,
    read,
    resume,
    unpack_release,
)
from tests.support.browser import serve

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.lock, pytest.mark.timeout(400)]

PAGES = ("", "/timeline", "/weights", "/recipe", "/samples")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the folder in which the last release made a run, and stopped it."""
    unpack_release(tmp_path)
    return tmp_path


def view(run_dir: Path, cache: Path) -> dict[str, str]:
    """Open every page of a run; return the texts."""
    with serve([run_dir], env={**os.environ, "XDG_CACHE_HOME": str(cache)}) as address:
        texts = {}
        for page in ("/", *(f"/run/{run_dir.name}{page}" for page in PAGES)):
            with urllib.request.urlopen(address + page, timeout=60) as response:
                texts[page] = response.read().decode()
        return texts


def test_a_run_of_the_last_release_opens_in_view_and_goes_on(root: Path) -> None:
    run_dir = root / "runs" / "tiny"
    before = {name: (run_dir / name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl", "tokens.jsonl")}
    pages = view(run_dir, root / "cache")
    assert f"{STEPS_OF_RELEASE} of {STEPS_OF_RELEASE}" in pages["/"]
    assert "What is" in pages["/run/tiny/samples"]

    resume(root, STEPS)
    for name, text in before.items():
        assert (run_dir / name).read_bytes().startswith(text), f"{name} has lost lines of the last release"
    found = read(run_dir, {})
    assert [row["step"] for row in found.metrics] == list(range(1, STEPS + 1))
    trained = [row["sample_id"] for row in found.samples if not row["dropped"]]
    assert len(trained) == len(set(trained)) == STEPS * SAMPLES
    # The weights of the release's checkpoint sample now.
    assert next_tokens(run_dir) == json.loads(NEXT_TOKENS.read_text())
    assert f"{STEPS} of {STEPS}" in view(run_dir, root / "cache")["/"]


def test_the_contract_serves_clients_of_the_last_release() -> None:
    buf = Path(sys.executable).with_name("buf")
    command = [str(buf), "breaking", "proto", "--against", str(CONTRACT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
