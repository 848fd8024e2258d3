"""The page of the metrics endpoint: both formats, bounded labels, and sources that fail."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator

import prometheus_client
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics

from fourfold.host.timing import BUCKETS, Histogram
from fourfold.rpc.call_stats import CallStats
from fourfold.service import exporter as module
from fourfold.service.exporter import OPEN_METRICS, TEXT, Exported, Exporter, Reading, ReasonLabels
from tests.support.scrape import parse, value

TOKENS = Exported("test_tokens_total", "counter", "tokens")
STATES = Exported("test_states", "gauge", 'a "text"\nwith \\ signs', ("role", "state"))
SECONDS = Exported("test_seconds", "histogram", "durations", ("method",))


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Exporter:
    monkeypatch.setattr(module, "_PAGE_SECONDS", 0.0)
    return Exporter("reward", stats=CallStats(), ready=lambda: True)


def source() -> Iterator[Reading]:
    histogram = Histogram()
    histogram.add(0.002)
    histogram.add(1000.0)
    yield TOKENS, 12
    yield STATES, {("reward", "live"): 2, ("rollout", "silent"): 0}
    yield SECONDS, {"a.B/C": histogram}


async def test_both_formats_have_the_numbers_of_the_sources(exporter: Exporter) -> None:
    exporter.add(source)
    text = parse((await exporter.page(TEXT)).decode())
    page = (await exporter.page(OPEN_METRICS)).decode()
    assert page.endswith("# EOF\n")
    open_metrics = parse(page, parse_open_metrics)
    for families in (text, open_metrics):
        assert value(families, "test_tokens_total") == 12
        assert value(families, "test_states", role="reward", state="live") == 2
        assert value(families, "test_seconds_count", method="a.B/C") == 2
        assert value(families, "test_seconds_sum", method="a.B/C") == pytest.approx(1000.002)
        buckets = [s.value for s in families["test_seconds"].samples if s.name == "test_seconds_bucket"]
        assert buckets == [0, *[1] * (len(BUCKETS) - 1), 2], "each bucket counts those below it"
        assert families["process_resident_memory_bytes"].samples[0].value > 1 << 20
        assert value(families, "fourfold_ready") == 1


async def test_the_global_registry_is_not_touched(exporter: Exporter) -> None:
    before = prometheus_client.generate_latest()
    prometheus_client.Counter("test_of_vllm", "in the global registry").inc()
    exporter.add(source)
    page = await exporter.page(TEXT)
    assert b"test_of_vllm" not in page and b"test_tokens" in page
    assert b"test_tokens" not in prometheus_client.generate_latest() and b"test_tokens" not in before


async def test_a_source_that_fails_hides_no_other_and_is_logged_once(
    exporter: Exporter, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Iterator[Reading]:
        yield TOKENS, 1
        raise sqlite3.OperationalError("disk I/O error")

    async def refresh() -> None:
        raise OSError("no such process")

    exporter.add(broken)
    exporter.add(lambda: [(STATES, {("reward", "live"): 2})], refresh=refresh)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            families = parse((await exporter.page(TEXT)).decode())
    assert "test_tokens_total" not in families and value(families, "test_states", role="reward", state="live") == 2
    assert [record.exc_text is not None for record in caplog.records] == [True, True]


async def test_scrapes_in_quick_succession_get_one_page(exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    exporter.add(lambda: reads.append(1) or [])  # type: ignore[func-returns-value]
    monkeypatch.setattr(module, "_PAGE_SECONDS", 60.0)
    assert await exporter.page(TEXT) == await exporter.page(TEXT)
    await exporter.page(OPEN_METRICS)
    assert len(reads) == 2, "one for each format"


def test_reasons_of_peers_cannot_add_labels_without_limit() -> None:
    labels = ReasonLabels()
    assert labels.apply({"TIMEOUT": 2, "an id\n": 1, "": 1, "X" * 100: 1}) == {"TIMEOUT": 2, "OTHER": 3}
    many = labels.apply({f"REASON_{number}": 1.0 for number in range(1000)})
    assert len(many) == 32 and many["OTHER"] == 1000 - 31
    assert labels.apply({"NEW": 5, "TIMEOUT": 3}) == {"OTHER": 5, "TIMEOUT": 3}, "known ones stay"
