"""Tests `fourfold bench rollout` with a real service, called from other processes, and vLLM alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.bench_command import bench

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(900)]


def test_the_benchmark_measures_a_service_against_vllm_alone(tmp_path: Path) -> None:
    sizes = ("--prompts", "6", "--group-size", "2", "--prompt-tokens", "16", "--new-tokens", "24")
    others = ("--rounds", "2", "--clients", "2", "--streams", "2", "--alone", "plain,logprobs,seeds")
    out, profile = tmp_path / "result.json", tmp_path / "profile"
    places = ("--json", str(out), "--profile", str(profile))
    done = bench("rollout", "--shape", "tiny", "--device", "cpu", *sizes, *others, *places, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "LLM.generate, plain" in done.stdout and "service beside streams" in done.stdout
    document = json.loads(out.read_text())
    results = document["results"]
    service, alone = results["service"], results["alone"]
    assert (service["samples"], service["tokens"]) == (12 * 6, 12 * 6 * 24), (
        "warm-up, two rounds, the profiled one, two beside streams"
    )
    assert len(service["seconds"]) == len(service["beside_seconds"]) == 2
    assert {way: len(seconds) for way, seconds in alone["seconds"].items()} == {"plain": 2, "logprobs": 2, "seeds": 2}
    speeds = results["summary"]["tokens_per_second"]
    assert speeds["service"] == pytest.approx(12 * 24 / (sum(service["seconds"]) / 2), rel=1e-3)
    assert results["summary"]["ratio"]["LLM.generate, plain"] == 1.0
    assert service["greedy"]["token_ids"] == alone["greedy"]["token_ids"], "one machine, one sample at a time"
    assert results["summary"]["greedy"]["largest_difference"] < 0.02
    assert len(service["first_token"]) == 10 and min(service["first_token"]) > 0
    assert service["streams"]["gaps"] and min(service["streams"]["gaps"]) >= 0
    assert document["versions"]["torch"] and document["hardware"]["cores"]
    assert document["command"].startswith("fourfold bench rollout --shape tiny")
    assert any("MainThread" in path.read_text() for path in profile.glob("rollout.folded"))
