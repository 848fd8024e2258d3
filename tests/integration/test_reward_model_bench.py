"""Tests `fourfold bench reward-model` with real processes: plain transformers, the backend, and a service."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.bench_command import bench

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(500)]


def test_the_benchmark_measures_all_ways(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    sizes = ("--tokens", "3000", "--longest", "400", "--median", "100", "--seconds", "0.5")
    done = bench("reward-model", "--device", "cpu", *sizes, "--json", str(out), folder=tmp_path, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    document = json.loads(out.read_text())
    results = document["results"]
    assert set(results["ways"]) == {"transformers, sdpa", "RewardModelBackend.score", "service, gRPC Score"}
    assert all(len(way["seconds"]) == results["rounds"] >= 3 for way in results["ways"].values())
    assert results["passes"] == "packed" and not results["disagreements"]
    assert document["command"].startswith("fourfold bench reward-model --device cpu")
