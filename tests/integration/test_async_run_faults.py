"""`fourfold run` with vLLM and DeepSpeed at a policy lag of 2, in which engine, trainer and coordinator are killed.

The coordinator tells `tests/fault_injection` which call it is about to make; see there. What happens between the calls,
and in every other phase, is in `test_weight_faults.py` and in `tests/contract/test_async_faults.py`.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import psutil
import pytest

from fourfold.host.process_tree import descendants
from tests.fakes.command_line import listening, until
from tests.integration.test_run_local import Folder, alive
from tests.support.trainer_driver import REPOSITORY

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

_STEPS: Final = 8
_LAG: Final = 2
_SECONDS: Final = 240


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
        until(lambda: bool(self.rows("metrics.jsonl")) or process.poll() is not None, _SECONDS)
        assert process.poll() is None, self.logs()
        sockets = listening(dict.fromkeys(descendants({process.pid}), ""))
        assert len(sockets) >= 4
        assert {address.partition(":")[0] for address in sockets} <= {"0100007F", "0000000000000000FFFF00000100007F"}
        return process


@pytest.fixture
def run(tmp_path: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Doomed]:
    made = Doomed(tmp_path, tiny_model("llama_tied"))
    recipe = tmp_path / "recipe.toml"
    text = recipe.read_text().replace("steps = 3", f"steps = {_STEPS}")
    recipe.write_text(text.replace("every_steps = 1", "every_steps = 3") + f"\n[asynchrony]\nmax_policy_lag = {_LAG}\n")
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


def test_an_asynchronous_run_survives_the_death_of_each_component(run: Doomed) -> None:
    process = run.begin()
    everything = descendants({process.pid})

    def die(call: str, pid: int) -> None:
        run.doom(call, pid)
        until(lambda: not run.file.exists() or process.poll() is not None, _SECONDS)
        assert not run.file.exists(), run.logs()
        everything.update(descendants({process.pid}))

    def wait_for_a_step() -> None:
        last = len(run.rows("metrics.jsonl"))
        until(lambda: len(run.rows("metrics.jsonl")) != last or process.poll() is not None, _SECONDS)
        everything.update(descendants({process.pid}))

    die("ReceiveWeights", service(process, "rollout").children()[0].pid)
    wait_for_a_step()
    die("before:acknowledge", 0)  # the coordinator itself
    wait_for_a_step()
    die("CommitWeights", _trainer(process.pid))
    output, errors = process.communicate(timeout=_SECONDS)
    assert process.returncode == 0, errors + run.logs()
    assert f"tiny is done: {_STEPS} steps" in output
    until(lambda: not alive(everything), 10)
    _check(run)


def _trainer(pid: int) -> int:
    """Return the pid of the trainer, which may be starting."""
    found: list[int] = []

    def look() -> bool:
        children = psutil.Process(pid).children(recursive=True)
        found[:] = [child.pid for child in children if child.cmdline()[3:5] == ["serve", "trainer"]]
        return bool(found)

    until(look, 60)
    return found[0]


def _check(run: Doomed) -> None:
    """Check the invariants of asynchronous training in what the run left."""
    report = json.loads((run.run_dir / "report.json").read_text())
    # The count of the engine's restart is saved with checkpoints, and may die with the coordinator.
    assert {name.partition("-")[0] for name in report["restarts"]} >= {"trainer", "coordinator"}
    assert [row["step"] for row in run.rows("metrics.jsonl")] == list(range(1, _STEPS + 1))
    lines = run.rows("samples.jsonl")
    assert len(lines) == len({row["sample_id"] for row in lines}), "no sample is written twice"
    with closing(sqlite3.connect(run.run_dir / "ledger.sqlite")) as ledger:
        rows = ledger.execute("SELECT sample_id, state, reason, position, group_id FROM samples").fetchall()
        versions = dict(ledger.execute("SELECT step, policy_version - (skipped_reason = '') FROM steps").fetchall())
    states = {name: state for name, state, *_ in rows}
    assert all(state == "TRAINED" or (state == "DROPPED" and reason) for _, state, reason, *_ in rows)
    trained = [row for row in lines if not row["dropped"]]
    assert {row["sample_id"] for row in trained} == {name for name, state in states.items() if state == "TRAINED"}
    prompts = {(position, group) for _, state, _, position, group in rows if state == "TRAINED"}
    assert len({position for position, _ in prompts}) == len(prompts), "no prompt is trained twice"
    assert {position for *_, position, _ in rows} == {position for position, _ in prompts}, "no prompt is lost"
    for row in trained:
        oldest = min(version for version, _ in row["version_spans"] if version >= 0)
        assert 0 <= versions[row["step"]] - oldest <= _LAG, row
    assert not list((run.run_dir / "experiences").glob("*")), "segments are left"
    assert (run.run_dir / "model" / "config.json").exists()
