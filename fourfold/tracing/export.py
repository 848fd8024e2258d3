"""Writes ended spans to a file and sends them to an OpenTelemetry collector (OTLP), without a wait for either.

    Span.end --> queue of at most 4,096 spans --> thread --> runs/NAME/traces/MEMBER.jsonl
             '-> queue of at most 4,096 spans --> thread --> http(s)://COLLECTOR/v1/traces, or gRPC

A span that finds its queue full is dropped and counted. So a collector that hangs, refuses or dies costs spans only.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from json.encoder import encode_basestring_ascii as _quote
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold.host.disk import append_lines
from fourfold.install import install_command
from fourfold.tracing import spans
from fourfold.tracing.spans import Attributes, Span, Value

log = logging.getLogger("fourfold.tracing")

FOLDER: Final = "traces"  # of a run
FLUSH_SECONDS: Final = 1.0  # in which the spans of a service that ends must be written and sent
_QUEUE_SPANS: Final = 4096
_BATCH_SPANS: Final = 512
_PERIOD_SECONDS: Final = 1.0  # between two batches, unless one is full
_COLLECTOR_SECONDS: Final = 5.0  # of one batch, with the exporter's own retries
_LEAVE_SECONDS: Final = 0.2  # in which a thread ends whose exporter is shut down
_KINDS: Final = {"internal": 1, "server": 2, "client": 3}  # of opentelemetry.proto.trace.v1.Span.SpanKind
_NON_FINITE: Final = {"nan": '"NaN"', "inf": '"Infinity"', "-inf": '"-Infinity"'}  # JSON has no such numbers
_ERROR: Final = 2  # of opentelemetry.proto.trace.v1.Status.StatusCode
_SCOPE: Final = "fourfold"


class Target(Protocol):
    """Exports spans to one destination. One thread uses it, except for `shutdown`."""

    def export(self, batch: Sequence[Span]) -> str:
        """Write or send spans; return why that failed, or an empty text."""

    def shutdown(self) -> None:
        """End a running `export` soon."""


class SpanQueue:
    """Passes spans to a target from a thread of its own."""

    def __init__(self, name: str, target: Target) -> None:
        """Start the thread; `name` is that of the target in messages."""
        self.dropped = 0  # spans
        self.failure = ""  # why the target got no spans the last time
        self._name, self._target = name, target
        self._queue, self._exporting = deque[Span](), 0  # spans that wait, and number of those that `export` has now
        self._lock = threading.Lock()  # of `dropped`
        self._wake, self._closing = threading.Event(), False
        # A daemon thread, so that the exit of the interpreter does not wait for it.
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def add(self, span: Span) -> None:
        """Put a span into the queue, or count it as dropped. Thread-safe; never waits."""
        if len(self._queue) >= _QUEUE_SPANS or self._closing:
            self._drop(1)
            return
        self._queue.append(span)
        if len(self._queue) == _BATCH_SPANS:
            self._wake.set()

    def close(self, *, seconds: float) -> None:
        """Export the waiting spans for at most `seconds`; drop the rest."""
        self._closing = True
        self._wake.set()
        self._thread.join(seconds)
        if self._thread.is_alive():
            while batch := self._take():
                self._drop(len(batch))
            self._target.shutdown()
            self._thread.join(_LEAVE_SECONDS)
            self._drop(self._exporting)  # 0 if the thread has ended
        if self.dropped:
            log.warning("spans were dropped: target=%s spans=%d", self._name, self.dropped)

    def _run(self) -> None:
        closing = False
        while not closing:
            self._wake.wait(_PERIOD_SECONDS)
            self._wake.clear()
            closing = self._closing  # before the queue is emptied: `add` puts nothing into it afterwards
            while batch := self._take():
                self._exporting = len(batch)
                try:
                    failure = self._target.export(batch)
                except Exception as error:  # of a library; such as that of a gRPC channel that `shutdown` closes
                    failure = repr(error)
                self._exporting = 0
                if failure:
                    self._drop(len(batch))
                self._note(failure)

    def _take(self) -> list[Span]:
        """Remove and return the oldest spans, at most a batch of them."""
        batch: list[Span] = []
        with suppress(IndexError):  # `close` may take the last ones at the same time
            while len(batch) < _BATCH_SPANS:
                batch.append(self._queue.popleft())
        return batch

    def _drop(self, count: int) -> None:
        with self._lock:
            self.dropped += count

    def _note(self, failure: str) -> None:
        if failure and not self.failure:
            log.warning("traces are lost until it works again: target=%s: %s", self._name, failure)
        elif self.failure and not failure:
            log.info("traces are exported again: target=%s", self._name)
        self.failure = failure


class Tracing:
    """Exports the spans of this process to the targets of a recipe."""

    def __init__(self, queues: Sequence[SpanQueue]) -> None:
        self._queues = queues
        if queues:
            spans.install(self._add)

    @property
    def condition(self) -> str:
        """Return the problem of the export, for users; empty if there is none."""
        return "; ".join(f"spans are dropped: {queue.failure}" for queue in self._queues if queue.failure)

    def _add(self, span: Span) -> None:
        for queue in self._queues:
            queue.add(span)

    def stop(self) -> None:
        """Make no more spans; export the waiting ones for at most `FLUSH_SECONDS`."""
        if self._queues:
            spans.install(None)
            end = time.monotonic() + FLUSH_SECONDS
            for queue in self._queues:
                queue.close(seconds=max(end - time.monotonic(), 0.0))
            self._queues = ()


def start(config: Config, *, role: str, member_id: str, run_dir: Path | None) -> Tracing:
    """Trace this process as `[tracing]` says.

    Raises ConfigError if the packages for `tracing.endpoint` are missing.
    """
    table, queues = config.tracing, list[SpanQueue]()
    resource: dict[str, Value] = {
        "service.name": f"fourfold-{role}",
        "service.namespace": config.name,
        "service.instance.id": member_id,
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
    }
    if table.file and run_dir is not None:  # a service that is started by hand may have no folder
        path = run_dir / FOLDER / f"{member_id}.jsonl"
        queues.append(SpanQueue(str(path), TraceFile(path, resource)))
    if table.endpoint:  # closed last, with the time that the file leaves of `FLUSH_SECONDS`
        queues.append(SpanQueue(table.endpoint, Collector(table.endpoint, resource)))
    return Tracing(queues)


class TraceFile:
    """A file of OTLP JSON lines, which the collector's `otlpjsonfile` receiver and Jaeger read."""

    def __init__(self, path: Path, resource: dict[str, Value]) -> None:
        self._path = path
        self._begin = (
            f'{{"resourceSpans":[{{"resource":{{"attributes":{_json_attributes(resource)}}},'
            f'"scopeSpans":[{{"scope":{{"name":"{_SCOPE}"}},"spans":['
        )

    def export(self, batch: Sequence[Span]) -> str:
        line = f"{self._begin}{','.join(map(_json_span, batch))}]}}]}}]}}\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            append_lines(self._path, line.encode())
        except OSError as error:
            return f"{self._path} cannot be written ({error.strerror or error}); make room there"
        return ""

    def shutdown(self) -> None:
        pass


