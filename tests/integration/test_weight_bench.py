"""Tests `fourfold bench weights` and the example without services, with real trainer processes and a real vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.bench_command import environment

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]


def _run(*words: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="dense"),
        pytest.param(["--zero3", "--ranks", "2", "--backend", "gloo"], id="zero3", marks=pytest.mark.soak),
    ],
)
def test_the_benchmark_measures_real_updates(options: list[str], tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    rounds = ("--rounds", "2", "--warm-up", "1", "--verified-rounds", "1", "--streams", "2", "--compare", "loop")
    table = _run(
        "-m", "fourfold", "bench", "weights", "--shape", "tiny", *rounds, *options, "--json", str(out), cwd=tmp_path
    )
    assert "stall of the engine" in table and "loop, tensor by tensor" in table
    result = json.loads(out.read_text())
    measured = result["results"]
    assert measured["bytes"] == 2 * (512 * 64 + 2 * (64 * 64 * 2 + 2 * 32 * 64 + 3 * 64 * 128 + 2 * 64) + 64)
    assert len(measured["plain"]["stall"]["runs_ms"]) == 2
    for median in ("begin", "receive", "worker", "stall", "commit"):
        assert measured["plain"][median]["median_ms"] > 0
    assert measured["plain"]["receive"]["median_ms"] <= measured["plain"]["stall"]["median_ms"]
    assert measured["loop_ratio"] > 0
    assert result["parameters"]["backend"] == ("gloo" if options else "shm")


@pytest.mark.parametrize("pause", ["keep", pytest.param("recompute", marks=pytest.mark.soak)])
def test_the_services_lose_no_token_over_updates_and_say_what_clients_wait(pause: str, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    rounds = ("--rounds", "2", "--warm-up", "1", "--verified-rounds", "1", "--streams", "4", "--context", "256")
    words = ("-m", "fourfold", "bench", "weights", "--path", "services", "--shape", "tiny", "--pause", pause)
    table = _run(*words, *rounds, "--json", str(out), cwd=tmp_path)
    assert "tokens lost" in table and "stall + 50" in table and f"4, {pause}" in table
    measured = json.loads(out.read_text())["results"]
    tokens = measured["tokens"]
    assert tokens["lost"] == 0 and tokens["sampled"] == tokens["received"] > 4 * 4 * 4
    assert len(measured["first_token"]["runs_ms"]) >= 4
    assert measured["plain"]["mean_gap"]["median_ms"] <= measured["plain"]["gap"]["median_ms"]
    assert measured["worst_round"]["gap_ms"] in measured["plain"]["longest_gap"]["runs_ms"]
    assert measured["worst_round"]["stall_ms"] in measured["plain"]["stall"]["runs_ms"]


@pytest.mark.soak  # it starts vLLM twice, each time with processes that import it
def test_weights_go_into_vllm_without_any_service(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    printed = _run(str(ROOT / "examples/weights_alone.py"), str(tiny_model("llama")), cwd=tmp_path)
    assert "tokens changed: True" in printed
    assert "equal to a fresh engine: True" in printed
