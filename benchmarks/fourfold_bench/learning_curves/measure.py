"""Trains a recipe at several policy lags with several seeds, several runs at once, and compares what they learn."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

from fourfold import config as configuration
from fourfold import metrics as m
from fourfold.config import Config, from_tables
from fourfold.errors import Internal
from fourfold.model import folder as model_folder
from fourfold_bench.gpus import usable, visible
from fourfold_bench.harness import BenchmarkRun
from fourfold_bench.learning_curves.benchmark import CurveSettings
from fourfold_bench.processes import BenchProcesses, say
from fourfold_bench.step.measure import explanation

_POLL_SECONDS: Final = 0.25
_LAST: Final = 10  # steps whose mean reward is compared
# Metrics of each step that the result has.
_ROW: Final = (
    "step", m.REWARD_MEAN, m.TOKEN_LAG_MEAN, m.TOKEN_LAG_MAX, m.EFFECTIVE_SAMPLE_SIZE, m.MISMATCH_MEAN, m.ENTROPY,
    m.GRAD_NORM, m.RESPONSE_LENGTH, m.TIME_STEP, m.STALE_TOKENS,
)  # fmt: skip


def measure(settings: CurveSettings, run: BenchmarkRun) -> dict[str, Any]:
    """Measure; return JSON values.

    Raises:
        ConfigError: the recipe is wrong.
        Internal: no run was done; with the first reason.
    """
    base = configuration.load(settings.recipe)
    model_folder.resolve(base.model.source)  # converts a built-in model, once for all runs
    jobs = [(lag, base.seed + number) for number in range(settings.seeds) for lag in settings.policy_lags]
    configs = {f"lag-{lag}-seed-{seed}": make_recipe(settings, base, lag, seed) for lag, seed in jobs}
    began = time.monotonic()
    done, failed = run_all(settings, configs, run.folder)
    if not done:
        raise Internal(f"no run was done; {next(iter(failed.items()), '')}")
    return summarise(done) | {"failed": failed, "runs": done, "seconds": round(time.monotonic() - began, 1)}


def make_recipe(settings: CurveSettings, base: Config, lag: int, seed: int) -> Config:
    """Return the recipe of one run."""
    tables = base.model_dump(mode="json")
    changes: dict[str, dict[str, Any]] = {
        "asynchrony": {"max_policy_lag": lag},
        "evaluation": {
            "every_steps": -(-settings.steps // settings.evaluations),
            "samples_per_prompt": settings.samples_per_prompt,
        },
        "checkpoint": {"every_steps": settings.steps},
    }
    if settings.device == "cuda":
        changes["placement"] = {"colocated": True}
        changes["rollout"] = {"kv_cache_gib": settings.kv_cache_gib, "enforce_eager": not settings.graphs}
    tables |= {name: tables[name] | table for name, table in changes.items()}
    tables |= {"seed": seed, "steps": settings.steps, "name": f"lag-{lag}-seed-{seed}"}
    tables["algorithm"] = {"preset": settings.preset}
    if settings.prompts:
        source = {"path": str(Path(settings.prompts).absolute()), "skip": base.data.train[0].skip}
        tables["data"] = tables["data"] | {"train": source}
    return from_tables(tables, source=settings.recipe)


def run_all(
    settings: CurveSettings, configs: Mapping[str, Config], folder: Path
) -> tuple[dict[str, Any], dict[str, str]]:
    """Run the recipes, some at once; return the result of each that was done, and the reason for each that was not."""
    deadline = time.monotonic() + settings.seconds
    waiting, running = deque(configs), dict[str, float]()
    done: dict[str, Any] = {}
    failed: dict[str, str] = {}
    with BenchProcesses(folder) as processes:
        while (waiting or running) and time.monotonic() < deadline:
            while waiting and len(running) < settings.parallel:
                name = waiting.popleft()
                index = len(configs) - len(waiting) - 1
                _start(settings, processes, folder / name, configs[name], index)
                running[name] = time.monotonic()
            for name, failure in processes.take_ended().items():
                seconds = time.monotonic() - running.pop(name)
                say(f"{name} {'failed' if failure else 'is done'} after {seconds:.0f} s")
                run_dir = folder / name / "runs" / name
                if failure:
                    failed[name] = explanation(processes.log(name)) or failure
                else:
                    done[name] = read_run(run_dir, configs[name]) | {"seconds": round(seconds, 1)}
                    for part in ("checkpoints", "model"):  # gigabytes
                        shutil.rmtree(run_dir / part, ignore_errors=True)
            time.sleep(_POLL_SECONDS)
    failed |= dict.fromkeys((*running, *waiting), f"not done within {settings.seconds:.0f} s")
    return done, failed


def _start(settings: CurveSettings, processes: BenchProcesses, folder: Path, config: Config, index: int) -> None:
    folder.mkdir()
    path = folder / "recipe.toml"
    path.write_text(configuration.dump(config), encoding="utf-8")
    env = visible(f"cuda:{index % len(usable())}") if settings.device == "cuda" else visible()
    # Without a limit, each process of each run starts a thread per core.
    env = {**env, "OMP_NUM_THREADS": str(settings.threads)}
    processes.start(config.name, "-m", "fourfold_bench.step.launch", str(folder), str(path), env=env)


def read_run(run_dir: Path, config: Config) -> dict[str, Any]:
    """Return the curves of a finished run."""
    report = json.loads((run_dir / "report.json").read_text(encoding="utf-8"))
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [{name: row.get(name) for name in _ROW} for row in map(json.loads, lines)]
    if [row["step"] for row in rows] != list(range(1, config.steps + 1)):
        raise Internal(f"{run_dir / 'metrics.jsonl'} does not have the steps 1 to {config.steps}")
    return {
        "lag": config.asynchrony.max_policy_lag,
        "seed": config.seed,
        "rows": rows,
        "evals": report["evals"],
        "dropped": report["dropped"],
    }


def summarise(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the means over the seeds at each lag, and the differences from lag 0."""
    lags = sorted({run["lag"] for run in runs.values()})
    by_lag = {lag: [run for run in runs.values() if run["lag"] == lag] for lag in lags}
    return {"lags": {str(lag): _summarise_lag(by_lag[lag], by_lag.get(0, []) if lag else []) for lag in lags}}


