"""Tests the names of devices, and the errors for missing devices."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from fourfold.cli import main as cli_main
from fourfold.errors import ConfigError
from fourfold.host.hardware import Gpu
from fourfold_bench import command as bench_command
from fourfold_bench import gpus
from fourfold_bench.gpus import check_present, default_device, physical_gpu, visible


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    gpus.usable.cache_clear()
    yield
    gpus.usable.cache_clear()


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [Gpu(id="4", name="one"), Gpu(id="GPU-6", name="another")]
    monkeypatch.setattr("fourfold.host.hardware.visible_gpus", lambda: there)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold.host.hardware.visible_gpus", list)


def test_gpus_are_named_as_the_driver_names_them(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert physical_gpu("cuda:1") == "GPU-6" and physical_gpu("cuda") == "4"
    monkeypatch.setattr("fourfold.host.hardware.visible_gpus", list)
    assert visible("cuda:1", "cuda:0")["CUDA_VISIBLE_DEVICES"] == "GPU-6,4", "as it was when the benchmark began"
    assert visible("cpu")["CUDA_VISIBLE_DEVICES"] == ""


def test_the_first_gpu_is_the_default(two_gpus: None) -> None:
    assert default_device() == "cuda:0"
    check_present(["cuda:1", "cuda:0", "cuda", "cpu"])


def test_without_gpus_it_is_the_cpu(no_gpu: None) -> None:
    assert default_device() == "cpu"
    check_present(["cpu"])


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda:2", "this process sees 2 GPUs, the last one is cuda:1"),
        ("gpu", "'gpu': it must be cpu, or cuda:0, cuda:1, ..."),
        ("cuda:first", "it must be cpu, or"),
    ],
)
def test_a_missing_device_is_refused(device: str, message: str, two_gpus: None) -> None:
    with pytest.raises(ConfigError, match=message):
        check_present(["cuda:0", device])


@pytest.mark.parametrize(
    "words",
    [["rollout", "--device", "cuda:0"], ["step", "--device", "cuda"], ["weights", "--trainer-device", "cuda:0"]],
)
def test_a_gpu_without_gpus_is_one_line(words: list[str], no_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["bench", *words]) == 1
    error = capsys.readouterr().err
    assert error == "fourfold: device cuda:0: this process sees no GPU (`fourfold doctor` shows why); use cpu\n"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            "step --layout hybrid --liger --tokens-per-micro-batch 73728 --reference-tokens 73728 --steps 5",
            {"device": "cuda", "shape": "0.43b", "prompts": 64, "layout": "hybrid", "liger": True, "steps": 5},
        ),
        (
            "weights --shape 0.43b --streams 256 --flush 0.04 --trainer-device cuda:0 --engine-device cuda:1",
            {"streams": 256, "backend": "cuda_ipc", "trainer_devices": ["cuda:0"], "engine_device": "cuda:1"},
        ),
        (
            "rollout --packed --alone plain --timeout 60",
            {"device": "cuda:0", "prompts": 512, "packed": True, "alone": ["plain"], "timeout": 60.0},
        ),
    ],
)
def test_the_commands_of_gpu_runs_keep_their_meaning(command: str, expected: dict[str, Any], two_gpus: None) -> None:
    parser = argparse.ArgumentParser()
    bench_command.add_arguments(parser)
    args = parser.parse_args(command.split())
    benchmark = importlib.import_module(f"fourfold_bench.{args.what}.benchmark").BENCHMARK
    settings = benchmark.settings.from_arguments(args)
    check_present(benchmark.devices(settings))
    assert expected.items() <= settings.document().items()
