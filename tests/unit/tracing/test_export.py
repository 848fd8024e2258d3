"""What the exporters write and send, and what a collector that hangs or refuses costs: spans, and nothing else."""

from __future__ import annotations

import builtins
import logging
import math
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource

from fourfold.errors import ConfigError
from fourfold.install import install_command
from fourfold.tracing import export, spans
from fourfold.tracing.export import SpanQueue, TraceFile, Tracing
from fourfold.tracing.spans import Span, SpanContext
from tests.fakes.toy import make_config
from tests.support.otlp import (
    Receiver,
    grpc_receiver,
    hanging_receiver,
    http_receiver,
    parse_line,
    read_files,
    refused_address,
)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Export every span soon; at the end, make none."""
    monkeypatch.setattr(export, "_PERIOD_SECONDS", 0.05)
    yield
    spans.install(None)


def start(tmp_path: Path, **table: Any) -> Tracing:
    config = make_config(tmp_path, tracing=table)
    return export.start(config, role="reward", member_id="reward-0", run_dir=tmp_path)


def make_spans(count: int = 1) -> list[Span]:
    """Make spans with everything that a span may have, and end them."""
    made = []
    for index in range(count):
        attributes: dict[str, spans.Value] = {
            "text": '\u00e9"\n',
            "yes": True,
            "n": 1 << 60,
            "x": 1e-20,
            "list": ("a", "b"),
        }
        parent = SpanContext(f"{index + 1:032}", f"{2:016}")
        span = Span("a", parent, kind="server", attributes=attributes, links=(SpanContext(f"{5:032}", f"{6:016}"),))
        span.end({"y": -math.inf}, error="REASON" if index % 2 else None)
        made.append(span)
    return made


@pytest.mark.parametrize("receive", [http_receiver, grpc_receiver])
def test_a_collector_gets_every_span(tmp_path: Path, receive: Any) -> None:
    found: Receiver
    with receive() as found:
        tracing = start(tmp_path, endpoint=found.endpoint)
        made = make_spans(700)  # more than one batch
        until(lambda: len(found.spans) == 700, 30)
        make_spans(1)
        tracing.stop()
        assert len(found.spans) == 701
    first, second = found.spans[:2]
    assert (first.service, first.name, first.kind, first.error) == ("fourfold-reward", "a", 2, "")
    assert first.attributes == {
        "text": '\u00e9"\n',
        "yes": True,
        "n": 1 << 60,
        "x": 1e-20,
        "list": ["a", "b"],
        "y": -math.inf,
    }
    assert second.error == "REASON" and second.links == [(6).to_bytes(8)]
    assert first.span_id == bytes.fromhex(made[0].context.span_id) and first.parent == (2).to_bytes(8)
    assert first.trace_id == (1).to_bytes(16) and (first.start, first.end) == (made[0].start_time, made[0].end_time)
    resource = {a.key: a.value for a in found.requests[0].resource_spans[0].resource.attributes}
    assert resource["service.instance.id"].string_value == "reward-0" and resource["process.pid"].int_value > 0


def test_the_file_has_what_a_collector_gets(tmp_path: Path) -> None:
    made = make_spans(2)
    resource: dict[str, str | int] = {"service.name": "s", "process.pid": 7}
    assert TraceFile(tmp_path / "t.jsonl", {**resource}).export(made) == ""
    (line,) = (tmp_path / "t.jsonl").read_text().splitlines()
    sent = encode_spans([export.readable_span(span, Resource(resource)) for span in made])
    for span in sent.resource_spans[0].scope_spans[0].spans:
        span.flags = 0  # whether the parent is remote; optional, and not in the file
        for link in span.links:
            link.flags = 0
        if not span.status.code:
            span.ClearField("status")
    assert str(parse_line(line)) == str(sent)


def test_a_service_writes_a_file_in_the_folder_of_its_run(tmp_path: Path) -> None:
    for _ in range(2):  # a service that is started again continues the file
        tracing = start(tmp_path, file=True)
        make_spans(3)
        tracing.stop()
        make_spans(1)  # after the end
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["reward-0.jsonl"]
    assert len(read_files(tmp_path / "traces")) == 6


def test_a_line_that_a_killed_service_left_incomplete_is_removed(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "traces" / "t.jsonl", {"service.name": "s"})
    file.export(make_spans(1))
    whole = (tmp_path / "traces" / "t.jsonl").read_bytes()
    (tmp_path / "traces" / "t.jsonl").write_bytes(whole + whole[:100])
    file.export(make_spans(2))
    assert len(read_files(tmp_path / "traces")) == 3


def test_no_table_no_spans(tmp_path: Path) -> None:
    start(tmp_path).stop()
    assert not spans.enabled() and not (tmp_path / "traces").exists()


@pytest.mark.parametrize("scheme", ["http", "grpc"])
@pytest.mark.parametrize("hangs", [True, False])
def test_a_collector_that_hangs_or_refuses_costs_no_time(
    tmp_path: Path, scheme: str, hangs: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "FLUSH_SECONDS", 0.2)
    with hanging_receiver() as hanging:
        tracing = start(tmp_path, endpoint=f"{scheme}://{hanging if hangs else refused_address()}", file=True)
        make_spans(1500)
        began = time.monotonic()
        tracing.stop()
        assert time.monotonic() - began < 4  # a batch may take 5 s, and there are 3
    dropped = [record for record in caplog.records if "spans were dropped" in record.message]
    assert any(scheme in record.message for record in dropped)


class FailingTarget:
    """Fails while it is told to, and hangs when it is told to."""

    def __init__(self) -> None:
        self.failure, self.got, self.go_on = "", 0, Event()
        self.go_on.set()
        self.was_shut_down = False

    def export(self, batch: Sequence[Span]) -> str:
        if self.failure == "raise":
            raise ValueError("Cannot invoke RPC on closed channel!")
        self.go_on.wait(10)
        self.got += 0 if self.failure else len(batch)
        return self.failure

    def shutdown(self) -> None:
        self.was_shut_down = True
        self.go_on.set()


def until(condition: Any, seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_one_warning_until_it_works_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    target = FailingTarget()
    queue = SpanQueue("T", target)
    tracing = Tracing([queue])
    target.failure = "it is full"
    for _ in range(3):
        before = queue.dropped
        make_spans(1)
        until(lambda: queue.dropped > before)  # noqa: B023
    until(lambda: tracing.condition)
    assert tracing.condition == "spans are dropped: it is full"
    target.failure = "raise"
    make_spans(1)
    until(lambda: "closed channel" in tracing.condition)
    target.failure = ""
    make_spans(1)
    until(lambda: target.got == 1 and not tracing.condition)
    tracing.stop()
    assert [(r.levelname, r.message.split(":")[0]) for r in caplog.records] == [
        ("WARNING", "traces are lost until it works again"), ("INFO", "traces are exported again"),
        ("WARNING", "spans were dropped"),
    ]  # fmt: skip


def test_the_queue_is_bounded_and_the_end_has_a_deadline(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "FLUSH_SECONDS", 0.3)
    target = FailingTarget()
    target.go_on.clear()
    queue = SpanQueue("T", target)
    tracing = Tracing([queue])
    make_spans(10_000)
    assert 10_000 - 4096 - 512 <= queue.dropped <= 10_000 - 4096
    began = time.monotonic()
    tracing.stop()
    assert target.was_shut_down and 0.3 <= time.monotonic() - began < 2
    assert "spans were dropped: target=T" in caplog.text


@pytest.mark.parametrize("returns", [True, False])
def test_every_span_is_exported_or_counted_at_the_end(monkeypatch: pytest.MonkeyPatch, returns: bool) -> None:
    monkeypatch.setattr(export, "FLUSH_SECONDS", 0.1)
    target = FailingTarget()
    target.go_on.clear()
    if not returns:
        monkeypatch.setattr(target, "shutdown", lambda: None)
    queue = SpanQueue("T", target)
    tracing = Tracing([queue])
    make_spans(1000)
    tracing.stop()
    assert (queue.dropped, target.got) == ((1000 - target.got, target.got) if returns else (1000, 0))
    target.go_on.set()


def test_spans_that_were_taken_are_exported_when_others_take_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    class Emptied(deque[Span]):
        def popleft(self) -> Span:
            span = super().popleft()
            if len(self) == 2:
                self.clear()
            return span

    monkeypatch.setattr(export, "deque", Emptied)
    target = FailingTarget()
    tracing = Tracing([SpanQueue("T", target)])
    make_spans(5)
    tracing.stop()
    assert target.got == 3


def test_a_file_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "traces").write_text("in the way")
    tracing = start(tmp_path, file=True)
    make_spans(1)
    until(lambda: tracing.condition)
    assert "cannot be written" in tracing.condition
    tracing.stop()


def test_absent_packages_give_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=re.escape(install_command("fourfold[tracing]"))):
        start(tmp_path, endpoint="http://127.0.0.1:1")
    start(tmp_path, file=True).stop()  # needs no package
