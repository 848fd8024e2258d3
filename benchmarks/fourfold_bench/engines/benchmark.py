"""Defines `fourfold bench engines`: its options, its goals, its tables and its plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fourfold.errors import ConfigError
from fourfold_bench.harness import Benchmark, BenchmarkRun, BenchmarkSettings, option
from fourfold_bench.plots import Curve, draw
from fourfold_bench.tables import aligned

_GOALS_US: Final = {64: 100.0, 1024: 150.0}
_GOAL_GAP_SECONDS: Final = 0.5
_GOAL_START_SECONDS: Final = 3.0
_GOAL_SHARE: Final = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(BenchmarkSettings):
    """The options of `fourfold bench engines`."""

    engines: tuple[str, ...] = option(
        "numbers of equal engines, each measured with a coordinator of its own; empty: none",
        default=("1", "10", "100", "300", "1000"),
    )
    tokens: tuple[str, ...] = option("sampled tokens of one sample, each measured", default=("64", "1024"))
    samples: int = option("samples of one step", default=8192, least=8)
    group_size: int = option("samples of one prompt", default=8, least=1, most=256)
    latency: float = option("seconds from a request to its samples", default=0.2, least=0)
    ends: int = option("times at which the samples of a request end, spread over the latency", default=1, least=1)
    capacity: int = option("samples that all engines together take at once", default=8192, least=8)
    warmup: int = option("steps before the measured ones", default=1, least=0)
    steps: int = option("measured steps", default=3, least=1)
    drivers: int = option("processes that simulate the engines", default=2, least=1)
    speeds: tuple[str, ...] = option("tokens/s of unequal engines, relative; empty: none", default=("1", "2", "4", "8"))
    speed_unit: float = option("tokens/s of relative speed 1", default=800.0, above=0)
    speed_tokens: int = option("mean tokens of a sample for unequal engines", default=64, least=2)
    speed_samples: int = option("samples of one step for unequal engines", default=1024, least=8)
    speed_capacity: int = option("samples that each unequal engine takes at once", default=128, least=8)
    silent: bool = option("unequal engines send no load reports", default=False)

    def check(self) -> None:
        for name in ("engines", "tokens", "speeds"):
            for value in getattr(self, name):
                if not value.isdecimal() or int(value) < 1:
                    raise ConfigError(f"--{name} {value}: each must be a positive integer")
        for name in ("samples", "speed_samples"):
            if getattr(self, name) % self.group_size:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} {getattr(self, name)}: it must be a multiple of {self.group_size}")


class EnginesBenchmark(Benchmark[EngineSettings]):
    """Measures the coordinator's CPU time, event loop and start-up, and how unequal engines share the work."""

    name = "engines"
    summary = "the coordinator with 1 to 1,000 simulated engines, and with engines of unequal speed"
    settings = EngineSettings
    libraries = ("grpcio", "protobuf", "numpy", "psutil")
    profiled = "the coordinator with the largest number of engines"

    def packages(self, settings: EngineSettings) -> Mapping[str, str]:
        return {"fourfold_coordinator": "fourfold-coordinator"}

    def measure(self, settings: EngineSettings, run: BenchmarkRun) -> dict[str, Any]:
        from fourfold_bench.engines.measure import measure

        return measure(settings, run)

    def table(self, document: Mapping[str, Any]) -> list[str]:
        results, lines = document["results"], list[str]()
        if results["growth"]:
            rows: list[Sequence[str]] = [
                [
                    "engines",
                    "tokens",
                    "samples/s",
                    "CPU us/sample",
                    "longest gap ms",
                    "start-up s",
                    "its CPU s",
                    "expired leases",
                    "drivers us/sample",
                ]
            ]
            for row in results["growth"]:
                rows.append(
                    [
                        f"{row['engines']:,}",
                        f"{row['tokens']:,}",
                        f"{row['samples_per_second']:,.0f}",
                        f"{row['cpu_us_per_sample']:.0f}",
                        f"{1e3 * row['longest_gap_seconds']:.0f}",
                        f"{row['start_seconds']:.2f}",
                        f"{row['start_cpu_seconds']:.2f}",
                        f"{row['expired_leases']}",
                        f"{row['drivers_us_per_sample']:.0f}",
                    ]
                )
            lines += aligned(rows)
        if unequal := results["unequal"]:
            shares = ", ".join(f"{share:.2f}" for share in unequal["share_by_step"])
            lines += [
                "",
                f"engines of speed {':'.join(document['parameters']['speeds'])}, each with room for "
                f"{document['parameters']['speed_capacity']} samples",
                f"share of the sum of their speeds, by step: {shares}; all steps {unequal['share']:.2f}",
                f"samples by engine: {', '.join(map(str, unequal['samples_by_engine']))}",
            ]
        return lines

    def failures(self, document: Mapping[str, Any]) -> list[str]:
        found = []
        for row in document["results"]["growth"]:
            name = f"{row['engines']} engines, {row['tokens']} tokens"
            goal = _GOALS_US.get(row["tokens"])
            if goal and row["cpu_us_per_sample"] > goal:
                found.append(f"{name}: {row['cpu_us_per_sample']:.0f} us per sample; the goal is {goal:g}")
            if row["longest_gap_seconds"] > _GOAL_GAP_SECONDS:
                found.append(f"{name}: a gap of {row['longest_gap_seconds']:.2f} s; the goal is {_GOAL_GAP_SECONDS:g}")
            if row["start_seconds"] > _GOAL_START_SECONDS:
                found.append(f"{name}: start-up of {row['start_seconds']:.1f} s; the goal is {_GOAL_START_SECONDS:g}")
            if row["expired_leases"]:
                found.append(f"{name}: {row['expired_leases']} leases expired; the goal is 0")
        unequal = document["results"]["unequal"]
        if unequal and (worst := min(unequal["share"], unequal["share_by_step"][0])) < _GOAL_SHARE:
            found.append(f"unequal engines: {worst:.2f} of the sum of their speeds; the goal is {_GOAL_SHARE:g}")
        return found

    def plot(self, document: Mapping[str, Any], path: Path) -> None:
        growth = document["results"]["growth"]
        if not growth:
            return
        curves = []
        for tokens in sorted({row["tokens"] for row in growth}):
            rows = {float(r["engines"]): float(r["cpu_us_per_sample"]) for r in growth if r["tokens"] == tokens}
            curves.append(Curve(label=f"{tokens:,} tokens per sample", points=rows, marker="o"))
        title = "CPU time of the coordinator"
        draw(path, curves, title=title, x="engines", y="us per sample", from_zero=True)


BENCHMARK: Final = EnginesBenchmark()
