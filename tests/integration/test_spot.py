"""Spot instances: engines join and leave all the time, with notice (SIGTERM) and without (SIGKILL).

`fourfold run` starts the coordinator, the trainer and the reward; the test starts and ends the engines, which are
toys of a known speed. Again and again the oldest engine leaves or another one joins. At the end every sample
has entered one step or was dropped for a reason, and the run has sampled nearly as much as its engines could.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from fourfold_bench import record
from tests.fakes.command_line import ROOT, Stage, staged
from tests.fakes.toy_services import CALLS_VARIABLE, DELAY_VARIABLE

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.soak]

RESULT: Final = os.environ.get("FOURFOLD_SPOT_RESULT", "")
_CALL_SECONDS: Final = 1.0
_CALLS: Final = 2
_GROUP: Final = 4
_SPEED: Final = _CALLS * _GROUP / _CALL_SECONDS  # samples/s of one engine
_PROMPTS: Final = 12  # of a step
_FEWEST, _MOST = 2, 4  # engines at a time
_READY_SECONDS: Final = 60.0


@dataclass
class SpotEngine:
    """A process, and when it could sample. Times are of the monotonic clock."""

    process: subprocess.Popen[bytes]
    log: Path
    ready_at: float | None = None
    left_at: float | None = None
    notice: bool = False  # it was told before it left

    def look(self) -> None:
        """Note when it is ready."""
        if self.ready_at is None and self.log.read_text().startswith("READY"):
            self.ready_at = time.monotonic()

    def leave(self, *, notice: bool) -> None:
        self.left_at, self.notice = time.monotonic(), notice
        self.process.send_signal(signal.SIGTERM if notice else signal.SIGKILL)

    def seconds_within(self, begin: float, end: float) -> float:
        """Return how long it could sample in this time."""
        if self.ready_at is None:
            return 0.0
        return max(0.0, min(end, self.left_at or end) - max(begin, self.ready_at))


@dataclass
class SpotFleet:
    """The engines of one run, one after another; they work in `root` and get the variables of `env`."""

    root: Path
    run_dir: Path
    env: dict[str, str]
    engines: list[SpotEngine] = field(default_factory=list)

    def join(self) -> None:
        """Start another engine."""
        name = f"spot-{len(self.engines)}"
        address = (self.run_dir / "coordinator.address").read_text().strip()
        words = ["serve", "rollout", str(self.run_dir / "config.toml"), "--member-id", name]
        words += ["--run-dir", str(self.run_dir), "--coordinator", address]
        log = self.root / f"{name}.log"
        with log.open("wb") as output, (self.root / f"{name}.err").open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "fourfold", *words], env={**os.environ, **self.env}, cwd=self.root,
                stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
            )  # fmt: skip
        self.engines.append(SpotEngine(process, log))

    @property
    def present(self) -> list[SpotEngine]:
        return [engine for engine in self.engines if engine.left_at is None]

    def look(self) -> None:
        """Note who is ready. Nobody may have ended by itself."""
        for engine in self.present:
            engine.look()
            assert engine.process.poll() is None, engine.log.with_suffix(".err").read_text()[-2000:]

    def change(self, number: int) -> None:
        """Let the oldest engine leave, or another one join: 2, 3, 4, 3, 2, 3 ... engines."""
        if number % (2 * (_MOST - _FEWEST)) < _MOST - _FEWEST:
            self.join()
        else:
            self.present[0].leave(notice=number % 2 == 0)

    def end(self) -> None:
        for engine in self.engines:
            engine.process.kill()
            engine.process.wait(10)


@pytest.fixture
def make_stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    with staged(tmp_path) as make:
        yield make


def spot_run(stage: Stage, *, every: float, seconds: float) -> dict[str, Any]:
    """Run while engines come and go; return what was seen."""
    run = stage.start("toy.toml", output=stage.root / "run.log")
    path = os.pathsep.join([str(stage.root / "fakes"), str(ROOT), *sys.path])
    env = {"PYTHONPATH": path, DELAY_VARIABLE: str(_CALL_SECONDS), CALLS_VARIABLE: str(_CALLS)}
    fleet = SpotFleet(stage.root, stage.run_dir, env)
    seen: list[tuple[float, int]] = []  # time, finished steps
    try:
        address, started = stage.run_dir / "coordinator.address", time.monotonic()
        while not address.exists():
            assert run.poll() is None and time.monotonic() < started + _READY_SECONDS, stage.log("coordinator-0")
            time.sleep(0.05)
        for _ in range(_FEWEST):
            fleet.join()
        stage.wait_for_step(run, 1, _READY_SECONDS)
        begin, number = time.monotonic(), 0
        while run.poll() is None:
            now = time.monotonic()
            assert now < begin + 3 * seconds + 60, f"{stage.steps()} steps only"
            if not seen or stage.steps() > seen[-1][1]:
                seen.append((now, stage.steps()))
            fleet.look()
            if now >= begin + every * (number + 1):
                fleet.change(number)
                number += 1
            time.sleep(0.1)
        assert run.returncode == 0, (stage.root / "run.log").read_text()[-3000:]
    finally:
        fleet.end()
    (first, done), (last, steps) = seen[0], seen[-1]
    capacity = sum(engine.seconds_within(first, last) for engine in fleet.engines) * _SPEED
    left = Counter("notice" if engine.notice else "killed" for engine in fleet.engines if engine.left_at is not None)
    return {
        "seconds": last - first,
        "steps": steps - done,
        "engines": len(fleet.engines),
        "left": dict(left),
        "samples_per_second": (steps - done) * _PROMPTS * _GROUP / (last - first),
        "mean_capacity": capacity / (last - first),
        "share_of_capacity": (steps - done) * _PROMPTS * _GROUP / capacity,
    }


def check_nothing_is_lost(run_dir: Path, steps: int, samples_of_step: int) -> dict[str, int]:
    """Check that each step has all its samples, and none is in two; return the samples by state."""
    rows = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    trained = [row for row in rows if not row["dropped"]]
    assert len({row["sample_id"] for row in trained}) == len(trained)
    assert Counter(row["step"] for row in trained) == dict.fromkeys(range(1, steps + 1), samples_of_step)
    with sqlite3.connect(run_dir / "ledger.sqlite") as ledger:
        states: dict[str, int] = dict(ledger.execute("SELECT state, COUNT(*) FROM samples GROUP BY state").fetchall())
    assert set(states) <= {"TRAINED", "DROPPED"} and states["TRAINED"] == len(trained), states
    report = json.loads((run_dir / "report.json").read_text())
    assert report["steps"] == steps and not report["resumes"] and not report["restarts"]
    return states


def run_for(make_stage: Callable[..., Stage], seconds: float, every: float) -> dict[str, Any]:
    """Run for about so many seconds at the mean number of engines; check it."""
    steps = round(seconds * _SPEED * (_FEWEST + _MOST) / 2 / (_PROMPTS * _GROUP))
    stage = make_stage(
        steps=steps,
        rollout={"replicas": 0},
        batch={"prompts_per_step": _PROMPTS, "group_size": _GROUP},
        asynchrony={"max_policy_lag": 2},
        evaluation={"every_steps": steps},
        checkpoint={"every_steps": 10},
    )
    result = spot_run(stage, every=every, seconds=seconds)
    return {**result, "samples_by_state": check_nothing_is_lost(stage.run_dir, steps, _PROMPTS * _GROUP)}


@pytest.mark.timeout(6000)
def test_engines_come_and_go_for_half_an_hour(make_stage: Callable[..., Stage]) -> None:
    seconds, every = 1800.0, 20.0
    result = run_for(make_stage, seconds, every)
    sys.stdout.write(f"{json.dumps(result)}\n")
    if RESULT:
        document = record.document(
            "spot",
            command="FOURFOLD_SPOT_RESULT=FILE python -m pytest -m soak tests/integration/test_spot.py",
            parameters={"seconds": seconds, "every": every, "samples_per_second_of_an_engine": _SPEED},
            results=result,
            libraries=("grpcio", "protobuf", "numpy"),
        )
        record.write(Path(RESULT), document)
    assert result["share_of_capacity"] > 0.9
