"""Tests the settings, the arithmetic, the checks and the table of `fourfold bench rollout`."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fourfold.cli import main as cli_main
from fourfold.errors import ConfigError, Internal
from fourfold.rollout.client import Completion
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold_bench import harness
from fourfold_bench.models import SHAPES, kv_cache_gib
from fourfold_bench.rollout import measure
from fourfold_bench.rollout.benchmark import BENCHMARK, RolloutSettings
from fourfold_bench.rollout.client import SampleCheck

SETTINGS = RolloutSettings(
    shape="0.43b",
    device="cuda:0",
    prompts=512,
    prompt_tokens=64,
    new_tokens=510,
    group_size=1,
    temperature=1.0,
    warm_up=1,
    rounds=3,
    clients=1,
    streams=0,
    flush_seconds=0.05,
    packed=False,
    alone=("plain", "logprobs"),
    engine_memory=0.85,
    batched_tokens=0,
    eager=False,
    profiled=False,
    timeout=600.0,
)


def _completion(logprobs: list[float]) -> Completion:
    return Completion(
        sample_index=0,
        token_ids=np.arange(len(logprobs), dtype=np.int32),
        logprobs=np.array(logprobs, np.float32),
        version_spans=(),
        finish_reason=pb.FINISH_REASON_LENGTH,
    )


def test_both_sides_derive_the_same_work(tmp_path: Path) -> None:
    settings = replace(SETTINGS, new_tokens=4096, group_size=4, prompts=128)
    assert RolloutSettings.read(settings.write(tmp_path / "s.json")) == settings
    assert (settings.samples, settings.context) == (512, 4160)
    assert len(settings.prompt(0, 0)) == 64
    assert settings.prompt(0, 0) == settings.prompt(0, 0)
    different = [settings.prompt(number, index) for number in (-1, 0, 1) for index in (0, 1)]
    assert len({tuple(prompt) for prompt in different}) == 6, "no prefix is shared"
    assert kv_cache_gib("0.43b", 1 << 20) == 2 * 24 * 8 * 64 * 2 * 5 // 4 >> 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, "--rounds 0: it must be at least 1"),
        ({"streams": -1}, "--streams -1: it must be at least 0"),
        ({"clients": 9, "prompts": 8}, "--clients 9 cannot share 8 prompts"),
        ({"temperature": 0.0}, "--temperature 0.0"),
        ({"engine_memory": 1.0}, "--engine-memory 1.0"),
        ({"flush_seconds": -1.0}, "--flush -1.0: it must be at least 0 and at most 10"),
        ({"timeout": 0.0}, "--timeout 0.0: it must be above 0"),
        ({"alone": ("plain", "fast")}, "--alone fast: it must be of plain, logprobs, seeds"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(SETTINGS, **changes)


def test_bad_arguments_get_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["bench", "rollout", "--shape", "tiny", "--device", "cpu", "--rounds", "0"]) == 1
    error = capsys.readouterr().err
    assert error == "fourfold: --rounds 0: it must be at least 1\n"


def test_the_recipe_of_the_service_has_room_for_all_at_once(tmp_path: Path) -> None:
    config = measure.recipe(replace(SETTINGS, streams=8, group_size=2), tmp_path)
    assert config.rollout.max_concurrent_samples == 1032
    assert config.model.max_context_tokens == 576
    assert (config.rollout.gpus_per_replica, config.rollout.kv_cache_gib) == (1, None)
    on_cpu = measure.recipe(replace(SETTINGS, device="cpu", shape="tiny"), tmp_path)
    assert (on_cpu.rollout.gpus_per_replica, on_cpu.rollout.kv_cache_gib) == (0, 1)


def test_a_round_lasts_from_the_first_begin_to_the_last_end() -> None:
    clients = [[[1.0, 4.0], [10.0, 11.0]], [[2.0, 3.0], [9.5, 12.0]]]
    assert measure.round_seconds(clients) == [3.0, 2.5]


def test_samples_are_looked_at() -> None:
    checked = SampleCheck()
    checked.add(_completion([-1.0, 0.0]), expected=2)
    assert not checked.faults
    checked.add(_completion([-1.0]), expected=2)
    checked.add(_completion([-1.0, float("nan")]), expected=2)
    checked.add(_completion([-1.0, 0.1]), expected=2)
    assert len(checked.faults) == 3
    assert (checked.samples, checked.tokens) == (4, 7)


def test_greedy_continuations_are_compared_up_to_where_they_part() -> None:
    ours: dict[str, list[float]] = {"token_ids": [1, 2, 3, 4], "logprobs": [-1.0, -2.0, -3.0, -9.0]}
    theirs: dict[str, list[float]] = {"token_ids": [1, 2, 7, 8], "logprobs": [-1.0, -2.01, -3.02, -1.0]}
    found = measure.compare_greedy(ours, theirs)
    assert (found["equal_tokens"], found["tokens"]) == (2, 4)
    assert found["largest_difference"] == pytest.approx(0.02)
    with pytest.raises(Internal, match=r"differ by 0\.\d+ nats"):
        measure.compare_greedy(ours, theirs | {"logprobs": [-1.5, -2.0, -3.0, -9.0]})


def test_the_table_has_speeds_ratios_and_what_else_was_measured() -> None:
    greedy = {"token_ids": [1], "logprobs": [-1.0]}
    results: dict[str, Any] = {
        "service": {
            "start_seconds": 30.0,
            "seconds": [3.5, 3.4, 3.6],
            "beside_seconds": [4.0],
            "first_token": [0.010, 0.012, 0.011],
            "streams": {"first_token": [0.1], "gaps": [0.05, 0.06]},
            "greedy": greedy,
            "samples": 2048,
            "tokens": 1_044_480,
            "gpu_mib": {"cuda:0": 100_000},
            "warnings": ["it is slow"],
        },
        "alone": {
            "start_seconds": 20.0,
            "seconds": {"plain": [3.2, 3.3, 3.1], "logprobs": [5.0, 5.1, 5.2]},
            "greedy": greedy,
            "gpu_mib": {"cuda:0": 90_000},
        },
    }
    summary = measure.summarise(SETTINGS, results)
    assert summary["tokens_per_second"]["service"] == round(512 * 510 / 3.5, 1)
    assert summary["ratio"]["service"] == round(3.2 / 3.5, 4)
    assert summary["ratio"]["LLM.generate, logprobs"] == round(3.2 / 5.1, 4)
    text = "\n".join(BENCHMARK.table({"parameters": SETTINGS.document(), "results": results | {"summary": summary}}))
    for part in (
        "512 samples of 64 + 510",
        "0.914",
        "74,606",
        "service 30.0 s, vLLM alone 20.0 s",
        "11.0 ms, p95 12.0",
    ):
        assert part in text, part
    assert "service 100000 MiB, vLLM alone 90000 MiB" in text


def test_warnings_of_the_service_are_told_and_packed_means_packed(tmp_path: Path) -> None:
    text = "log-probabilities come from vLLM itself, which samples much slower with them: no"
    rows = [{"level": "info", "message": "ready"}, *[{"level": "warning", "message": text}] * 2]
    (tmp_path / "log").write_text("READY 127.0.0.1:1\n" + "".join(json.dumps(row) + "\n" for row in rows))
    warnings = measure.warnings_of(tmp_path / "log")
    assert warnings == [text]
    measure.check_service(SETTINGS, [], warnings)
    with pytest.raises(Internal, match="of which the service warned: log-probabilities come from vLLM itself"):
        measure.check_service(replace(SETTINGS, packed=True), [], warnings)
    with pytest.raises(Internal, match="samples are wrong: 3 tokens"):
        measure.check_service(SETTINGS, ["3 tokens instead of 4"], [])


@pytest.mark.parametrize(
    ("words", "work"),
    [
        (["--device", "cuda:0"], ("0.43b", 512, 64, 510)),
        (["--device", "cuda:0", "--shape", "1.5b", "--prompts", "8"], ("1.5b", 8, 64, 510)),
        (["--device", "cpu"], ("tiny", 16, 64, 64)),
    ],
)
def test_defaults_are_the_work_that_targets_are_given_for(words: list[str], work: tuple[Any, ...]) -> None:
    parser = argparse.ArgumentParser()
    harness.add_arguments(BENCHMARK, parser)
    settings = RolloutSettings.from_arguments(parser.parse_args(words))
    assert (settings.shape, settings.prompts, settings.prompt_tokens, settings.new_tokens) == work
    assert SHAPES[settings.shape]["eos_token_id"] is None, "nothing ends a sample early"
