"""Makes the page of the metrics endpoint: numbers of a service in the text formats of Prometheus and OpenMetrics.

    sources (plain numbers, read at the scrape) --> families --> prometheus_client --> text

The services count for themselves; nothing is counted a second time here. The page has a registry of its own, because
vLLM fills prometheus_client's global one. prometheus_client is imported at the first scrape.

Labels have few values by construction: methods of our servicers, names of enumerations, keys of `METRICS`. Reasons of
errors may come from a peer, and pass through `ReasonLabels`.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import platform
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import psutil

from fourfold.host.process_tree import descendants
from fourfold.host.timing import BUCKETS, Histogram
from fourfold.rpc.call_stats import OTHER, CallStats

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry

_log = logging.getLogger("fourfold.service.exporter")

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"

# Scrapes that follow each other faster get the same page, so that a busy scraper costs the service little.
_PAGE_SECONDS: Final = 1.0
_MAX_REASONS: Final = 32
_REASON: Final = re.compile(r"[A-Z][A-Z0-9_]{0,47}")


@dataclass(frozen=True, slots=True)
class Exported:
    """Name, type, labels and meaning of one family of the page; docs/monitoring.md lists all."""

    name: str  # with the suffix _total for a counter
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


Number: TypeAlias = float | Histogram
# One number, or one for each value of the label (a str) or of the labels (a tuple of str). A mapping is invariant in
# the type of its keys, so that this type cannot say both.
Values: TypeAlias = Number | Mapping[Any, Number]
Reading: TypeAlias = tuple[Exported, Values]
Source: TypeAlias = Callable[[], Iterable[Reading]]

_BUILD: Final = Exported(
    "fourfold_build_info", "gauge", "always 1; the labels describe the service", ("role", "version", "python")
)
_UPTIME: Final = Exported("fourfold_uptime_seconds", "gauge", "seconds since the service began to start")
_READY: Final = Exported("fourfold_ready", "gauge", "1 while the service is ready, else 0")
_CALLS: Final = Exported(
    "fourfold_calls_total", "counter", "calls that ended, with their gRPC status", ("method", "code")
)
_CALL_SECONDS: Final = Exported(
    "fourfold_call_seconds",
    "histogram",
    "duration of a call; streams named Watch last until the client leaves",
    ("method",),
)
_IN_FLIGHT: Final = Exported("fourfold_calls_in_flight", "gauge", "calls that have not ended", ("method",))
_REFUSED: Final = Exported(
    "fourfold_refused_calls_total", "counter", "calls refused for their caller or for a limit", ("reason",)
)
_CHILDREN: Final = Exported("fourfold_child_processes", "gauge", "running descendants: engine, ranks, workers")
_CHILDREN_CPU: Final = Exported(
    "fourfold_children_cpu_seconds", "gauge", "CPU time of the running descendants; falls when one ends"
)
_CHILDREN_MEMORY: Final = Exported(
    "fourfold_children_resident_memory_bytes", "gauge", "resident memory of the descendants; shared pages count in each"
)
COMMON: Final = (
    _BUILD, _UPTIME, _READY, _CALLS, _CALL_SECONDS, _IN_FLIGHT, _REFUSED, _CHILDREN, _CHILDREN_CPU, _CHILDREN_MEMORY,
)  # fmt: skip


class ReasonLabels:
    """Keeps the number of values of a label `reason` bounded: the first ones in UPPER_SNAKE_CASE; the rest is OTHER."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def apply(self, counts: Mapping[str, float]) -> dict[str, float]:
        """Return the counts under their labels."""
        found: dict[str, float] = {}
        for reason, count in counts.items():
            if reason not in self._known and len(self._known) < _MAX_REASONS and _REASON.fullmatch(reason):
                self._known.add(reason)
            label = reason if reason in self._known else OTHER
            found[label] = found.get(label, 0) + count
        return found


def one_of(present: str, names: Iterable[str]) -> dict[str, float]:
    """Return 1 for the present state and 0 for all others."""
    return {name: float(name == present) for name in names}


