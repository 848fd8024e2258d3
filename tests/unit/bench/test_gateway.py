"""Tests the settings, the tables and a small run of `fourfold bench gateway`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli import main as cli_main
from fourfold.errors import ConfigError
from fourfold_bench import harness
from fourfold_bench.gateway import client
from fourfold_bench.gateway.benchmark import BENCHMARK, GatewaySettings


def settings(*words: str) -> GatewaySettings:
    parser = argparse.ArgumentParser()
    harness.add_arguments(BENCHMARK, parser)
    return GatewaySettings.from_arguments(parser.parse_args(["--device", "cpu", *words]))


def test_ways_follow_from_engine_and_load() -> None:
    assert settings().ways == ("direct", "grpc", "http-logprobs", "vllm")
    assert settings("--engine", "echo").ways == ("direct", "grpc", "http-logprobs")
    open_loop = settings("--engine", "echo", "--rate", "200").ways
    assert open_loop == ("direct", "bare-proxy", "grpc", "http", "http-logprobs")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--ways", "grpc"], "add direct"),
        (["--ways", "direct,mail"], "mail: it must be of"),
        (["--ways", "direct,vllm", "--rate", "5"], "needs --engine vllm and no --rate"),
        (["--clients", "9"], "at most --concurrency"),
        (["--clients", "2", "--rate", "5"], "--rate needs 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        settings(*words)


def test_prompts_are_those_of_the_text_and_never_repeat(tmp_path: Path) -> None:
    given = settings()
    assert GatewaySettings.read(given.write(tmp_path / "s.json")) == given
    first, second = (given.prompt("http", 0, number) for number in (1, 2))
    assert first != second and len(first) == given.prompt_tokens and first != given.prompt("grpc", 0, 1)
    body = json.loads(client.HttpCaller("h:1", logprobs=True).make("a", first, 7).partition(b"\r\n\r\n")[2])
    assert [int(word[1:]) for word in body["messages"][0]["content"].split()] == first


def _way(speed: float, **more: float) -> dict[str, Any]:
    return {"tokens_per_second": speed, "p50_ms": 2000.0, "p95_ms": 2500.0, "p99_ms": 3000.0, "requests": 9, **more}


def test_tables_compare_with_direct_calls() -> None:
    ways = {"direct": _way(50_000), "grpc": _way(49_000, cpu_ms_per_request=1.5)}
    lines = BENCHMARK.table({"parameters": settings().document(), "results": {"ways": ways}})
    assert lines[-1].split()[-6:] == ["49,000", "0.980", "2.000", "2.500", "9", "1.50"]
    open_loop = {"http": _way(0, direct_p50_ms=1.0, added_p50_ms=0.75, cpu_ms_per_request=1.5)}
    parameters = settings("--engine", "echo", "--rate", "200").document()
    lines = BENCHMARK.table({"parameters": parameters, "results": {"ways": open_loop}})
    assert "200 requests/s" in lines[0] and "0.75" in lines[-1].split()


@pytest.mark.parametrize(
    "load", [pytest.param([], marks=pytest.mark.slow), pytest.param(["--rate", "40"], marks=pytest.mark.slow)]
)
def test_a_gateway_is_measured_with_an_engine_that_answers_at_once(
    tmp_path: Path, load: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--engine",
        "echo",
        "--seconds",
        "3",
        "--warm-up",
        "0",
        "--new-tokens",
        "8",
        "--ways",
        "direct,http-logprobs",
    ]
    assert cli_main.main(["bench", "gateway", *words, *load, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("gateway-echo-*.json")
    document = json.loads(path.read_text())
    assert "--out" not in document["command"]
    assert document["results"]["ways"]["http-logprobs"]["requests"] > 9
    assert "gateway, HTTP chat with logprobs" in capsys.readouterr().out
