"""Defines `fourfold bench long-tail`: its options, what it needs, its table, its plot and its checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fourfold import metrics as m
from fourfold.errors import ConfigError
from fourfold_bench import plots
from fourfold_bench.gpus import default_device, usable
from fourfold_bench.harness import Benchmark, BenchmarkRun, BenchmarkSettings, option
from fourfold_bench.models import SHAPE_NAMES, SHAPES, kv_cache_gib
from fourfold_bench.step.benchmark import BENCHMARK as STEP
from fourfold_bench.step.benchmark import StepSettings
from fourfold_bench.tables import aligned

_GPU: Final = {"shape": "0.43b", "prompts": 32, "group_size": 8, "prompt_tokens": 64, "new_tokens": 4096}
_CPU: Final = {"shape": "tiny", "prompts": 3, "group_size": 2, "prompt_tokens": 16, "new_tokens": 48}
_STOP_IDS: Final = {"cpu": 48, "cuda": 64}
_SIZES: Final = "small on CPU"
# An engine decodes no faster with more samples at once.
_MOST_SAMPLES: Final = 1024
# Trained tokens per second relative to lag 0, with the engine and the trainer on GPUs of their own.
_GOALS: Final = {1: 1.6, 2: 2.0, 4: 2.8}
_GOALS_OF_TURNS: Final = {2: 2.0}
OBSERVATION_TOKENS: Final = 8
_MOST_LENGTH_CHANGE: Final = 0.15
_MOST_STALE: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class LongTailSettings(BenchmarkSettings):
    """The options of `fourfold bench long-tail`."""

    lags: tuple[str, ...] = option("values of asynchrony.max_policy_lag, ascending", default=("0", "1", "2", "4"))
    device: str = option("default cuda where there are GPUs", choices=("cpu", "cuda"))
    layout: str = option(
        "separate: the engine on one GPU and the trainer on another; shared: both on one. Default: what there is",
        choices=("separate", "shared"),
    )
    shape: str = option(_SIZES, choices=SHAPE_NAMES)
    prompts: int = option(_SIZES, least=1)
    group_size: int = option(_SIZES, least=2)
    prompt_tokens: int = option(_SIZES, least=1)
    new_tokens: int = option(f"most tokens of a completion; {_SIZES}", least=2)
    stop_ids: int = option("token ids that end a completion; the mean length is vocabulary / these", least=1, most=64)
    turns: int = option("turns of an attempt; more than 1: an environment with a tool plays it", default=1, least=1)
    tool_ms: tuple[str, ...] = option("least and longest time of the tool", default=("50", "500"), metavar="MS,MS")
    steps: int = option(
        "steps that are measured at each lag, in addition to the lag, rounded up to a multiple of lag + 1",
        default=4,
        least=1,
    )
    warm_up: int = option("steps before them, in addition to the lag", default=2, least=1)
    preset: str = option("algorithm, with an importance correction", default="decoupled")
    tokens_per_micro_batch: int = option(default=32_768)
    liger: bool = option("fused kernels in the trainer", default=False)
    kv_cache_gib: int = option("KV cache of the engine; 0: what its samples need", default=0, least=0)
    seconds: float = option("time for everything; lags that are not done by then are missing", default=540.0, above=0)

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        device = given.get("device") or default_device().partition(":")[0]
        layout = "separate" if device == "cuda" and len(usable()) > 1 else "shared"
        sizes = _CPU if device == "cpu" else _GPU
        return {**sizes, "stop_ids": _STOP_IDS[device], "layout": layout, **given, "device": device}

    def check(self) -> None:
        values = self.policy_lags
        if not values or values != sorted(set(values)) or values[0] < 0:
            raise ConfigError(f"--lags {','.join(self.lags)}: they must be different numbers from 0 in ascending order")
        words = SHAPES[self.shape]["vocab_size"]
        if self.stop_ids >= words:
            raise ConfigError(f"--stop-ids {self.stop_ids}: it must be below the {words} ids of the model")
        self._limit("tokens_per_micro_batch", least=self.step.context)
        least, most = self.tool_seconds
        if not 0 <= least <= most:
            raise ConfigError(f"--tool-ms {','.join(self.tool_ms)}: give two numbers from 0, the smaller one first")

    @property
    def policy_lags(self) -> list[int]:
        """Return the lags as numbers."""
        if not all(lag.isdecimal() for lag in self.lags):
            raise ConfigError(f"--lags {','.join(self.lags)}: they must be numbers from 0, such as 0,1,2,4")
        return [int(lag) for lag in self.lags]

    @property
    def tool_seconds(self) -> tuple[float, float]:
        """Return the least and the longest time of the tool."""
        if len(self.tool_ms) != 2 or not all(word.isdecimal() for word in self.tool_ms):
            raise ConfigError(f"--tool-ms {','.join(self.tool_ms)}: give two numbers of milliseconds, such as 50,500")
        return int(self.tool_ms[0]) / 1e3, int(self.tool_ms[1]) / 1e3

    @property
    def attempt_tokens(self) -> int:
        """Return the tokens of the longest attempt, without its prompt."""
        return self.turns * self.new_tokens + (self.turns - 1) * OBSERVATION_TOKENS

    def warm_up_steps(self, lag: int) -> int:
        """Return the steps at a lag that are not measured: until the pipeline is full."""
        return self.warm_up + lag

    def measured_steps(self, lag: int) -> int:
        """Return the steps at a lag that are measured.

        The groups of lag + 1 steps begin together when a lag begins, and end together: only whole rounds are typical.
        """
        return -(-(self.steps + lag) // (lag + 1)) * (lag + 1)

    @property
    def mean_tokens(self) -> float:
        """Return the mean length of a completion, if all tokens are equally likely."""
        end: float = self.stop_ids / SHAPES[self.shape]["vocab_size"]
        return (1 - (1 - end) ** self.new_tokens) / end

    @property
    def engine_samples(self) -> int:
        """Return the samples that the engine decodes at once."""
        wanted = (max(self.policy_lags) + 1) * self.prompts * self.group_size
        return max(self.group_size, min(wanted, _MOST_SAMPLES))

    @property
    def step(self) -> StepSettings:
        """Return the settings of the run."""
        tokens = self.engine_samples * (self.prompt_tokens + round(self.turns * self.mean_tokens))
        lags = self.policy_lags
        # Further steps keep the engine busy while the last ones are measured, and after a change of the lag.
        steps = sum(self.warm_up_steps(lag) + self.measured_steps(lag) + 2 for lag in lags) + lags[-1]
        sizes = {name: getattr(self, name) for name in _GPU} | {"new_tokens": self.attempt_tokens}
        return StepSettings(
            **sizes,
            layout=self.layout,
            device=self.device,
            steps=steps,
            kl_coef=0.0,
            tokens_per_micro_batch=self.tokens_per_micro_batch,
            liger=self.liger,
            kv_cache_gib=self.kv_cache_gib or kv_cache_gib(self.shape, tokens),
            stop=True,
        )


class LongTailBenchmark(Benchmark[LongTailSettings]):
    """Measures one run whose policy lag changes."""

    name = "long-tail"
    summary = "trained tokens per second at several policy lags, with completions of very different lengths"
    settings = LongTailSettings
    libraries = STEP.libraries

    def devices(self, settings: LongTailSettings) -> Sequence[str]:
        return STEP.devices(settings.step)

    def packages(self, settings: LongTailSettings) -> Mapping[str, str]:
        return STEP.packages(settings.step)

    def label(self, settings: LongTailSettings) -> str:
        turns = f"{settings.turns}-turns-" if settings.turns > 1 else ""
        return f"{settings.shape}-{turns}{settings.layout}-{settings.device}"

    def measure(self, settings: LongTailSettings, run: BenchmarkRun) -> dict[str, Any]:
        from fourfold_bench.long_tail.measure import measure

        return measure(settings, run)

    def table(self, document: Mapping[str, Any]) -> list[str]:
        settings, results = LongTailSettings(**_tuples(document["parameters"])), document["results"]
        least, most = settings.tool_ms
        turns = f"{settings.turns} turns, a tool of {least} to {most} ms, each turn " if settings.turns > 1 else ""
        head = (
            f"{settings.shape} on {settings.device}, {settings.layout}: {settings.prompts} prompts x "
            f"{settings.group_size}, {settings.prompt_tokens} tokens + {turns}at most {settings.new_tokens}, mean of "
            f"{settings.mean_tokens:.0f}; {settings.preset}"
        )
        full = results["full_tokens_per_second"]
        return [
            head,
            "",
            *aligned(_rows(results["lags"])),
            "",
            f"full engine: {full['busiest'] or 0:,.0f} tokens/s in its busiest seconds, {full['fitted']:,.0f} with the "
            f"engine step that was fitted at the lowest lag; predictions use the rates of the lowest lag",
            f"the first step was done {results['first_step_after_seconds']:.1f} s after the start, everything "
            f"{results['seconds']:.1f} s; most memory: {results['gpu_mib']} MiB",
        ]

    def failures(self, document: Mapping[str, Any]) -> list[str]:
        settings = LongTailSettings(**_tuples(document["parameters"]))
        return check(settings, document["results"]["lags"])

    def plot(self, document: Mapping[str, Any], path: Path) -> None:
        lags = document["results"]["lags"]
        measured = {float(lag): row["trained_tokens_per_second"] for lag, row in lags.items()}
        predicted = {float(lag): row["predicted"]["trained_tokens_per_second"] for lag, row in lags.items()}
        curves = [
            plots.Curve(label="measured", points=measured, marker="o"),
            plots.Curve(label="predicted", points=predicted, style="--", marker="x"),
        ]
        y = "trained tokens per second"
        plots.draw(path, curves, title=document["benchmark"], x="max_policy_lag", y=y, from_zero=True)


def check(settings: LongTailSettings, lags: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the results at the lags."""
    found = [f"lag {lag} was not measured in {settings.seconds:.0f} s" for lag in settings.lags if lag not in lags]
    first = lags.get(settings.lags[0])
    for lag, row in lags.items():
        if (largest := row["token_lag"]["max"]) > int(lag):
            found.append(f"lag {lag}: a token is {largest:.0f} versions old")
        if (stale := row["stale_token_share"]) > _MOST_STALE:
            found.append(f"lag {lag}: {stale:.1%} of the tokens are stale; at most {_MOST_STALE:.0%}")
        if row["skipped_steps"]:
            found.append(f"lag {lag}: {row['skipped_steps']:.0f} steps changed nothing")
        if first and abs(change := row["completion_tokens"] / first["completion_tokens"] - 1) > _MOST_LENGTH_CHANGE:
            found.append(
                f"lag {lag}: trained completions are {change:+.0%} longer than at lag {settings.lags[0]}; at most "
                f"{_MOST_LENGTH_CHANGE:.0%}"
            )
        goals = _GOALS if settings.turns == 1 else _GOALS_OF_TURNS
        goal, gain = goals.get(int(lag)), row["speed_up"]
        if settings.device == "cuda" and settings.layout == "separate" and goal and gain and gain < goal:
            found.append(f"lag {lag}: {gain:.2f} times the trained tokens per second of lag 0; at least {goal}")
    return found


