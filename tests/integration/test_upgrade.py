"""Services are replaced by those of a newer version, one after another, while their run goes on.

The newer processes speak a later minor version of the contract. Rollout and trainer are toys; coordinator and reward
are real.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.command_line import ROOT, Stage, staged, until
from tests.fakes.toy_services import DELAY_VARIABLE
from tests.support.rollout_process import free_port

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

_STEPS = 1000  # more than the test waits for
_NEWER = """
import fourfold.contract

fourfold.contract.CONTRACT_VERSION = "1.99"
"""


class Services:
    """The services of one run, each started by hand."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.newer = stage.root / "newer"
        self.newer.mkdir()
        (self.newer / "sitecustomize.py").write_text(_NEWER)

    def start(self, role: str, name: str, *, newer: bool = False) -> None:
        """Start a service and wait until it is ready."""
        path = [str(self.newer)] if newer else []
        path += [str(self.stage.root / "fakes"), str(ROOT), *sys.path]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), DELAY_VARIABLE: "0.5"}
        address = f"127.0.0.1:{self.port}"
        words = ["serve", role, "toy.toml", "--member-id", name, "--run-dir", "runs/toy"]
        words += ["--listen", address] if role == "coordinator" else ["--coordinator", address]
        log = self.stage.root / f"{name}.log"
        with log.open("wb") as output:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "fourfold", *words], env=env, cwd=self.stage.root,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        until(lambda: "READY" in log.read_text() or self.processes[name].poll() is not None, 60)
        assert self.processes[name].poll() is None, log.read_text()[-3000:]

    def end(self, name: str) -> None:
        """Ask a service to end, as a scheduler does."""
        process = self.processes.pop(name)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) in (0, 128 + signal.SIGTERM, -signal.SIGTERM)

    def step(self, number: int) -> None:
        """Wait until so many steps are done."""
        coordinator = self.processes["coordinator-0"]
        until(lambda: self.stage.steps() >= number or coordinator.poll() is not None, 60)
        assert coordinator.poll() is None, (self.stage.root / "coordinator-0.log").read_text()[-3000:]

    def upgrade(self, role: str, name: str) -> None:
        """Replace a service by one of the newer version, and let the run do two more steps."""
        self.end(name)
        self.start(role, name, newer=True)
        self.step(self.stage.steps() + 2)


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    with staged(tmp_path) as make:
        made = Services(make(steps=_STEPS, checkpoint={"every_steps": 1}))
        yield made
        for process in made.processes.values():
            process.kill()
            process.wait(10)


def test_every_service_is_upgraded_in_a_running_job(services: Services) -> None:
    services.start("coordinator", "coordinator-0")
    for role in ("rollout", "trainer", "reward"):
        services.start(role, f"{role}-0")
    services.step(1)
    services.start("rollout", "rollout-1", newer=True)
    services.end("rollout-0")
    services.step(services.stage.steps() + 2)
    services.upgrade("reward", "reward-0")
    services.upgrade("trainer", "trainer-0")
    services.upgrade("coordinator", "coordinator-0")
    for name in ("coordinator-0", "rollout-1", "reward-0", "trainer-0"):
        services.end(name)
    done = services.stage.steps()
    rows = [json.loads(line) for line in (services.stage.run_dir / "samples.jsonl").read_text().splitlines()]
    trained = [row for row in rows if not row["dropped"]]
    by_step = Counter(row["step"] for row in trained)
    assert {step: count for step, count in by_step.items() if step <= done} == dict.fromkeys(range(1, done + 1), 3 * 4)
    assert max(by_step) <= done + 1, "one step was under way at the end"
    assert len({row["sample_id"] for row in trained}) == len(trained)
