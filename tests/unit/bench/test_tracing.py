"""Tests the table and the goal of `fourfold bench tracing`."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from fourfold.errors import ConfigError
from fourfold_bench import harness
from fourfold_bench.tracing.benchmark import BENCHMARK, TracingSettings


def settings(*words: str) -> TracingSettings:
    parser = argparse.ArgumentParser()
    harness.add_arguments(BENCHMARK, parser)
    return TracingSettings.from_arguments(parser.parse_args(words))


def document(added: float) -> dict[str, Any]:
    def each(value: float) -> dict[str, float]:
        return {"median": value}

    traces = {"off": each(0.5), "0.01": each(added), "1": each(300.0)}
    coordinator = {"per_sample": {"off": each(250.0)}, "added_per_sample": {"0.01": each(-3.0), "1": each(290.0)}}
    spans = {"off": each(0.4), "made": each(5.0), "written": each(20.0), "encoded": each(50.0)}
    return {
        "parameters": settings().document(),
        "results": {"traces_us": traces, "coordinator_us": coordinator, "span_us": spans, "scrape_us": each(7500.0)},
    }


def test_the_cost_is_compared_with_a_step() -> None:
    lines = BENCHMARK.table(document(4.0))
    assert lines[0].endswith("a step of 512 samples in 3.9 s")
    assert lines[2:4] == ["sample_ratio = 0.01: 4.00 us, 0.0525%", "sample_ratio = 1: 300.00 us, 3.9385%"]
    assert lines[4].endswith("without traces: 250 us per sample; -3 us at 0.01, +290 us at 1")
    assert lines[5] == "scrape of its metrics: 7,500 us; 0.050% of the time at one in 15 s"


def test_the_default_share_costs_less_than_a_hundredth_of_a_step() -> None:
    assert BENCHMARK.failures(document(70.0)) == []
    (failure,) = BENCHMARK.failures(document(80.0))
    assert failure.startswith("sample_ratio = 0.01 takes 1.05%")


def test_a_step_has_whole_groups() -> None:
    with pytest.raises(ConfigError, match="multiple of 8"):
        settings("--samples", "12")
