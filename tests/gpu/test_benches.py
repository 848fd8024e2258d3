"""Tests `fourfold bench rollout` and `fourfold bench step` on GPUs with a small model.

Skipped without GPUs or vLLM. Run it with `pytest tests/gpu/test_benches.py`; all of it needs two GPUs.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from tests.support.bench_command import bench

_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.skipif(_GPUS == 0, reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.timeout(600),
]


def test_a_service_is_measured_against_vllm_alone(tmp_path: Path) -> None:
    out, profile = tmp_path / "result.json", tmp_path / "profile"
    sizes = ("--shape", "0.135b", "--prompts", "16", "--group-size", "2", "--new-tokens", "64", "--streams", "4")
    places = ("--json", str(out), "--profile", str(profile))
    done = bench("rollout", "--device", "cuda:0", "--eager", *sizes, *places, folder=tmp_path, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(out.read_text())["results"]
    assert results["service"]["gpu_mib"]["cuda:0"] > 1000
    assert results["summary"]["greedy"]["equal_tokens"] > 0
    assert "MainThread" in (profile / "rollout.folded").read_text()


@pytest.mark.skipif(_GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "layout", [("separate",), ("hybrid",), ("hybrid", "--sleep")], ids=["separate", "hybrid", "sleep"]
)
def test_the_phases_of_a_step_add_up(layout: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    sizes = ("--shape", "0.135b", "--prompts", "8", "--group-size", "4", "--new-tokens", "64", "--steps", "2")
    words = ("step", "--device", "cuda", "--layout", *layout, *sizes, "--json", str(out))
    done = bench(*words, folder=tmp_path, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(out.read_text())["results"]
    phases = dict(results["phases"])
    assert sum(seconds for name, seconds in phases.items() if name != "wall") == pytest.approx(phases["wall"])
    assert -0.01 < phases["other"] < 0.2 * phases["wall"], "no time is counted twice, and little is in no phase"
    assert ("sleep" in phases and "wake" in phases) == ("--sleep" in layout)
    assert 0 < results["mfu"]["step"] < 1
    assert set(results["gpu_mib"]) == {"cuda:0", "cuda:1"} and min(results["gpu_mib"].values()) > 1000
