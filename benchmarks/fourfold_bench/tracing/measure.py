"""Runs the coordinator with simulated engines and traces; measures the CPU time of single spans and of scrapes."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource

from fourfold import metrics as m
from fourfold.rpc.call_stats import CallStats
from fourfold.service.exporter import TEXT, Exporter
from fourfold.tracing import spans
from fourfold.tracing.export import SpanQueue, TraceFile, Tracing, readable_span
from fourfold.tracing.propagation import outgoing
from fourfold.tracing.spans import Span
from fourfold.trainer.v1.trainer_service_pb2 import TrainStepResponse
from fourfold_bench.engines.benchmark import EngineSettings
from fourfold_bench.engines.measure import Scene
from fourfold_bench.harness import BenchmarkRun
from fourfold_bench.tracing.benchmark import OFF, TracingSettings
from fourfold_coordinator.reporting.exported import RunSource
from fourfold_coordinator.state.faults import FaultLog
from fourfold_coordinator.state.ledger import SampleState
from fourfold_coordinator.state.run_board import RunBoard
from fourfold_coordinator.state.sample_traces import GENERATE, SCORE, TRAIN_STEP, SampleTraces, step_attributes

_ENGINES: Final = 10
_TOKENS: Final = 64
_NAME: Final = "fourfold.rollout.v1.RolloutService/Generate"
_ATTRIBUTES: Final = {"rpc.system.name": "grpc", "rpc.method": _NAME, "fourfold.member": "rollout-0"}
_TRACED_SAMPLES: Final = 320
_MOST_SAMPLES: Final = 32_000
_PAGES: Final = 10  # of one round
_GROUP: Final = 8
_ANSWER: Final = TrainStepResponse(step=1, policy_version=1, metrics=dict.fromkeys((m.POLICY_LOSS, m.GRAD_NORM), 0.5))
_RESOURCE: Final[dict[str, spans.Value]] = {"service.name": "benchmark"}


def measure(settings: TracingSettings, run: BenchmarkRun) -> dict[str, Any]:
    """Return the results of `fourfold bench tracing`."""
    return {
        "traces_us": _traces_us(settings, run.folder),
        "span_us": _span_us(settings, run.folder),
        "scrape_us": _scrape_us(settings, run.folder / "ledger.sqlite"),
        "coordinator_us": _coordinator_us(settings, run.folder / "run"),
    }


def _traces_us(settings: TracingSettings, folder: Path) -> dict[str, Any]:
    """Return the CPU time of the traces of a sample, from its issue to the file, in us per sample of all samples."""
    taken: dict[str, list[float]] = {key: [] for key in (OFF, *settings.ratios)}
    for number in range(settings.rounds):
        for key, values in taken.items():
            ratio = 0.0 if key == OFF else float(key)
            queues = [SpanQueue("file", TraceFile(folder / f"traces-{key}-{number}.jsonl", _RESOURCE))] if ratio else []
            tracing, traces = Tracing(queues), SampleTraces(ratio=ratio)
            # All spans fit into the queue.
            count = min(int(_TRACED_SAMPLES / ratio), _MOST_SAMPLES) if ratio else _MOST_SAMPLES
            began = time.process_time()
            for first in range(0, count, _GROUP):
                _live(traces, tuple(f"p{number}{first:06d}-0-{index}" for index in range(_GROUP)))
            tracing.stop()
            values.append(1e6 * (time.process_time() - began) / count)
    return {key: _summary(values) for key, values in taken.items()}


def _live(traces: SampleTraces, names: tuple[str, ...]) -> None:
    """Do to the traces of a group what a run does."""
    traces.issue(names)
    traces.move(names, SampleState.RUNNING, "")
    for method, after in ((GENERATE, SampleState.ROLLED), (SCORE, SampleState.READY)):
        with traces.call(method, names, "member-0") as work:
            outgoing()
            for index in range(len(names)):
                work.end(index, {"gen_ai.evaluation.score.value": 0.5})
        traces.move(names, after, "")
    traces.move(names, SampleState.LEASED, "")
    with traces.call(TRAIN_STEP, names, "trainer-0") as work:
        outgoing()
        if work:
            work.set(step_attributes(_ANSWER))
    traces.trained(names, _ANSWER)


def _coordinator_us(settings: TracingSettings, folder: Path) -> dict[str, Any]:
    """Return the CPU time of the coordinator process, with its thread that writes spans, in us per sample."""
    keys = (OFF, *settings.ratios)
    bench = EngineSettings(samples=settings.samples)
    tables = {"tracing": {"file": True, "sample_ratio": 1.0}}
    scene = Scene(folder, bench, engines=_ENGINES, tokens=_TOKENS, samples=settings.samples, tables=tables)
    names = tuple(f"rollout-{index}" for index in range(_ENGINES))
    plan = scene.plan(names, tokens=_TOKENS, capacity=bench.capacity // _ENGINES)
    ratios = ",".join("0" if key == OFF else key for key in keys)
    steps = (settings.rounds + 1) * len(keys)  # the first round is the warm-up
    measured, _ = scene.run([plan], steps=steps, coordinator=("fourfold_bench.tracing.coordinator", ratios))
    cpu = [1e6 * step["cpu"] / settings.samples for step in measured["steps"]]
    taken = {key: cpu[len(keys) + index :: len(keys)] for index, key in enumerate(keys)}
    # Paired: the machine is as busy in the steps of one round.
    added = {key: [one - off for one, off in zip(taken[key], taken[OFF], strict=True)] for key in settings.ratios}
    return {
        "per_sample": {key: _summary(values) for key, values in taken.items()},
        "added_per_sample": {key: _summary(values) for key, values in added.items()},
    }


def _span_us(settings: TracingSettings, folder: Path) -> dict[str, Any]:
    """Return the CPU time per span: while there are none, to make one, with its line in a file, and for a collector."""
    found: dict[str, list[float]] = {name: [] for name in ("off", "made", "written", "encoded")}
    for number in range(settings.rounds):
        found["off"].append(_time_per_span(settings.spans, lambda: spans.current().child(_NAME).end_all()))
        tracing = Tracing([SpanQueue("file", TraceFile(folder / f"spans-{number}.jsonl", _RESOURCE))])
        made: list[Span] = []
        began = time.process_time()
        found["made"].append(_time_per_span(settings.spans, lambda: made.append(_make())))  # noqa: B023
        tracing.stop()
        found["written"].append(1e6 * (time.process_time() - began) / settings.spans)
        found["encoded"].append(_encode_us(made))
    return {name: _summary(values) for name, values in found.items()}


def _scrape_us(settings: TracingSettings, ledger: Path) -> dict[str, Any]:
    """Return the CPU time of a page of the coordinator's metrics endpoint, with every metric of a step."""
    board, taken = RunBoard(name="benchmark", step_count=10), list[float]()
    board.status.steps.add(step=1).metrics.update(dict.fromkeys(m.METRICS, 0.5))
    source = RunSource(board, FaultLog(), ledger)
    for number in range(1 + settings.rounds * _PAGES):
        exporter = Exporter("coordinator", stats=CallStats(), ready=lambda: True)  # one keeps its page for a second
        exporter.add(source.read, refresh=source.refresh)
        began = time.process_time()
        asyncio.run(exporter.page(TEXT))
        if number:  # the first page imports prometheus_client
            taken.append(1e6 * (time.process_time() - began))
    return _summary([statistics.fmean(taken[i : i + _PAGES]) for i in range(0, len(taken), _PAGES)])


def _make() -> Span:
    span = Span(_NAME, None, kind="client", attributes=_ATTRIBUTES)
    span.end()
    return span


def _time_per_span(count: int, work: Any) -> float:
    began = time.thread_time()
    for _ in range(count):
        work()
    return 1e6 * (time.thread_time() - began) / count


def _encode_us(made: Sequence[Span]) -> float:
    resource = Resource(_RESOURCE)
    began = time.thread_time()
    encode_spans([readable_span(span, resource) for span in made]).SerializeToString()
    return 1e6 * (time.thread_time() - began) / len(made)


def _summary(values: Sequence[float]) -> dict[str, Any]:
    return {"median": round(statistics.median(values), 2), "runs": [round(value, 2) for value in values]}