class Exporter:
    """The page of one service. Use it from one event loop."""

    def __init__(self, role: str, *, stats: CallStats, ready: Callable[[], bool]) -> None:
        self._role, self._stats, self._ready = role, stats, ready
        self._began = time.monotonic()
        self._sources: list[Source] = [self._read_common]
        self._failed: set[Callable[[], object]] = set()  # sources and refreshers whose failure is in the log
        self._refreshers: list[Callable[[], Awaitable[None]]] = [self._measure_children]
        self._children = ChildUsage()
        self._reasons = ReasonLabels()
        self._lock = asyncio.Lock()
        self._registry: CollectorRegistry | None = None
        self._pages: dict[str, bytes] = {}  # by content type
        self._made = 0.0

    def add(self, source: Source, *, refresh: Callable[[], Awaitable[None]] | None = None) -> None:
        """Add a source, which is called at each scrape; `refresh` is awaited before, for slow work."""
        self._sources.append(source)
        if refresh is not None:
            self._refreshers.append(refresh)

    async def page(self, content_type: str) -> bytes:
        """Return the page as `TEXT` or `OPEN_METRICS`."""
        async with self._lock:
            if time.monotonic() - self._made >= _PAGE_SECONDS or not self._pages:
                results = await asyncio.gather(*(refresh() for refresh in self._refreshers), return_exceptions=True)
                for refresh, result in zip(self._refreshers, results, strict=True):
                    if isinstance(result, Exception):
                        self._log_failure(refresh, result)
                self._pages.clear()
                self._made = time.monotonic()
            if content_type not in self._pages:
                self._pages[content_type] = self._encode(content_type)
            return self._pages[content_type]

    def collect(self) -> Iterator[Metric]:
        """Yield the families of all sources; the interface of a collector of prometheus_client."""
        for source in self._sources:
            try:
                readings = list(source())
            except Exception as error:  # one source must not hide the others
                self._log_failure(source, error)
                continue
            for exported, values in readings:
                yield _family(exported, values)

    def _log_failure(self, source: Callable[[], object], error: Exception) -> None:
        if source not in self._failed:
            self._failed.add(source)
            _log.error("a source of the metrics endpoint failed; its metrics are missing or old", exc_info=error)

    def _encode(self, content_type: str) -> bytes:
        from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
        from prometheus_client.openmetrics.exposition import generate_latest as generate_open_metrics

        if self._registry is None:
            self._registry = CollectorRegistry(auto_describe=False)
            ProcessCollector(registry=self._registry)
            self._registry.register(self)
        generate: Callable[..., bytes] = generate_open_metrics if content_type == OPEN_METRICS else generate_latest
        return generate(self._registry)

    async def _measure_children(self) -> None:
        self._children = await asyncio.to_thread(measure_children)

    def _read_common(self) -> Iterator[Reading]:
        version = importlib.metadata.version("fourfold")
        stats = self._stats
        yield _BUILD, {(self._role, version, platform.python_version()): 1}
        yield _UPTIME, time.monotonic() - self._began
        yield _READY, float(self._ready())
        yield _CALLS, stats.ended
        yield _CALL_SECONDS, stats.seconds
        yield _IN_FLIGHT, stats.in_flight
        yield _REFUSED, self._reasons.apply(stats.refused)
        yield _CHILDREN, self._children.count
        yield _CHILDREN_CPU, self._children.cpu_seconds
        yield _CHILDREN_MEMORY, self._children.resident_bytes


def _family(exported: Exported, values: Values) -> Metric:
    from prometheus_client import core

    rows = values if isinstance(values, Mapping) else {(): values}
    if exported.kind == "histogram":
        histogram = core.HistogramMetricFamily(exported.name, exported.help, labels=exported.labels)
        for labels, value in rows.items():
            assert isinstance(value, Histogram), exported.name
            histogram.add_metric(_labels(labels), list(_cumulative(value)), sum_value=value.sum)
        return histogram
    make = core.CounterMetricFamily if exported.kind == "counter" else core.GaugeMetricFamily
    family = make(exported.name.removesuffix("_total"), exported.help, labels=exported.labels)
    for labels, value in rows.items():
        assert not isinstance(value, Histogram), exported.name
        family.add_metric(_labels(labels), value)
    return family


def _labels(labels: str | tuple[str, ...]) -> tuple[str, ...]:
    return (labels,) if isinstance(labels, str) else labels


def _cumulative(histogram: Histogram) -> Iterator[tuple[str, float]]:
    total = 0
    for limit, count in zip((*map(str, BUCKETS), "+Inf"), histogram.counts, strict=True):
        total += count
        yield limit, total


@dataclass(frozen=True, slots=True)
class ChildUsage:
    """CPU time and memory of the running descendants of a process."""

    count: int = 0
    cpu_seconds: float = 0.0
    resident_bytes: int = 0  # a page that several processes share counts in each


def measure_children() -> ChildUsage:
    """Return the usage of the descendants of this process. Reads /proc for every process of the machine."""
    count, seconds, resident = 0, 0.0, 0
    for pid in descendants({os.getpid()}):
        try:
            process = psutil.Process(pid)
            times, memory = process.cpu_times(), process.memory_info()
        except psutil.Error:  # the process has ended, or belongs to another user
            continue
        count, seconds, resident = count + 1, seconds + times.user + times.system, resident + memory.rss
    return ChildUsage(count, seconds, resident)
