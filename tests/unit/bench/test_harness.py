"""Tests the harness of all benchmarks: options, checks of places and packages, results, the whole of a small one."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fourfold.errors import ConfigError
from fourfold_bench import harness, record
from fourfold_bench.harness import Benchmark, BenchmarkRun, BenchmarkSettings, option
from fourfold_bench.models import forward_flop, parameter_count
from fourfold_bench.step.benchmark import BENCHMARK, StepSettings
from fourfold_bench.suite import run_suite
from fourfold_bench.weights.benchmark import BENCHMARK as WEIGHTS
from fourfold_bench.weights.benchmark import SUITES, WeightSettings

ROOT = Path(record.__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallSettings(BenchmarkSettings):
    size: int = option("size", default=3, least=1, most=9)
    words: tuple[str, ...] = option(default=("a", "b"))
    kind: str = option(choices=("x", "y"))
    fast: bool = option(default=False)
    share: float = option(flag="--share-of-it", default=0.5, above=0, below=1)
    profiled: bool = False

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {"kind": "x", **given}


class SmallBenchmark(Benchmark[SmallSettings]):
    name = "small"
    summary = "a small benchmark"
    settings = SmallSettings
    libraries = ("pytest", "none-such|numpy")
    profiled = "it"

    def label(self, settings: SmallSettings) -> str:
        return settings.kind

    def measure(self, settings: SmallSettings, run: BenchmarkRun) -> dict[str, Any]:
        assert not list(run.folder.iterdir())
        return {"double": 2 * settings.size}

    def table(self, document: Mapping[str, Any]) -> list[str]:
        return [f"double {document['results']['double']}"]


def _arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    harness.add_arguments(SmallBenchmark(), parser)
    return parser.parse_args(words)


def _check(*words: str) -> None:
    harness.check_places(SmallBenchmark(), _arguments(*words))


def test_options_come_from_the_fields_of_the_settings(tmp_path: Path) -> None:
    plain = SmallSettings.from_arguments(_arguments())
    assert plain == SmallSettings(kind="x")
    words = ("--size", "4", "--words", "c,,d", "--kind", "y", "--fast", "--share-of-it", "0.25", "--profile", "p")
    given = SmallSettings.from_arguments(_arguments(*words))
    assert given == SmallSettings(size=4, words=("c", "d"), kind="y", fast=True, share=0.25, profiled=True)
    assert given.document()["words"] == ["c", "d"]
    assert SmallSettings.read(given.write(tmp_path / "settings.json")) == given
    assert SmallSettings.from_arguments(_arguments("--words", "")).words == ()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size", "0"], "--size 0: it must be at least 1 and at most 9"),
        (["--share-of-it", "1"], "--share-of-it 1.0: it must be above 0 and below 1"),
        (["--share-of-it", "nan"], "--share-of-it nan: it must be above 0 and below 1"),
    ],
)
def test_limits_of_options_are_checked(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        SmallSettings.from_arguments(_arguments(*words))


def test_a_result_has_parameters_numbers_and_versions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    assert harness.run(SmallBenchmark(), _arguments("--size", "5", "--json", str(out))) == 0
    assert capsys.readouterr().out == "double 10\n"
    document = json.loads(out.read_text())
    assert document["benchmark"] == "small-x" and document["results"] == {"double": 10}
    assert document["parameters"] == {**SmallSettings(size=5, kind="x").document()}
    assert set(document["versions"]) == {"python", "pytest", "numpy"} and document["hardware"]["cores"] > 0


def test_the_folder_of_a_result_is_made_before_anything_is_measured(tmp_path: Path) -> None:
    _check("--json", str(tmp_path / "a" / "b" / "result.json"))
    assert (tmp_path / "a" / "b").is_dir()
    with pytest.raises(ConfigError, match="this is a folder; give a file"):
        _check("--json", str(tmp_path))


@pytest.mark.parametrize("name", ["--keep", "--profile"])
def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"{name} .*: this is a file; give a folder"):
        _check(name, str(tmp_path / "file"))


@pytest.mark.parametrize("words", [("--keep", "x/y"), ("--profile", "x/y"), ("--json", "x/y/z.json")])
def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, words: tuple[str, str]) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(ConfigError, match=rf"{words[0]} .*: cannot make the folder \(.*\); give another place"):
        _check(words[0], str(tmp_path / words[1]))


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    with pytest.raises(ConfigError, match=r"--json .*: this user may not write there; give another place"):
        _check("--json", str(tmp_path / "x.json"))


def test_save_is_for_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="elsewhere use --json FILE"):
        _check("--save")


def test_the_commit_is_that_of_the_code_wherever_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    if head.returncode:
        pytest.skip("this copy has no git folder")
    monkeypatch.delenv("FOURFOLD_COMMIT", raising=False)
    monkeypatch.chdir(tmp_path)
    document = record.document("x", command="x", parameters={}, results={}, libraries=[])
    assert document["commit"] == head.stdout.strip()


def test_an_installation_inside_another_repository_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FOURFOLD_COMMIT", raising=False)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    monkeypatch.setattr(record, "__file__", str(tmp_path / "record.py"))
    (tmp_path / "record.py").touch()
    assert record.document("x", command="x", parameters={}, results={}, libraries=[])["commit"] == ""


def test_packages_are_those_of_the_device() -> None:
    parser = argparse.ArgumentParser()
    harness.add_arguments(BENCHMARK, parser)
    on_cpu, on_gpus = (
        BENCHMARK.packages(StepSettings.from_arguments(parser.parse_args(words)))
        for words in (["--device", "cpu"], ["--device", "cuda", "--liger"])
    )
    assert on_cpu["vllm"] == "fourfold-rollout[cpu]" and "liger_kernel" not in on_cpu
    assert on_gpus["vllm"] == "fourfold-rollout[gpu]" and on_gpus["liger_kernel"] == "fourfold-trainer[gpu,liger]"


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        ("fourfold bench rollout --json a.json --rounds 3 --profile p --keep k", "fourfold bench rollout --rounds 3"),
        (
            "fourfold bench step --json there/x.json --steps 2 --keep=there --save",
            "fourfold bench step --steps 2 --save",
        ),
        (
            "/x/fourfold_bench/trainer_speed.py --runs 2 --name n",
            "python -m fourfold_bench.trainer_speed --runs 2 --name n",
        ),
    ],
)
def test_the_command_of_a_result_has_no_places_of_this_machine(argv: str, command: str) -> None:
    assert record.command_again(argv.split()) == command


class _Failing(Benchmark[BenchmarkSettings]):
    name = "failing"
    summary = "a benchmark that fails"
    settings = BenchmarkSettings
    libraries = ()

    def measure(self, settings: BenchmarkSettings, run: BenchmarkRun) -> dict[str, Any]:
        return {"speed": 1}

    def table(self, document: Any) -> list[str]:
        return ["speed 1"]

    def failures(self, document: Any) -> list[str]:
        return ["too slow"]

    def plot(self, document: Any, path: Path) -> None:
        path.write_text("plot")


@pytest.mark.parametrize("installed", [True, False])
def test_a_failure_is_an_exit_code_after_the_result_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], installed: bool
) -> None:
    if not installed:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    parser = argparse.ArgumentParser()
    harness.add_arguments(_Failing(), parser)
    assert harness.run(_Failing(), parser.parse_args(["--json", str(tmp_path / "result.json")])) == 1
    assert json.loads((tmp_path / "result.json").read_text())["results"] == {"speed": 1}
    out = capsys.readouterr().out
    assert out.endswith("speed 1\n\nfailed: too slow\n")
    assert (tmp_path / "result.png").exists() == installed and ("no plot" in out) != installed


def test_a_benchmark_without_a_plot_asks_for_no_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert harness.run(SmallBenchmark(), _arguments("--json", str(tmp_path / "result.json"))) == 0
    assert capsys.readouterr().out == "double 6\n"


def test_median_and_percentile() -> None:
    runs = [value / 1000 for value in range(1, 22)]
    found = record.percentiles(list(reversed(runs)))
    assert (found["median_ms"], found["p95_ms"]) == (11.0, 20.0)
    assert found["runs_ms"][0] == 21.0, "in the order in which they came"


def test_flop_are_those_of_the_papers() -> None:
    assert parameter_count("0.135b") == 134_515_008
    assert parameter_count("7b") == 7_615_616_512
    matrices = 6 * parameter_count("0.43b") * 512 * 576
    attention = 6 * 24 * 1024 * 512 * 576**2
    forward = forward_flop("0.43b", tokens=512 * 576, squares=512 * 576**2)
    assert 3 * forward == pytest.approx(matrices + attention)


def test_what_is_not_installed_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    present = importlib.util.find_spec
    gone = ("vllm", "deepspeed")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else present(name))
    with pytest.raises(ConfigError, match=r"needs vllm, deepspeed, .*rollout\[cpu\]' .*trainer"):
        harness.run(WEIGHTS, _weights("--trainer-device", "cpu"))


def _weights(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    harness.add_arguments(WEIGHTS, parser)
    return parser.parse_args(words)


@pytest.mark.parametrize("suite", sorted(SUITES))
def test_the_configurations_of_suites_are_settings(suite: str) -> None:
    for name, arguments in SUITES[suite].items():
        settings = WeightSettings.from_arguments(_weights(*arguments.split()))
        assert settings.on_gpus == (suite != "cpu"), name


def test_a_suite_without_such_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--only 7c: it must be part of one of these names: 0\.43b-services-nccl, "):
        run_suite(WEIGHTS, "h200", tmp_path / "out", only="7c")
    assert not (tmp_path / "out").exists()