def _rows(lags: Mapping[str, Any]) -> list[list[str]]:
    head = ["lag", "trained tok/s", "x lag 0", "predicted", "x", "s/step", "pred.", "of full", "while sampling"]
    head += [
        "trainer waits",
        "pred.",
        "engine waits",
        "pred.",
        "token lag mean/p95/max",
        "stale",
        "length bias",
        "mean",
    ]
    rows = [head]
    for lag, row in lags.items():
        predicted, age = row["predicted"], row["token_lag"]
        rows.append([
            lag,
            f"{row['trained_tokens_per_second']:,.0f}",
            _number(row["speed_up"]),
            f"{predicted['trained_tokens_per_second']:,.0f}",
            _number(predicted["speed_up"]),
            f"{row['step_seconds']:.2f}",
            f"{predicted['step_seconds']:.2f}",
            "-" if row["engine_share"] is None else f"{row['engine_share']:.0%}",
            f"{row[m.ROLLOUT_SPEED]:,.0f} tok/s",
            f"{row[m.TRAINER_WAIT]:.0%}",
            f"{predicted['trainer_wait']:.0%}",
            f"{row[m.ROLLOUT_WAIT]:.0%}",
            f"{predicted['engine_wait']:.0%}",
            f"{age['mean']:.2f} / {age['p95']:.0f} / {age['max']:.0f} (pred. {predicted['mean_token_lag']:.2f})",
            f"{row['stale_token_share']:.1%}",
            "-" if row["length_bias"] is None else f"{row['length_bias']:+.1%}",
            f"{row['completion_tokens']:.0f}",
        ])  # fmt: skip
    return rows


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _tuples(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in parameters.items()}


BENCHMARK: Final = LongTailBenchmark()