def _summarise_lag(runs: Sequence[Mapping[str, Any]], first: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rewards = [[row[m.REWARD_MEAN] for row in run["rows"]] for run in runs]
    rows = [row for run in runs for row in run["rows"]]
    return {
        "score": _spread([run["evals"][-1]["score"] for run in runs]),
        "score_before": fmean(run["evals"][0]["score"] for run in runs),
        "answers": sum(run["evals"][-1]["n"] for run in runs),
        "last_reward": _spread([fmean(reward[-_LAST:]) for reward in rewards]),
        "reward": {
            "mean": [fmean(values) for values in zip(*rewards, strict=True)],
            "std": [_std(values) for values in zip(*rewards, strict=True)],
        },
        "difference": _difference(runs, first),
        "token_lag_mean": _mean(rows, m.TOKEN_LAG_MEAN),
        "token_lag_max": max((row[m.TOKEN_LAG_MAX] or 0.0 for row in rows), default=0.0),
        "ess": _mean(rows, m.EFFECTIVE_SAMPLE_SIZE),
        "step_seconds": _mean(rows, m.TIME_STEP),
    }


def _difference(runs: Sequence[Mapping[str, Any]], first: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the mean difference of the final scores from those of `first`, by seed; None without common seeds.

    Runs with the same seed have the same held-out prompts, so that their difference varies less than the scores.
    """
    base = {run["seed"]: run["evals"][-1]["score"] for run in first}
    found = [run["evals"][-1]["score"] - base[run["seed"]] for run in runs if run["seed"] in base]
    if not found:
        return None
    return {"mean": fmean(found), "standard_error": _std(found) / math.sqrt(len(found)), "runs": found}


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"mean": fmean(values), "std": _std(values), "count": len(values), "runs": list(values)}


def _std(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    values = [row[name] for row in rows if row[name] is not None]
    return fmean(values) if values else math.nan