class Collector:
    """An OTLP receiver: a collector, Jaeger or Tempo. The exporters are those of OpenTelemetry's SDK."""

    def __init__(self, endpoint: str, resource: dict[str, Value]) -> None:
        try:
            from opentelemetry.sdk.resources import Resource

            self._exporter = _make_exporter(endpoint)
        except ImportError as error:
            raise ConfigError(
                f"tracing.endpoint = {endpoint!r} needs the package {error.name}, which is not installed here; install "
                f"it with: {install_command('fourfold[tracing]')}, or write traces to a file (tracing.file = true)"
            ) from None
        self._endpoint, self._resource = endpoint, Resource(resource)
        self._messages = _LastMessage()

    def export(self, batch: Sequence[Span]) -> str:
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._messages.text = "no answer"
        if self._exporter.export([readable_span(s, self._resource) for s in batch]) is SpanExportResult.SUCCESS:
            return ""
        return f"{self._endpoint} takes no spans (tracing.endpoint): {self._messages.text}"

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _LastMessage(logging.Handler):
    """Keeps the exporters' last message from the log: they log each try, and `SpanQueue` the first failure alone."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        logger = logging.getLogger("opentelemetry.exporter")
        logger.handlers, logger.propagate = [self], False

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()[:300]


def _make_exporter(endpoint: str) -> Any:
    """Return OpenTelemetry's exporter for an endpoint that the recipe has checked; raise ImportError."""
    url = urlsplit(endpoint)
    if url.scheme in ("grpc", "grpcs"):
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=url.netloc, insecure=url.scheme == "grpc", timeout=_COLLECTOR_SECONDS)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    path = url.path.rstrip("/") or "/v1/traces"
    return HttpExporter(endpoint=f"{url.scheme}://{url.netloc}{path}", timeout=_COLLECTOR_SECONDS)


