"""Provides the reward service under test: `--target HOST:PORT`, or each service of this repository in turn."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 30.0
CONNECT_SECONDS = 5.0

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
reward = { verifier = "function.py:reward", timeout_seconds = 1.0 }
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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option --target."""
    parser.addoption("--target", default="", metavar="HOST:PORT", help="reward service to check (plain text)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the suite once for each service."""
    if "target" in metafunc.fixturenames:
        given = metafunc.config.getoption("--target", default="")
        metafunc.parametrize("target", [given] if given else list(COMMANDS), indirect=True, scope="module")


@pytest.fixture(scope="module")
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of the service under test."""
    if request.param not in COMMANDS:
        _require_service(request.param)
        yield request.param
        return
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "function.py").write_text(FUNCTION)
    (folder / "recipe.toml").write_text(RECIPE)
    with _started(COMMANDS[request.param], folder) as address:
        yield address


def _require_service(address: str) -> None:
    """End the whole run when nothing listens at an address: otherwise every test fails with the same stack trace."""
    with grpc.insecure_channel(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=CONNECT_SECONDS)
        except grpc.FutureTimeoutError:
            pytest.exit(
                f"--target {address}: no connection within {CONNECT_SECONDS:.0f} s; start the reward service, which "
                f"must serve plain text, and give its HOST:PORT",
                returncode=1,
            )


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


@pytest.fixture
def channel(target: str) -> Iterator[grpc.Channel]:
    """Return a channel without retries, so that the suite sees every response."""
    options = [("grpc.enable_retries", 0), ("grpc.max_send_message_length", 16 << 20)]
    with grpc.insecure_channel(target, options=options) as opened:
        yield opened
