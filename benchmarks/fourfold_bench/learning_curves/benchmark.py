"""Defines `fourfold bench learning-curves`: its options, what it needs, its table, its plot and its checks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fourfold.errors import ConfigError
from fourfold_bench import plots
from fourfold_bench.gpus import default_device, usable
from fourfold_bench.harness import Benchmark, BenchmarkRun, BenchmarkSettings, option
from fourfold_bench.step.benchmark import BENCHMARK as STEP
from fourfold_bench.step.benchmark import StepSettings
from fourfold_bench.tables import aligned

_GPU: Final = {
    "recipe": "recipes/quickstart_gpu.toml", "lags": ("0", "1", "2", "4"), "seeds": 3, "steps": 30, "parallel": 6,
    "samples_per_prompt": 40, "answers": 700, "difference": 0.04,
}  # fmt: skip
_CPU: Final = {
    "recipe": "recipes/quickstart.toml", "lags": ("0", "1"), "seeds": 1, "steps": 2, "parallel": 1,
    "samples_per_prompt": 2, "answers": 40, "difference": 1.0,
}  # fmt: skip
_SIZES: Final = "small on CPU"
# Up to this lag, the score must be that of lag 0.
_LARGEST_CHECKED_LAG: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveSettings(BenchmarkSettings):
    """The options of `fourfold bench learning-curves`."""

    recipe: str = option("default: the quickstart, in the repository's folder")
    prompts: str = option(
        "JSONL file of prompts in place of the recipe's, for machines without reasoning-gym", default=""
    )
    lags: tuple[str, ...] = option(f"values of asynchrony.max_policy_lag, ascending; {_SIZES}")
    seeds: int = option(f"runs at each lag, from the recipe's seed upwards; {_SIZES}", least=1)
    steps: int = option(_SIZES, least=1)
    preset: str = option("algorithm at all lags, with an importance correction", default="decoupled")
    device: str = option("default cuda where there are GPUs", choices=("cpu", "cuda"))
    parallel: int = option(f"runs at once, spread over the GPUs; {_SIZES}", least=1)
    samples_per_prompt: int = option(f"answers to each held-out prompt in an evaluation; {_SIZES}", least=1)
    answers: int = option(f"least answers of the last evaluation of a run; {_SIZES}", least=1)
    difference: float = option(
        f"largest difference of the mean held-out score from lag 0, up to lag {_LARGEST_CHECKED_LAG}; 1 on CPU",
        above=0,
    )
    evaluations: int = option("evaluations of a run, besides that before the first step", default=3, least=1)
    kv_cache_gib: int = option("KV cache of an engine", default=2, least=1)
    graphs: bool = option("engines compile and capture CUDA graphs, which takes longer to start", default=False)
    seconds: float = option("time for everything; runs that are not done by then are missing", default=540.0, above=0)

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        device = given.get("device") or default_device().partition(":")[0]
        return {**(_CPU if device == "cpu" else _GPU), **given, "device": device}

    def check(self) -> None:
        values = self.policy_lags
        if not values or values != sorted(set(values)):
            raise ConfigError(f"--lags {','.join(self.lags)}: they must be different numbers in ascending order")
        if not Path(self.recipe).is_file():
            raise ConfigError(f"--recipe {self.recipe}: no such file; call this in the repository's folder, or give it")
        if self.prompts and not Path(self.prompts).is_file():
            raise ConfigError(
                f"--prompts {self.prompts}: no such file; python -m fourfold_bench.learning_curves.prompts writes one"
            )

    @property
    def policy_lags(self) -> list[int]:
        """Return the lags as numbers."""
        if not all(lag.isdecimal() for lag in self.lags):
            raise ConfigError(f"--lags {','.join(self.lags)}: they must be numbers from 0, such as 0,1,2,4")
        return [int(lag) for lag in self.lags]

    @property
    def threads(self) -> int:
        """Return the threads of each process: its share of the cores."""
        return max(1, len(os.sched_getaffinity(0)) // self.parallel)


class CurveBenchmark(Benchmark[CurveSettings]):
    """Trains one recipe at several lags with several seeds."""

    name = "learning-curves"
    summary = "training reward and held-out score at several policy lags"
    settings = CurveSettings
    libraries = STEP.libraries

    def devices(self, settings: CurveSettings) -> Sequence[str]:
        return ["cpu"] if settings.device == "cpu" else [f"cuda:{index}" for index in range(max(len(usable()), 1))]

    def packages(self, settings: CurveSettings) -> Mapping[str, str]:
        needed = dict(STEP.packages(StepSettings(**StepSettings.complete({"device": settings.device}))))
        needed |= {"matplotlib": "fourfold-coordinator"}
        return needed if settings.prompts else needed | {"reasoning_gym": "fourfold-coordinator[reasoning-gym]"}

    def label(self, settings: CurveSettings) -> str:
        return f"{Path(settings.recipe).stem.replace('_', '-')}-{settings.preset}"

    def measure(self, settings: CurveSettings, run: BenchmarkRun) -> dict[str, Any]:
        from fourfold_bench.learning_curves.measure import measure

        return measure(settings, run)

    def table(self, document: Mapping[str, Any]) -> list[str]:
        parameters, results = document["parameters"], document["results"]
        head = (
            f"{parameters['recipe']}, {parameters['preset']}, {parameters['device']}: {parameters['steps']} steps, "
            f"{parameters['seeds']} seeds; {results['seconds']:.0f} s for all runs"
        )
        rows = [["lag", "held-out score", "std of runs", "answers", "minus lag 0", "last rewards", "before"]]
        rows[0] += ["token lag", "ess", "s/step", "scores of the runs"]
        for lag, row in results["lags"].items():
            change = row["difference"]
            rows.append([
                lag,
                f"{row['score']['mean']:.3f}",
                f"{row['score']['std']:.3f}",
                f"{row['answers']}",
                f"{change['mean']:+.3f} +- {change['standard_error']:.3f}" if change else "",
                f"{row['last_reward']['mean']:.3f}",
                f"{row['score_before']:.3f}",
                f"{row['token_lag_mean']:.2f}",
                f"{row['ess']:.3f}",
                f"{row['step_seconds']:.2f}",
                " ".join(f"{score:.3f}" for score in row["score"]["runs"]),
            ])  # fmt: skip
        return [head, "", *aligned(rows)]

    def failures(self, document: Mapping[str, Any]) -> list[str]:
        parameters, results = document["parameters"], document["results"]
        found = [f"{name}: {why}" for name, why in results["failed"].items()]
        for lag, row in results["lags"].items():
            if row["answers"] < parameters["answers"] * row["score"]["count"]:
                found.append(f"lag {lag}: {row['answers']} answers; at least {parameters['answers']} in each run")
            if row["token_lag_max"] > int(lag):
                found.append(f"lag {lag}: a token is {row['token_lag_max']:.0f} versions old")
            change = row["difference"]
            checked = change and int(lag) <= _LARGEST_CHECKED_LAG
            if checked and abs(change["mean"]) > parameters["difference"]:
                found.append(
                    f"lag {lag}: the score differs by {change['mean']:+.3f} from lag 0; at most "
                    f"{parameters['difference']:g}"
                )
        return found

    def plot(self, document: Mapping[str, Any], path: Path) -> None:
        curves = []
        for lag, row in document["results"]["lags"].items():
            steps = range(1, len(row["reward"]["mean"]) + 1)
            curves.append(
                plots.Curve(
                    label=f"lag {lag}: held-out score {row['score']['mean']:.2f}",
                    points=dict(zip(steps, row["reward"]["mean"], strict=True)),
                    errors=dict(zip(steps, row["reward"]["std"], strict=True)),
                )
            )
        title = f"{document['benchmark']}, mean and std of {document['parameters']['seeds']} seeds"
        plots.draw(path, curves, title=title, x="step", y="training reward")


BENCHMARK: Final = CurveBenchmark()
