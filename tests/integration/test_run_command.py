"""`fourfold run` as a process, with the real coordinator and reward service and toy engines.

What must hold whatever happens: one clear error, an exit code, and no process left.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fourfold import config as configuration
from tests.fakes.command_line import Stage, listening, staged, until
from tests.support.rollout_process import free_port
from tests.support.tensorboard import shown_by_tensorboard

pytestmark = [pytest.mark.integration, pytest.mark.timeout(200)]


@pytest.fixture
def make_stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    with staged(tmp_path) as make:
        yield make


@pytest.mark.slow
def test_run_survives_its_services_and_ends_with_a_report(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=6, logging={"sinks": ["tensorboard"]})
    process = stage.start("toy.toml", delay=0.1)
    stage.wait_for_step(process, 1)
    sockets = listening(stage.descendants())
    assert len(sockets) >= 4  # coordinator, rollout, trainer, reward
    assert {address.partition(":")[0] for address in sockets} <= {"0100007F", "0000000000000000FFFF00000100007F"}
    os.kill(stage.pid_of("rollout"), signal.SIGKILL)
    os.kill(stage.pid_of("reward"), signal.SIGKILL)
    stage.wait_for_step(process, 3)
    os.kill(stage.pid_of("trainer"), signal.SIGKILL)
    output, errors = process.communicate(timeout=40)
    assert process.returncode == 0, errors
    assert stage.descendants() == {}

    for name in ("rollout-0", "reward-0", "trainer-0"):
        assert re.search(rf"\d\d:\d\d:\d\d {name} died \(killed by SIGKILL\); restarting it", output), output
        assert re.search(rf"^{name} is ready again after \d+ s$", output, re.MULTILINE), output
    assert re.search(r"^restored the checkpoint of step \d: trainer-0 at \S+ is a new process", output, re.MULTILINE), (
        output
    )
    assert "step 6/6  reward " in output
    assert "toy is done: 6 steps" in output
    assert "Held-out score: " in output and "fourfold chat runs/toy\n" in output
    report = json.loads((stage.run_dir / "report.json").read_text())
    assert report["steps"] == 6 and report["resumes"] == 0
    assert report["restarts"] == {"reward-0": 1, "rollout-0": 1, "trainer-0": 1}
    assert configuration.load(stage.run_dir / "config.toml").name == "toy"
    assert sorted(shown_by_tensorboard(stage.run_dir / "sinks" / "tensorboard", "eval/score")) == [0, 2, 4, 6]

    again = stage.start("--resume", "runs/toy")
    output, _ = again.communicate(timeout=20)
    assert again.returncode == 0 and "runs/toy is finished already, with 6 steps." in output
    recipe = (stage.run_dir / "config.toml").read_text()
    refused = stage.start("--resume", "runs/latest", "--set", "steps=7", "--set", "seed=99")
    output, errors = refused.communicate(timeout=40)
    assert refused.returncode == 1 and "the data differs from the data that the run began with: seed" in errors
    assert "-> 99; restore it, or start a new run" in errors and "is as it was, without steps=7, seed=99." in errors
    assert (stage.run_dir / "config.toml").read_text() == recipe, "it is checked first and written last"
    assert not (stage.run_dir / "recipe-changes.jsonl").exists()
    longer = stage.start("--resume", "runs/latest", "--set", "steps=7")
    output, errors = longer.communicate(timeout=40)
    assert longer.returncode == 0 and "toy is done: 7 steps" in output, errors
    assert "resumed after step 6" in output and "step 7/7  " in output
    assert "step 6/7  " not in output, "old steps are not told again"
    assert "Run folder: runs/toy\n" in output and configuration.load(stage.run_dir / "config.toml").steps == 7
    assert '"changes": {"steps": [6, 7]}' in (stage.run_dir / "recipe-changes.jsonl").read_text()
    assert "Resumed 1 time." in output
    assert sorted(shown_by_tensorboard(stage.run_dir / "sinks" / "tensorboard", "reward/mean")) == list(range(1, 8))


@pytest.mark.slow
def test_a_coordinator_that_is_killed_twice_costs_no_process_and_no_step(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=6)
    process = stage.start("toy.toml", delay=0.3)
    for step in (1, 3):
        stage.wait_for_step(process, step)
        services = {role: stage.pid_of(role) for role in ("rollout", "trainer", "reward")}
        killed = stage.pid_of("coordinator")
        os.kill(killed, signal.SIGKILL)
        until(lambda: killed not in stage.descendants(), 5)  # noqa: B023 (called in this turn)
        stage.wait_for_step(process, step + 1, 15)
        assert {role: stage.pid_of(role) for role in services} == services
    output, errors = process.communicate(timeout=40)
    assert process.returncode == 0, errors
    assert stage.descendants() == {}
    assert len(re.findall(r"coordinator-0 died \(killed by SIGKILL\); restarting it", output)) == 2, output
    assert len(re.findall(r"^coordinator-0 is ready again after \d+ s$", output, re.MULTILINE)) == 2
    assert (
        len(re.findall(r"^continued after step \d with the trainer's weights: coordinator-0 died", output, re.M)) == 2
    )
    assert [line[:8] for line in output.splitlines() if line.startswith("step ") and "reward" in line] == [
        f"step {step}/6" for step in range(1, 7)
    ], "each step is shown once"
    report = json.loads((stage.run_dir / "report.json").read_text())
    assert report["restarts"] == {"coordinator-0": 2} and report["resumes"] == 0
    assert [row["reason"] for row in report["recoveries"]] == ["coordinator-0 died (killed by SIGKILL)"] * 2
    assert all(row["trainer_kept"] for row in report["recoveries"])

    process = stage.start("toy.toml", "--name", "undisturbed")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert trained(stage.run_dir) == trained(stage.root / "runs" / "undisturbed")


def trained(run_dir: Path) -> list[tuple[int, str, float]]:
    """Step, text and score of the samples that a run trained on; the policy of the toys follows from them."""
    rows = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    return sorted((row["step"], row["completion"], row["score"]) for row in rows if not row["dropped"])


@pytest.mark.slow
def test_a_coordinator_that_cannot_come_back_ends_the_run_with_its_cause(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=50, retry={"restarts": 2})
    process = stage.start("toy.toml", delay=0.3)
    stage.wait_for_step(process, 1)
    ledger = stage.run_dir / "ledger.sqlite"
    pid = stage.pid_of("coordinator")
    os.kill(pid, signal.SIGSTOP)
    ledger.rename(stage.run_dir / "moved")
    (stage.run_dir / "config.toml").write_text("this is no recipe")
    os.kill(pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=40)
    assert process.returncode == 1 and stage.descendants() == {}
    assert "The run failed. coordinator-0 died before it was ready: ended with exit code 1" in errors
    assert "config.toml" in errors and "It was restarted 2 times already (retry.restarts = 2)." in errors


@pytest.mark.slow
def test_interrupt_while_the_coordinator_restarts_ends_everything(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=50)
    process = stage.start("toy.toml", delay=0.3)
    stage.wait_for_step(process, 1)
    os.kill(stage.pid_of("coordinator"), signal.SIGKILL)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130 and stage.descendants() == {}, errors


@pytest.mark.slow
def test_a_frozen_service_is_told_and_so_is_its_return(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=40)
    process = stage.start("toy.toml", delay=0.1)
    lines: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda out: lines.extend(out), args=(process.stdout,), daemon=True)
    reader.start()
    stage.wait_for_step(process, 1)
    pid = stage.pid_of("rollout")
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: any(line.startswith("rollout-0 did not renew its lease") for line in lines), 15)
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: any(line.startswith("rollout-0 answered again") for line in lines), 15)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    reader.join(5)


def test_interrupt_ends_everything_soon_and_resume_goes_on(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=5)
    process = stage.start("toy.toml", delay=0.2)
    stage.wait_for_step(process, 3)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - began < 20
    assert process.returncode == 130
    assert stage.descendants() == {}
    assert "Stopped by SIGINT (Ctrl-C). It continues from the checkpoint of step " in errors
    assert "fourfold run --resume runs/toy\n" in errors
    assert "Traceback" not in errors

    resumed = stage.start("--resume", "runs/toy")
    _, errors = resumed.communicate(timeout=40)
    assert resumed.returncode == 0, errors
    rows = [json.loads(line) for line in (stage.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("seconds", [0.3, 1.5])
def test_interrupt_while_it_starts_leaves_nothing(make_stage: Callable[..., Stage], seconds: float) -> None:
    stage = make_stage()
    process = stage.start("toy.toml")
    until(lambda: stage.run_dir.exists())
    time.sleep(seconds)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - began < 20
    assert process.returncode in (143, 130)
    assert stage.descendants() == {}
    assert "Traceback" not in errors


@pytest.mark.slow
def test_killed_launcher_takes_everything_with_it(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=50)
    process = stage.start("toy.toml", delay=0.3)
    stage.wait_for_step(process, 1)
    second = stage.start("--resume", "runs/toy")
    _, errors = second.communicate(timeout=20)
    assert second.returncode == 1 and "`fourfold run` (process " in errors and ") uses this folder" in errors
    process.kill()
    process.communicate(timeout=10)
    until(lambda: stage.descendants() == {}, 5)


@pytest.mark.slow
def test_service_dead_at_start_is_one_clear_error(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(reward={"model": {"source": "no_such_model", "device": "cpu"}})
    process = stage.start("toy.toml")
    _, errors = process.communicate(timeout=40)
    assert process.returncode == 1
    assert stage.descendants() == {}
    assert "The run failed. reward-0 died before it was ready: ended with exit code 1." in errors
    assert "no_such_model" in errors and str(Path("runs/toy.failed/logs/reward-0.log")) in errors
    assert "No step was done. Its logs are in runs/toy.failed; correct the cause, and start it again." in errors
    assert not (stage.root / "runs" / "toy").exists() and (stage.root / "runs" / "toy.failed" / "logs").is_dir()
    assert (stage.root / "runs" / "latest").readlink() == Path("toy.failed")
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_service_of_another_program_scores_a_run_by_its_address_alone(make_stage: Callable[..., Stage]) -> None:
    """examples/reward_service.py knows neither coordinator nor lease; killed and started again, it goes on."""
    example = Path(__file__).parents[2] / "examples" / "reward_service.py"
    address = f"127.0.0.1:{free_port()}"

    @contextmanager
    def serving() -> Iterator[None]:
        with subprocess.Popen([sys.executable, str(example), address], stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None and process.stdout.readline().startswith("READY ")
                yield
            finally:
                process.kill()

    with serving():
        stage = make_stage(steps=4, reward={"target": address})
        process = stage.start("toy.toml", delay=0.1)
        stage.wait_for_step(process, 1)
    with serving():
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert stage.descendants() == {}
    assert "reward-0" not in output
    report = json.loads((stage.run_dir / "report.json").read_text())
    assert (report["steps"], report["dropped"]) == (4, {})
    rows = [json.loads(line) for line in (stage.run_dir / "samples.jsonl").read_text().splitlines()]
    assert {row["scorer"] for row in rows} == {"short-is-better@1"}
