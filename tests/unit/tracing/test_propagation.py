"""How a trace goes from process to process: W3C Trace Context, with one trace for each sample of a call."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from fourfold.tracing import spans
from fourfold.tracing.propagation import (
    MAX_TRACES,
    TRACEPARENT,
    TRACEPARENTS,
    format_traceparent,
    incoming,
    outgoing,
    parse_traceparent,
)
from fourfold.tracing.spans import Span, SpanContext, Spans, part_of_work

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"  # the example of W3C Trace Context
CONTEXT = SpanContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")


def test_a_traceparent_is_read_and_written() -> None:
    assert parse_traceparent(GIVEN) == CONTEXT
    assert format_traceparent(CONTEXT) == GIVEN


def test_opentelemetry_reads_it_too() -> None:
    found = TraceContextTextMapPropagator().extract({TRACEPARENT: format_traceparent(CONTEXT)})
    context = trace.get_current_span(found).get_span_context()
    assert (hex(context.trace_id), hex(context.span_id)) == ("0xaf7651916cd43dd8448eb211c80319c", "0xb7ad6b7169203331")
    assert context.trace_flags.sampled


def test_a_later_version_may_have_more() -> None:
    assert parse_traceparent(f"cc{GIVEN[2:]}-what-comes-later") == CONTEXT


@pytest.mark.parametrize(
    "text",
    [
        "", GIVEN[:-1], f"{GIVEN}-x", f"{GIVEN}x", f"ff{GIVEN[2:]}", GIVEN.upper(), f" {GIVEN}", f"{GIVEN}\n",
        GIVEN.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32), GIVEN.replace("b7ad6b7169203331", "0" * 16),
        GIVEN.replace("-01", "-00"), GIVEN.replace("-01", "-02"),  # its sender does not record it
    ],
)  # fmt: skip
def test_another_text_names_no_span(text: str) -> None:
    assert parse_traceparent(text) is None


def test_a_call_for_one_sample_has_a_traceparent_alone(ended: list[Span]) -> None:
    span = Span("a", CONTEXT)
    with Spans({0: span}):
        assert outgoing() == ((TRACEPARENT, format_traceparent(span.context)),)
    assert outgoing() is None


def test_a_call_for_several_samples_names_each_with_its_index(ended: list[Span]) -> None:
    traced = {3: Span("a", None), 7: Span("b", None)}
    with Spans(traced):
        metadata = outgoing()
        assert metadata is not None and dict(metadata)[TRACEPARENT] == format_traceparent(traced[3].context)
        server = incoming(metadata, "S/M", {}).running()
    assert {index: span.parent for index, span in server.items()} == {i: s.context for i, s in traced.items()}


def test_the_only_sample_that_is_traced_keeps_its_index(ended: list[Span]) -> None:
    with Spans({5: Span("a", None)}):
        assert list(incoming(outgoing(), "S/M", {}).running()) == [5]


def test_a_sample_that_has_ended_is_not_named(ended: list[Span]) -> None:
    with Spans({0: Span("a", None), 1: Span("b", None)}) as work:
        work.end(0)
        assert list(incoming(outgoing(), "S/M", {}).running()) == [1]
        work.end(1)
        assert outgoing() is None


def test_a_call_for_some_of_the_samples_is_in_their_traces(ended: list[Span]) -> None:
    traced = {index: Span("a", None) for index in (1, 4, 6)}
    parts = []
    with Spans(traced):
        for samples in (range(2, 5), range(5, 7), range(2, 4)):
            with part_of_work(samples):
                parts.append(incoming(outgoing(), "S/M", {}).running())
        assert not ended
    found = [{index: span.parent for index, span in part.items()} for part in parts]
    assert found == [{2: traced[4].context}, {1: traced[6].context}, {}]


def test_the_metadata_of_a_large_group_fits_a_call(ended: list[Span]) -> None:
    with Spans({index: Span("a", None) for index in range(256)}):
        metadata = outgoing()
        assert metadata is not None and sum(len(key) + len(value) for key, value in metadata) < 4200
        assert len(incoming(metadata, "S/M", {}).running()) == MAX_TRACES


def test_the_span_of_a_server_continues_a_foreign_trace(ended: list[Span]) -> None:
    with incoming((("user-agent", "x"), (TRACEPARENT, GIVEN)), "p.Service/Method", {"a": 1}) as work:
        (span,) = work.running().values()
        assert (span.parent, span.context.trace_id, span.kind) == (CONTEXT, CONTEXT.trace_id, "server")
        assert (span.name, span.attributes) == ("p.Service/Method", {"a": 1})
        assert dict(outgoing() or ())[TRACEPARENT] == format_traceparent(span.context)
    assert ended == [span]


@pytest.mark.parametrize(
    "value", ["", "x", "0", ":", "-1:", f"a:{GIVEN}", f"12345:{GIVEN}", f"1:{GIVEN}x", "\u0663:" + GIVEN, "0:" * 9000]
)
def test_a_malformed_list_falls_back_to_the_traceparent(ended: list[Span], value: str) -> None:
    metadata = ((TRACEPARENT, GIVEN), (TRACEPARENTS, value))
    assert [span.parent for span in incoming(metadata, "S/M", {}).running().values()] == [CONTEXT]


def test_nothing_is_made_for_a_trace_that_is_not_recorded_or_broken(ended: list[Span]) -> None:
    for metadata in (None, (), ((TRACEPARENT, GIVEN.replace("-01", "-00")),), ((TRACEPARENT, b"x"),)):
        assert not incoming(metadata, "S/M", {})


def test_nothing_is_made_while_tracing_is_off() -> None:
    assert incoming(((TRACEPARENT, GIVEN),), "S/M", {}) is spans.NONE
    assert outgoing() is None and spans.NONE.child("x") is spans.NONE


def test_an_agent_that_uses_opentelemetry_passes_its_own_span_on() -> None:
    tracer = TracerProvider().get_tracer("agent")
    with tracer.start_as_current_span("turn") as span:
        own: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(own)
        metadata = dict(outgoing() or ())
        assert metadata == {TRACEPARENT: f"{own[TRACEPARENT][:-2]}01"}  # its flags have another bit, too
        assert f"{span.get_span_context().span_id:016x}" in metadata[TRACEPARENT]
    assert outgoing() is None
