"""Runs one `fourfold run` whose policy lag changes, and reads the steady state at each lag from its metrics."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np

from fourfold import config as configuration
from fourfold import metrics as m
from fourfold.config import Config
from fourfold.errors import DeadlinePassed, Internal, Unavailable
from fourfold.model.folder import folder_shape
from fourfold_bench.gpus import GpuMemory
from fourfold_bench.harness import BenchmarkRun
from fourfold_bench.long_tail.benchmark import OBSERVATION_TOKENS, LongTailSettings
from fourfold_bench.models import SHAPES, text_of
from fourfold_bench.processes import BenchProcesses, say
from fourfold_bench.step import recipe
from fourfold_bench.step.measure import environment, explanation
from fourfold_tools.step_time import cost, rates

_RUN: Final = "run"
_ENVIRONMENT_FILE: Final = "tool.py"
_ENVIRONMENT: Final = '''"""Continues attempts after the time of a tool; their scores carry no information."""

import asyncio
import random

from fourfold_reward.environment import Done, Observation, RawText


class Tool:
    def __init__(self, turns, seconds, observation):
        self.turns, self.seconds, self.observation = turns, seconds, observation

    async def reset(self, task):
        self.random = random.Random(task.seed)
        return Observation(RawText(task.text))

    async def step(self, action):
        await asyncio.sleep(self.random.uniform(*self.seconds))
        if action.turn + 1 < self.turns:
            return Observation(RawText(self.observation))
        return Done(self.random.random())
'''
_SEED: Final = 23
_MEMORY_SECONDS: Final = 0.05
# Means over the measured steps.
_MEANS: Final = (m.ROLLOUT_SPEED, m.TRAINER_WAIT, m.ROLLOUT_WAIT, m.TRAIN_SPEED, m.PAUSE_SECONDS, m.PUBLISH_SECONDS)


def measure(settings: LongTailSettings, run: BenchmarkRun) -> dict[str, Any]:
    """Measure; return JSON values. Lags that are not done in time are missing.

    Raises:
        ConfigError: the settings break a rule of recipes.
        Unavailable: the run failed; with the end of its output.
        Internal: no lag was measured in time.
    """
    began, step = time.monotonic(), settings.step
    gpus = [f"cuda:{index}" for index in range(step.gpus)]
    with GpuMemory(gpus, every=_MEMORY_SECONDS) as memory, BenchProcesses(run.folder) as processes:
        path = processes.write_recipe(write_recipe(settings, run.folder))
        processes.write_model(settings.shape, context=step.context)
        memory.used()
        processes.start(_RUN, "-m", "fourfold_bench.step.launch", str(run.folder), path, env=environment(step))
        series = LagSeries(settings, run.folder / "runs" / "bench-step")
        try:
            processes.wait(_RUN, timeout=began + settings.seconds - time.monotonic(), until=series.poll)
        except DeadlinePassed as error:
            say(error.message)
        except Unavailable as error:
            raise Unavailable(explanation(processes.log(_RUN)) or error.message) from None
        peak = {device: round(most) for device, most in memory.peak().items()}
    if not series.done:
        raise Internal(f"lag {settings.lags[0]} was not measured within {settings.seconds:.0f} s; give --seconds more")
    config = configuration.load(series.run_dir / "config.toml")
    return summarise(settings, config, series.done, run.folder) | {
        "first_step_after_seconds": series.first_step_seconds,
        "seconds": round(time.monotonic() - began, 1),
        "gpu_mib": peak,
        "steps": series.rows,
    }


def write_recipe(settings: LongTailSettings, folder: Path) -> Config:
    """Write prompts and reward function; return the recipe, with the lowest lag."""
    words = SHAPES[settings.shape]["vocab_size"]
    stops = np.random.default_rng(_SEED).choice(words, settings.stop_ids, replace=False).tolist()
    changes: dict[str, dict[str, Any]] = {
        "sampling": {"stop_token_ids": sorted(stops), "max_new_tokens": settings.new_tokens},
        "asynchrony": {"max_policy_lag": settings.policy_lags[0]},
        "algorithm": {"preset": settings.preset},
        "rollout": {"max_concurrent_samples": settings.engine_samples},
        "retry": {"restarts": len(settings.lags) + 2},
    }
    if settings.turns > 1:
        changes |= _agents(settings, folder)
    return recipe.write(settings.step, folder, changes)


def _agents(settings: LongTailSettings, folder: Path) -> dict[str, dict[str, Any]]:
    """Write the environment; return the tables of a run whose attempts have several turns."""
    path = folder / _ENVIRONMENT_FILE
    path.write_text(_ENVIRONMENT, encoding="utf-8")
    options = {
        "turns": settings.turns,
        "seconds": list(settings.tool_seconds),
        "observation": " " + text_of(list(range(OBSERVATION_TOKENS))),
    }
    return {
        "agents": {"source": "tasks"},
        "gateway": {"replicas": 1, "http_listen": ""},
        "environment": {
            "replicas": 1,
            "source": f"{path}:Tool",
            "options": options,
            "max_turns": settings.turns,
            "concurrent_episodes": settings.engine_samples,
        },
    }


class LagSeries:
    """Follows a run by its metrics file, and sets the next lag when enough steps of the present one are done."""

    def __init__(self, settings: LongTailSettings, run_dir: Path) -> None:
        """Start the clock; make this object when the run is started."""
        self.run_dir = run_dir
        self.done: dict[int, list[dict[str, Any]]] = {}
        """The measured rows by lag, each list with the row before them."""
        self.rows: list[dict[str, Any]] = []
        self.first_step_seconds = 0.0
        self._settings, self._began, self._size = settings, time.monotonic(), -1

    def poll(self) -> bool:
        """Read the metrics file; return whether all lags are done."""
        path = self.run_dir / "metrics.jsonl"
        if not path.exists() or path.stat().st_size == self._size:
            return False
        self._size = path.stat().st_size
        self.rows = _read(path)
        if self.rows and not self.first_step_seconds:
            self.first_step_seconds = round(time.monotonic() - self._began, 3)
        lag = self._settings.policy_lags[len(self.done)]
        rows = [row for row in self.rows if row.get(m.LAG_LIMIT) == lag]
        warm_up, count = self._settings.warm_up_steps(lag), self._settings.measured_steps(lag)
        say(f"lag {lag}: {len(rows)} of {warm_up + count} steps are done")
        if len(rows) < warm_up + count:
            return False
        self.done[lag] = rows[warm_up - 1 : warm_up + count]
        if len(self.done) == len(self._settings.lags):
            return True
        change_lag(self.run_dir, self._settings.policy_lags[len(self.done)])
        return False


def change_lag(run_dir: Path, lag: int) -> None:
    """Let a run continue with another policy lag; its coordinator reads the recipe after the next step."""
    path = run_dir / "config.toml"
    config = configuration.load(path)
    asynchrony = config.asynchrony.model_copy(update={"max_policy_lag": lag})
    changed = path.with_suffix(".changed")
    changed.write_text(configuration.dump(config.model_copy(update={"asynchrony": asynchrony})), encoding="utf-8")
    changed.replace(path)


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file, without a line that is being written."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def summarise(
    settings: LongTailSettings, config: Config, done: Mapping[int, Sequence[Mapping[str, Any]]], folder: Path
) -> dict[str, Any]:
    """Return the results of each lag, and predictions from the rates at the lowest lag."""
    busiest = max((row.get(m.ENGINE_SPEED_MAX) or 0.0 for rows in done.values() for row in rows), default=0.0) or None
    lowest = min(done)
    measured = _write_rates(folder / "rates", done[lowest])
    model = folder_shape(folder / "model")
    lags: dict[str, Any] = {}
    for lag, rows in done.items():
        result = steady_state(rows)
        work = rates.workload(config, model, measured, lag)
        prediction = cost.predict(measured.rates, work, lag)
        first = lags.get("0")
        # In a steady state, engines sample what is trained.
        result["engine_share"] = result["trained_tokens_per_second"] / busiest if busiest else None
        result["speed_up"] = _ratio(result, first)
        result["predicted"] = {
            name: getattr(prediction, name)
            for name in (
                "step_seconds", "trained_tokens_per_second", "engine_utilisation", "trainer_wait", "engine_wait",
                "mean_token_lag", "limit",
            )
        }  # fmt: skip
        result["predicted"]["speed_up"] = _ratio(result["predicted"], first and first["predicted"])
        lags[str(lag)] = result
        if lag == 0:
            result["speed_up"] = result["predicted"]["speed_up"] = 1.0
    work = rates.workload(config, model, measured, lowest)
    fitted = cost.full_load_tokens_per_second(measured.rates, work)
    return {"lags": lags, "full_tokens_per_second": {"busiest": busiest, "fitted": fitted}}


def _write_rates(folder: Path, rows: Sequence[Mapping[str, Any]]) -> rates.RunRates:
    """Return the rates of some steps; the first row is not used."""
    folder.mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / rates.METRICS_FILE).write_text(lines, encoding="utf-8")
    return rates.read_rates(folder)


def _ratio(result: Mapping[str, Any], first: Mapping[str, Any] | None) -> float | None:
    name = "trained_tokens_per_second"
    return result[name] / first[name] if first else None


def steady_state(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the results of consecutive steps; the first row only tells when the others began."""
    before, *measured = rows
    if [row["step"] for row in rows] != list(range(before["step"], before["step"] + len(rows))):
        raise Internal(f"steps after {before['step']} are missing")
    seconds = (_end(measured[-1]) - _end(before)).total_seconds()
    tokens = sum(row[m.TRAINED_TOKENS] for row in measured)
    return {
        "steps": [measured[0]["step"], measured[-1]["step"]],
        "step_seconds": seconds / len(measured),
        "step_seconds_by_step": [
            (_end(row) - _end(last)).total_seconds() for last, row in zip(rows, measured, strict=False)
        ],
        "trained_tokens_per_second": tokens / seconds,
        "completion_tokens": tokens / sum(row[m.TRAINED_SAMPLES] for row in measured),
        "token_lag": {
            "mean": fmean(row[m.TOKEN_LAG_MEAN] for row in measured),
            "p95": max(row[m.TOKEN_LAG_P95] for row in measured),
            "max": max(row[m.TOKEN_LAG_MAX] for row in measured),
        },
        "stale_token_share": fmean(row[m.STALE_TOKENS] for row in measured),
        "dropped_samples": sum(row[m.DROPPED_SAMPLES] for row in measured),
        "skipped_steps": measured[-1][m.SKIPPED_STEPS] - before[m.SKIPPED_STEPS],
        "length_bias": measured[-1].get(m.LENGTH_BIAS),
        **{name: fmean(values) for name in _MEANS if (values := [row[name] for row in measured if name in row])},
    }


def _end(row: Mapping[str, Any]) -> datetime:
    return datetime.fromisoformat(row["end_time"])