def readable_span(span: Span, resource: Any) -> Any:
    """Return a span as an object of OpenTelemetry's SDK."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    def context(found: spans.SpanContext, *, is_remote: bool) -> trace.SpanContext:
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        return trace.SpanContext(int(found.trace_id, 16), int(found.span_id, 16), is_remote, flags)

    failed = trace.Status(trace.StatusCode.ERROR, span.error)
    return ReadableSpan(
        span.name,
        context=context(span.context, is_remote=False),
        parent=context(span.parent, is_remote=span.kind == "server") if span.parent else None,
        resource=resource,
        attributes=span.attributes,
        links=[trace.Link(context(link, is_remote=False)) for link in span.links],
        kind=trace.SpanKind[span.kind.upper()],
        status=trace.Status(trace.StatusCode.UNSET) if span.error is None else failed,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=InstrumentationScope(_SCOPE),
    )


def _json_span(span: Span) -> str:
    """Return a span in the JSON of OTLP: 64-bit integers as texts.

    It is put together as text: a dict of it, for `json.dumps`, takes three times as long.
    """
    trace_id, span_id = span.context
    parent = f',"parentSpanId":"{span.parent.span_id}"' if span.parent is not None else ""
    links = f',"links":[{",".join(map(_json_link, span.links))}]' if span.links else ""
    status = f',"status":{{"code":{_ERROR},"message":{_quote(span.error)}}}' if span.error is not None else ""
    return (
        f'{{"traceId":"{trace_id}","spanId":"{span_id}"{parent},"name":{_quote(span.name)},'
        f'"kind":{_KINDS[span.kind]},"startTimeUnixNano":"{span.start_time}","endTimeUnixNano":"{span.end_time}",'
        f'"attributes":{_json_attributes(span.attributes)}{links}{status}}}'
    )


def _json_link(link: spans.SpanContext) -> str:
    return f'{{"traceId":"{link.trace_id}","spanId":"{link.span_id}"}}'


def _json_attributes(attributes: Attributes) -> str:
    found = [f'{{"key":{_quote(key)},"value":{_json_value(value)}}}' for key, value in attributes.items()]
    return f"[{','.join(found)}]"


def _json_value(value: Value) -> str:
    match value:
        case str():
            return f'{{"stringValue":{_quote(value)}}}'
        case bool():
            return f'{{"boolValue":{"true" if value else "false"}}}'
        case int():
            return f'{{"intValue":"{value}"}}'
        case float():
            return f'{{"doubleValue":{value if math.isfinite(value) else _NON_FINITE[str(value)]}}}'
        case tuple():
            return f'{{"arrayValue":{{"values":[{",".join(map(_json_value, value))}]}}}}'
