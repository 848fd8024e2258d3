"""Starts the reward services of this repository, each in a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 30.0

# Has the bugs of real reward functions, which the service must turn into errors.
FUNCTION = """
import time

def reward(sample):
    if sample.completion == "sleep":
        time.sleep(0.2)
    try:
        return float(sample.completion)  # "nan" and "inf" are numbers to Python
    except ValueError:
        return len(sample.completion) / 10
"""
RECIPE = """
name = "conformance"
steps = 1
model = { source = "none" }
data = { train = { path = "none.jsonl" } }
sampling = { max_new_tokens = 4 }
batch = { prompts_per_step = 1, group_size = 2 }
reward = { function = "function.py:reward", timeout_seconds = 1.0 }
"""
OURS = """
import sys
from pathlib import Path
from fourfold.config import load
from fourfold.service.lifecycle import ServeOptions
from fourfold_reward.serve import main
recipe = Path("recipe.toml")
sys.exit(main(ServeOptions(role="reward", recipe=recipe, config=load(recipe), member_id="reward-0")))
"""
COMMANDS = {
    "ours": ["-c", OURS],
    "example": [str(ROOT / "examples/reward_service.py"), "127.0.0.1:0"],
    "function": [str(ROOT / "examples/reward_function.py"), "127.0.0.1:0"],
}


@pytest.fixture(params=list(COMMANDS))
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Return the address of a service."""
    (tmp_path / "function.py").write_text(FUNCTION)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    with _started(COMMANDS[request.param], tmp_path) as address:
        yield address


@contextlib.contextmanager
def _started(command: list[str], folder: Path) -> Iterator[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        watchdog = threading.Timer(START_SECONDS, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            ready = process.stdout.readline().split()
            watchdog.cancel()
            assert ready[:1] == ["READY"], f"the service did not start: {ready}"
            yield ready[1]
        finally:
            watchdog.cancel()
            process.kill()
