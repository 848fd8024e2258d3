"""Receivers of OTLP as a collector, Jaeger or Tempo has them, and the spans that they and the files of a run have."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSpan:
    service: str
    name: str
    kind: int
    trace_id: bytes
    span_id: bytes
    parent: bytes  # empty for a root
    start: int
    end: int
    error: str
    attributes: dict[str, Any]
    links: list[bytes]  # span ids


class Receiver:
    """What arrived."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.requests: list[ExportTraceServiceRequest] = []

    @property
    def spans(self) -> list[FoundSpan]:
        return flatten(self.requests)


def flatten(requests: Iterable[ExportTraceServiceRequest]) -> list[FoundSpan]:
    return [
        FoundSpan(
            service=str(_attributes(resource.resource.attributes)["service.name"]),
            name=span.name,
            kind=span.kind,
            trace_id=span.trace_id,
            span_id=span.span_id,
            parent=span.parent_span_id,
            start=span.start_time_unix_nano,
            end=span.end_time_unix_nano,
            error=span.status.message,
            attributes=_attributes(span.attributes),
            links=[link.span_id for link in span.links],
        )
        for request in requests
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _attributes(found: Iterable[KeyValue]) -> dict[str, Any]:
    return {entry.key: _value(entry.value) for entry in found}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    assert kind is not None
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def parse_line(line: str) -> ExportTraceServiceRequest:
    """Parse OTLP JSON: JSON of proto3, but for ids, which are hexadecimal there. Unknown fields are errors."""

    def with_base64(value: Any, key: str = "") -> Any:
        match value:
            case dict():
                return {name: with_base64(item, name) for name, item in value.items()}
            case list():
                return [with_base64(item, key) for item in value]
            case str() if key in ("traceId", "spanId", "parentSpanId"):
                return base64.b64encode(bytes.fromhex(value)).decode()
        return value

    return json_format.ParseDict(with_base64(json.loads(line)), ExportTraceServiceRequest())


def read_files(folder: Path) -> list[FoundSpan]:
    """Return the spans of all services of a run."""
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return flatten(map(parse_line, lines))


def check_trace(spans: Iterable[FoundSpan]) -> FoundSpan:
    """Check that spans of one trace are a tree, and that children lie within their parents; return the root."""
    by_id = {span.span_id: span for span in spans}
    (root,) = (span for span in by_id.values() if not span.parent)
    assert {span.trace_id for span in by_id.values()} == {root.trace_id}
    for span in by_id.values():
        assert span.start <= span.end, span
        if span is not root:
            parent = by_id[span.parent]  # KeyError: an orphan
            assert parent.start <= span.start and span.end <= parent.end, (parent, span)
    return root


@contextmanager
def http_receiver() -> Iterator[Receiver]:
    """Receive OTLP over HTTP with protobuf."""
    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.requests.append(ExportTraceServiceRequest.FromString(body))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join(5)


@contextmanager
def grpc_receiver() -> Iterator[Receiver]:
    """Receive OTLP over gRPC."""
    found = Receiver()

    class Servicer(TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
            found.requests.append(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(Servicer(), server)  # type: ignore[no-untyped-call]
    found.endpoint = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield found
    finally:
        server.stop(0).wait(5)


@contextmanager
def hanging_receiver() -> Iterator[str]:
    """Accept connections, and never answer; yield the address, host:port."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:  # the kernel accepts
        yield f"127.0.0.1:{server.getsockname()[1]}"


def refused_address() -> str:
    """Return the address, host:port, of a port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"
