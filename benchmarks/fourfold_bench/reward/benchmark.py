"""Defines `fourfold bench reward`: its options, its checks and its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fourfold.errors import ConfigError
from fourfold_bench.harness import Benchmark, BenchmarkRun, BenchmarkSettings, option
from fourfold_bench.tables import aligned

HERE: Final = "this checkout"
_SERVICES: Final = ("services/reward", "services/coordinator", "services/rollout", "services/trainer")
_GOAL_MICROSECONDS: Final = 80.0
# More growth of the service's memory between the first and the last third of a round than this is a leak.
_GROWTH_MIB: Final = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSettings(BenchmarkSettings):
    """The options of `fourfold bench reward`."""

    batch: int = option("samples of one Score call, for the CPU time", default=512, least=1, most=4096)
    calls: int = option("calls of one run", default=20, least=1)
    runs: int = option("runs, in turns with those of --against", default=7, least=1)
    prompt_chars: int = option(default=300, least=0)
    completion_chars: int = option(default=600, least=1)
    processes: int = option("reward.processes", default=2, least=1)
    rate: float = option("samples per second at fixed times (open loop)", default=100.0, above=0)
    group: int = option("samples of one call of the open loop", default=8, least=1)
    hang_share: float = option("share of the samples that hang", default=0.01, least=0, below=1)
    timeout_seconds: float = option("reward.timeout_seconds", default=5.0, above=0)
    seconds: float = option("of one round of the open loop; 0: no open loop", default=40.0, least=0)
    rounds: int = option("rounds of the open loop without and with hanging samples, in turns", default=2, least=1)
    against: str = option("another checkout, whose service is measured in turns with this one", default="")

    def check(self) -> None:
        if self.against and not (Path(self.against) / _SERVICES[0]).is_dir():
            raise ConfigError(f"--against {self.against}: it has no {_SERVICES[0]}; give the root of a checkout")

    @property
    def sides(self) -> Mapping[str, Mapping[str, str]]:
        """Return the environment variables of the service of each checkout, by the name of the side."""
        if not self.against:
            return {HERE: {}}
        root = Path(self.against).resolve()
        path = ":".join([str(root), *(str(root / name) for name in _SERVICES)])
        return {"other checkout": {"PYTHONPATH": path}, HERE: {}}


class RewardBenchmark(Benchmark[RewardSettings]):
    """Measures the CPU time of a scored sample, and latencies beside samples that hang."""

    name = "reward"
    summary = "CPU time of a scored sample in reward service and coordinator, and latencies beside samples that hang"
    settings = RewardSettings
    libraries = ("grpcio", "protobuf", "psutil")
    profiled = "the service and its workers, in one more run"

    def packages(self, settings: RewardSettings) -> Mapping[str, str]:
        return {"fourfold_reward": "fourfold-reward", "fourfold_coordinator": "fourfold-coordinator"}

    def label(self, settings: RewardSettings) -> str:
        return "cpu"

    def measure(self, settings: RewardSettings, run: BenchmarkRun) -> dict[str, Any]:
        from fourfold_bench.reward.measure import measure

        return measure(settings, run)

    def table(self, document: Mapping[str, Any]) -> list[str]:
        parameters, results = document["parameters"], document["results"]
        texts = f"{parameters['prompt_chars']} + {parameters['completion_chars']} characters"
        head = f"Score calls of {parameters['batch']} samples of {texts}, {parameters['processes']} worker processes"
        lines = [f"{head}; medians of {parameters['runs']} runs", "", *aligned(_costs(results["cpu"]))]
        if results["open_loop"]:
            share = f"{100 * parameters['hang_share']:g} % of them hang for {parameters['timeout_seconds']:g} s"
            load = f"{parameters['rate']:g} samples/s in groups of {parameters['group']}, open loop; `hanging`: {share}"
            lines += ["", load, "", *aligned(_latencies(results["open_loop"]))]
        return lines

    def failures(self, document: Mapping[str, Any]) -> list[str]:
        found = []
        costs = document["results"]["cpu"][HERE]
        for name in ("scorer_us", "coordinator_us"):
            if costs[name] > _GOAL_MICROSECONDS:
                found.append(f"{name} = {costs[name]:.1f}; the goal is {_GOAL_MICROSECONDS:g} us per sample")
        for load, each in document["results"]["open_loop"].get(HERE, {}).items():
            if (growth := each["service_mib_last"] - each["service_mib_first"]) > _GROWTH_MIB:
                found.append(f"the service grew by {growth:.1f} MiB in a round ({load}); at most {_GROWTH_MIB:g}")
            if each["wrong"]:
                found.append(f"{each['wrong']} outcomes are not those of the function ({load})")
        return found


def _costs(sides: Mapping[str, Any]) -> list[list[str]]:
    rows = [["CPU us per sample", "scorer", "service", "workers", "coordinator", "samples/s"]]
    for side, each in sides.items():
        numbers = [each[name] for name in ("scorer_us", "service_us", "workers_us", "coordinator_us")]
        rows.append([side, *(f"{number:.1f}" for number in numbers), f"{each['samples_per_second']:,.0f}"])
    return rows


def _latencies(sides: Mapping[str, Any]) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [
        ["", "groups", "p50 ms", "p99 ms", "max ms", "CPU us/sample", "service MiB", "workers", "MiB each"]
    ]
    for side, loads in sides.items():
        for load, each in loads.items():
            numbers = [each[name] for name in ("p50_ms", "p99_ms", "max_ms", "cpu_us_per_sample")]
            memory = f"{each['service_mib_first']:.0f} -> {each['service_mib_last']:.0f}"
            workers = f"<= {each['workers_max']}"
            cells = [str(each["groups"]), *(f"{n:.1f}" for n in numbers), memory, workers, f"{each['worker_mib']:.0f}"]
            rows.append([f"{side}, {load}", *cells])
    return rows


BENCHMARK: Final = RewardBenchmark()
