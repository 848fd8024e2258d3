"""Tests the settings, the suites, the arithmetic and the ranks of `fourfold bench weights`."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli import main as cli_main
from fourfold.errors import ConfigError
from fourfold_bench import harness
from fourfold_bench.record import percentiles
from fourfold_bench.suite import run_suite
from fourfold_bench.weights.benchmark import BENCHMARK, SUITES, WeightSettings
from fourfold_bench.weights.phases import longest_gap, usual_gap
from fourfold_bench.weights.rank_client import TrainerRank


def _arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    harness.add_arguments(BENCHMARK, parser)
    return parser.parse_args(list(words))


def _settings(*words: str) -> WeightSettings:
    return WeightSettings.from_arguments(_arguments(*words))


def test_a_gap_counts_when_it_touches_the_round() -> None:
    times = [0.0, 1.0, 2.0, 7.0, 8.0, 10.0, 11.0]
    assert longest_gap(times, 3.0, 6.0) == 5.0, "inside a gap"
    assert longest_gap(times, 7.5, 9.0) == 2.0, "across two"
    assert longest_gap(times, 20.0, 21.0) == 0.0, "after the last token"
    assert usual_gap([times, [0.0, 1.0]]) == 1.0


def test_median_and_percentile() -> None:
    runs = [value / 1000 for value in range(1, 22)]
    found = percentiles(list(reversed(runs)))
    assert (found["median_ms"], found["p95_ms"]) == (11.0, 20.0)
    assert found["runs_ms"][0] == 21.0, "in the order in which they came"


@pytest.mark.parametrize("suite", sorted(SUITES))
def test_suites_can_be_run(suite: str) -> None:
    for name, arguments in SUITES[suite].items():
        settings = _settings(*arguments.split())
        assert settings.on_gpus == (suite != "cpu"), name
        assert not settings.loop or settings.loop_is_possible, f"{name}: NCCL refuses two ranks on one GPU"


def test_a_suite_without_such_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--only 7c: it must be part of one of these names: 0\.43b-nccl, "):
        run_suite(BENCHMARK, "h200", tmp_path / "out", only="7c")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trainer-device", "cuda:0", "--engine-device", "cpu"], "both be on CPU or both on GPUs"),
        (["--trainer-device", "cpu,cpu"], "several trainer devices need --zero3"),
        (["--rounds", "0"], "--rounds 0: it must be at least 1"),
        (["--ranks", "0"], "--ranks 0: it must be at least 1"),
        (["--context", "-1"], "--context -1: it must be at least 64"),
        (["--timeout", "-1"], "--timeout -1.0: it must be above 0"),
        (["--engine-memory", "-1"], "--engine-memory -1.0: it must be above 0 and below 1"),
        (["--flush", "11"], "--flush 11.0: it must be at least 0 and at most 10"),
        (["--profile", "x", "--path", "services"], "--profile x: only --path direct has a worker"),
        (["--pause", "recompute"], "only the services can recompute; add --path services"),
    ],
)
def test_settings_that_make_no_sense_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _settings(*words)


def test_the_command_needs_no_heavy_module_to_explain_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli_main.main(["bench", "weights", "--help"])
    assert "--suite" in capsys.readouterr().out


def test_the_process_that_forks_the_engine_has_not_loaded_grpc() -> None:
    """The direct path forks vLLM's processes, and a fork after gRPC has started is unsafe."""
    code = "import sys, fourfold_bench.weights.direct; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_what_is_not_installed_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    present = importlib.util.find_spec
    gone = ("vllm", "deepspeed")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else present(name))
    with pytest.raises(ConfigError, match=r"needs vllm, deepspeed, .* 'fourfold-rollout\[cpu\]' fourfold-trainer"):
        harness.run(BENCHMARK, _arguments("--zero3", "--trainer-device", "cpu"))


def test_a_rank_of_the_benchmark_ends_when_its_socket_closes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = subprocess.Popen

    def reads_until_the_end(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
        code = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).makefile('rb').read(); sys.exit(7)"
        return real([words[0], "-c", code, words[3]], **options)

    monkeypatch.setattr(subprocess, "Popen", reads_until_the_end)
    rank = TrainerRank(_settings("--engine-device", "cpu"), tmp_path, 0, tmp_path / "meet")
    reader = rank._reader = threading.Thread(target=rank._read, daemon=True)
    reader.start()
    rank.stop()
    assert rank._process.returncode == 7
