"""Carries spans with calls, in gRPC metadata.

    traceparent:           00-TRACE-SPAN-01                         W3C Trace Context; services in any language read it
    fourfold-traceparents: 0:00-TRACE-SPAN-01 3:00-TRACE-SPAN-01    of a call for several samples: INDEX:TRACEPARENT

A call for several samples is in the trace of each. `traceparent` has the first one that is traced. The other key has
all of them with their index in the call; it is left out if sample 0 alone is traced. A server makes a span in each of
these traces.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Final

from fourfold.tracing.spans import NONE, Attributes, Span, SpanContext, Spans, current, enabled

TRACEPARENT: Final = "traceparent"
TRACEPARENTS: Final = "fourfold-traceparents"
# gRPC refuses metadata of more than 8 KiB; an entry has at most 62 bytes.
MAX_TRACES: Final = 64

# Of later versions than 00, W3C Trace Context has everything up to the flags read as of version 00.
_TRACEPARENT: Final = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
_INDEX: Final = re.compile("[0-9]{1,4}")
_SAMPLED: Final = 1

Metadata = Iterable[tuple[str, str | bytes]]  # of gRPC


def format_traceparent(context: SpanContext) -> str:
    """Return the `traceparent` of a span that is recorded."""
    return f"00-{context.trace_id}-{context.span_id}-01"


def parse_traceparent(text: str) -> SpanContext | None:
    """Return the span that a `traceparent` names; None if it is malformed, or if its sender does not record it."""
    match = _TRACEPARENT.fullmatch(text)
    if match is None or (match[1] == "00" and match[5]) or not int(match[4], 16) & _SAMPLED:
        return None
    return SpanContext(match[2], match[3])


def outgoing() -> tuple[tuple[str, str], ...] | None:
    """Return the metadata of a call that begins now, for the current spans; None without any.

    In a program that uses OpenTelemetry itself, such as an agent, they are its own current span.
    """
    running = current().running()
    if not running:
        own = _own_traceparent()
        return ((TRACEPARENT, own),) if own else None
    texts = {index: format_traceparent(span.context) for index, span in list(running.items())[:MAX_TRACES]}
    metadata = [(TRACEPARENT, next(iter(texts.values())))]
    if list(texts) != [0]:
        metadata.append((TRACEPARENTS, " ".join(f"{index}:{text}" for index, text in texts.items())))
    return tuple(metadata)


def incoming(metadata: Metadata | None, name: str, attributes: Attributes) -> Spans:
    """Begin the server's spans of a call, in the traces that its metadata name."""
    if not enabled() or not metadata:
        return NONE
    found = {key: value for key, value in metadata if key in (TRACEPARENT, TRACEPARENTS) and isinstance(value, str)}
    if not found:
        return NONE
    parents = _parse_list(found.get(TRACEPARENTS, "")) or _parse_list(f"0:{found.get(TRACEPARENT, '')}")
    return Spans({i: Span(name, parent, kind="server", attributes=attributes) for i, parent in parents.items()})


def _parse_list(text: str) -> dict[int, SpanContext]:
    """Return the spans of a list by index, without malformed entries."""
    parents = {}
    for entry in text.split(" ")[:MAX_TRACES]:
        index, _, traceparent = entry.partition(":")
        parent = parse_traceparent(traceparent)
        if parent is not None and _INDEX.fullmatch(index):
            parents[int(index)] = parent
    return parents


def _own_traceparent() -> str:
    """Return the `traceparent` of OpenTelemetry's current span; empty if the program has none."""
    trace = sys.modules.get("opentelemetry.trace")  # a program that has a span has imported it
    if trace is None:
        return ""
    context = trace.get_current_span().get_span_context()
    if not (context.is_valid and context.trace_flags.sampled):
        return ""
    return format_traceparent(SpanContext(f"{context.trace_id:032x}", f"{context.span_id:016x}"))
