"""`fourfold run --launcher ray`: the same processes, placed by a local Ray."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.command_line import Stage, staged

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


@pytest.fixture
def make_stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    with staged(tmp_path) as make:
        yield make


@pytest.mark.slow
def test_recipe_runs_through_ray_and_nothing_is_left(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=4)
    process = stage.start("toy.toml", "--launcher", "ray", delay=0.2)
    stage.wait_for_step(process, 1, 120)
    # Each service is the child of a Ray worker, which renames itself; the coordinator is the launcher's own.
    assert stage.parent_of("rollout").startswith("ray::") and stage.parent_of("trainer").startswith("ray::")
    assert "fourfold run" in stage.parent_of("coordinator")
    os.kill(stage.pid_of("coordinator"), signal.SIGKILL)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "toy is done: 4 steps" in output and "coordinator-0 is ready again after" in output
    report = json.loads((stage.run_dir / "report.json").read_text())
    assert (report["steps"], report["restarts"]) == (4, {"coordinator-0": 1})
    assert stage.descendants() == {}


@pytest.mark.slow
def test_interrupt_of_a_run_on_ray_leaves_nothing(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=50)
    process = stage.start("toy.toml", "--launcher", "ray", delay=0.2)
    stage.wait_for_step(process, 1, 120)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert time.monotonic() - began < 8  # 3 on an idle machine, half of it Ray's own
    assert process.returncode == 130
    assert "fourfold run --resume runs/toy --launcher ray" in errors
    assert stage.descendants() == {}
