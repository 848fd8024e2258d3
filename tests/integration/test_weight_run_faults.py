"""`fourfold run` in which somebody is killed in the middle of a weight update: it ends well by itself.

The coordinator tells `tests/fault_injection` which call it is about to make; see there.
What happens between the calls, and in every other phase, is in `test_weight_faults.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import psutil
import pytest

from tests.fakes.command_line import until
from tests.integration.test_run_local import Folder, check_agreement
from tests.support.trainer_driver import REPOSITORY

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

_RUN_SECONDS: Final = 300


class Doomed(Folder):
    """A run whose coordinator ends somebody at a call."""

    @property
    def file(self) -> Path:
        return self.root / "fault_injection"

    def doom(self, call: str, pid: int) -> None:
        """Let a process, or with 0 the coordinator, die before the coordinator makes its next such call."""
        fresh = self.file.with_suffix(".new")
        fresh.write_text(f"{call} 1 {pid}")
        fresh.replace(self.file)

    def begin(self) -> subprocess.Popen[str]:
        """Start the run and wait for the end of its first step."""
        process = self.start("recipe.toml")
        until(lambda: bool(self.rows("metrics.jsonl")) or process.poll() is not None, _RUN_SECONDS)
        assert process.poll() is None, self.logs()
        return process

    def finish(self, process: subprocess.Popen[str]) -> None:
        """Wait for the good end of the run."""
        output, errors = process.communicate(timeout=_RUN_SECONDS)
        assert process.returncode == 0, errors + self.logs()
        assert "tiny is done: 3 steps" in output
        check_agreement(self)


@pytest.fixture
def run(tmp_path: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Doomed]:
    made = Doomed(tmp_path, tiny_model("llama_tied"))
    paths = [str(REPOSITORY / "tests" / "fault_injection"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("FOURFOLD_FAULT_CALL", str(made.file))
    yield made
    for process in made.processes:
        process.kill()
        process.communicate(timeout=10)


def service(run: subprocess.Popen[str], role: str) -> psutil.Process:
    """Return the process of a role."""
    children = psutil.Process(run.pid).children(recursive=True)
    return next(child for child in children if ["serve", role] == child.cmdline()[3:5])


@pytest.mark.parametrize("victim", ["engine", "trainer"])
def test_a_run_goes_on_when_somebody_dies_in_the_middle_of_an_update(run: Doomed, victim: str) -> None:
    process = run.begin()
    if victim == "engine":
        (died,) = service(process, "rollout").children()
    else:
        died = service(process, "trainer")
    run.doom("ReceiveWeights", died.pid)
    until(lambda: not run.file.exists() or process.poll() is not None, _RUN_SECONDS)
    assert not run.file.exists(), run.logs()
    run.finish(process)


def test_a_coordinator_that_is_killed_is_restarted_while_engine_and_trainer_keep_their_state(run: Doomed) -> None:
    process = run.begin()
    services = {role: service(process, role).pid for role in ("rollout", "trainer", "reward")}
    for call in ("CommitWeights", "before:acknowledge"):
        old = service(process, "coordinator").pid
        run.doom(call, 0)
        until(lambda: not run.file.exists() or process.poll() is not None, _RUN_SECONDS)
        until(lambda: _pid(process) not in (0, old), 30)  # noqa: B023 (called in this turn)
        assert {role: service(process, role).pid for role in services} == services
    run.finish(process)
    report = json.loads((run.run_dir / "report.json").read_text())
    assert report["restarts"] == {"coordinator-0": 2} and report["resumes"] == 0
    assert all(row["trainer_kept"] for row in report["recoveries"])


def _pid(process: subprocess.Popen[str]) -> int:
    """Return the pid of the coordinator, 0 while there is none."""
    try:
        return service(process, "coordinator").pid
    except (StopIteration, psutil.NoSuchProcess):
        return 0
