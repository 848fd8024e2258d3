"""Defines `fourfold bench tracing`: its options, its goal and its table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from fourfold.errors import ConfigError
from fourfold_bench.harness import Benchmark, BenchmarkRun, BenchmarkSettings, option

OFF: Final = "off"
_DEFAULT_RATIO: Final = "0.01"
_GOAL_SHARE: Final = 0.01
_SCRAPE_SECONDS: Final = 15  # Prometheus asks so often, as in deploy/prometheus
_SPAN_TEXTS: Final = {
    "off": "not traced",
    "made": "made and put into the queue",
    "written": "the same, and written to a file by the thread",
    "encoded": "encoded for a collector, by the thread",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingSettings(BenchmarkSettings):
    """The options of `fourfold bench tracing`."""

    ratios: tuple[str, ...] = option("shares of the samples that are traced", default=(_DEFAULT_RATIO, "1"))
    samples: int = option("samples of one step, in groups of 8", default=2048, least=8)
    rounds: int = option("steps of each share and without traces, in turns", default=9, least=1)
    spans: int = option("spans of one round", default=4000, least=100, most=4096)
    step_samples: int = option("samples of the step with which the cost is compared", default=512, least=1)
    step_seconds: float = option("duration of that step", default=3.9, above=0)

    def check(self) -> None:
        if self.samples % 8:
            raise ConfigError(f"--samples {self.samples}: it must be a multiple of 8")


class TracingBenchmark(Benchmark[TracingSettings]):
    """Measures what traces and scrapes cost the coordinator."""

    name = "tracing"
    summary = "CPU time of traces, of the coordinator per sample and of each span, and of a scrape"
    settings = TracingSettings
    libraries = ("grpcio", "protobuf", "opentelemetry-sdk", "opentelemetry-exporter-otlp")

    def packages(self, settings: TracingSettings) -> Mapping[str, str]:
        return {"fourfold_coordinator": "fourfold-coordinator", "opentelemetry.sdk": "fourfold[tracing]"}

    def label(self, settings: TracingSettings) -> str:
        return "cpu"

    def measure(self, settings: TracingSettings, run: BenchmarkRun) -> dict[str, Any]:
        from fourfold_bench.tracing.measure import measure

        return measure(settings, run)

    def table(self, document: Mapping[str, Any]) -> list[str]:
        results, parameters = document["results"], document["parameters"]
        step = f"a step of {parameters['step_samples']} samples in {parameters['step_seconds']:g} s"
        lines = [f"CPU time of the coordinator's traces, per sample; 100 %: {step}"]
        for key, value in results["traces_us"].items():
            lines.append(f"sample_ratio = {key}: {value['median']:.2f} us, {_share(document, key):.4%}")
        run = results["coordinator_us"]
        added = ", ".join(f"{value['median']:+.0f} us at {key}" for key, value in run["added_per_sample"].items())
        lines.append(f"whole coordinator without traces: {run['per_sample'][OFF]['median']:.0f} us per sample; {added}")
        scrape = results["scrape_us"]["median"]
        share = scrape / 1e6 / _SCRAPE_SECONDS
        lines.append(f"scrape of its metrics: {scrape:,.0f} us; {share:.3%} of the time at one in {_SCRAPE_SECONDS} s")
        texts = ((_SPAN_TEXTS[name], value["median"]) for name, value in results["span_us"].items())
        return [*lines, *(f"span, {text}: {value:.1f} us" for text, value in texts)]

    def failures(self, document: Mapping[str, Any]) -> list[str]:
        if (
            _DEFAULT_RATIO not in document["results"]["traces_us"]
            or (share := _share(document, _DEFAULT_RATIO)) <= _GOAL_SHARE
        ):
            return []
        return [f"sample_ratio = {_DEFAULT_RATIO} takes {share:.2%} of a step; the goal is {_GOAL_SHARE:.0%}"]


def _share(document: Mapping[str, Any], key: str) -> float:
    """Return the share of a step's time that the traces of its samples take."""
    parameters = document["parameters"]
    taken = float(document["results"]["traces_us"][key]["median"])
    return taken * 1e-6 * float(parameters["step_samples"]) / float(parameters["step_seconds"])


BENCHMARK: Final = TracingBenchmark()
