"""Tests the settings, the table and a small run of `fourfold bench reward`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli import main as cli_main
from fourfold.errors import ConfigError
from fourfold_bench import harness
from fourfold_bench.reward.benchmark import BENCHMARK, HERE, RewardSettings


def settings(*words: str) -> RewardSettings:
    parser = argparse.ArgumentParser()
    harness.add_arguments(BENCHMARK, parser)
    return RewardSettings.from_arguments(parser.parse_args(words))


def test_the_other_checkout_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it has no services/reward"):
        settings("--against", str(tmp_path))
    (tmp_path / "services" / "reward").mkdir(parents=True)
    sides = settings("--against", str(tmp_path)).sides
    assert list(sides) == ["other checkout", HERE]
    assert sides["other checkout"]["PYTHONPATH"].startswith(f"{tmp_path}:{tmp_path}/services/reward:")


def _load(**changes: float) -> dict[str, Any]:
    numbers = {"groups": 9, "p50_ms": 4.0, "p99_ms": 8.5, "max_ms": 9.0, "cpu_us_per_sample": 300.0, "wrong": 0}
    memory = {"service_mib_first": 70.0, "service_mib_last": 71.0, "workers_max": 3, "worker_mib": 25.0}
    return {**numbers, **memory, **changes}


def test_table_and_goals() -> None:
    cost = {
        "scorer_us": 60.0,
        "service_us": 40.0,
        "workers_us": 20.0,
        "coordinator_us": 18.0,
        "samples_per_second": 6000.0,
    }
    results: dict[str, Any] = {"cpu": {HERE: cost}, "open_loop": {HERE: {"none hang": _load(), "hanging": _load()}}}
    document = {"parameters": settings().document(), "results": results}
    lines = BENCHMARK.table(document)
    assert "512 samples of 300 + 600 characters" in lines[0]
    assert lines[3].split()[-5:] == ["60.0", "40.0", "20.0", "18.0", "6,000"]
    assert "1 % of them hang for 5 s" in lines[5]
    assert BENCHMARK.failures(document) == []
    results["open_loop"][HERE]["hanging"] = _load(service_mib_last=90.0, wrong=3)
    results["cpu"][HERE] = cost | {"coordinator_us": 81.0}
    assert [failure.split()[0] for failure in BENCHMARK.failures(document)] == ["coordinator_us", "the", "3"]


@pytest.mark.slow
def test_a_small_run_measures_a_service(tmp_path: Path) -> None:
    words = ["--batch", "16", "--calls", "1", "--runs", "1", "--processes", "1", "--seconds", "0"]
    out = tmp_path / "result.json"
    cli_main.main(["bench", "reward", *words, "--json", str(out)])
    document = json.loads(out.read_text())
    assert document["benchmark"] == "reward-cpu"
    assert document["results"]["cpu"][HERE]["samples_per_second"] > 0
    assert document["results"]["open_loop"] == {}
