"""Where a benchmark's result goes, and what it says of the code that ran."""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path

import pytest

from fourfold.errors import ConfigError
from fourfold_bench import record_result, result
from fourfold_bench.step import command

ROOT = Path(record_result.__file__).resolve().parents[1]


def _arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    result.add_arguments(parser, profiled="it")
    return parser.parse_args(words)


def test_the_folder_of_a_result_is_made_before_anything_is_measured(tmp_path: Path) -> None:
    result.prepare(_arguments("--json", str(tmp_path / "a" / "b" / "result.json")), {})
    assert (tmp_path / "a" / "b").is_dir()
    with pytest.raises(ConfigError, match="that is a folder; give the file"):
        result.prepare(_arguments("--json", str(tmp_path)), {})


@pytest.mark.parametrize("name", ["--keep", "--profile"])
def test_a_file_is_no_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"{name} .*: that is a file; give a folder"):
        result.prepare(_arguments(name, str(tmp_path / "file")), {})


@pytest.mark.parametrize("words", [("--keep", "x/y"), ("--profile", "x/y"), ("--json", "x/y/z.json")])
def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, words: tuple[str, str]) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(ConfigError, match=rf"{words[0]} .*: the folder cannot be made \(.*\); give another place"):
        result.prepare(_arguments(words[0], str(tmp_path / words[1])), {})


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    with pytest.raises(ConfigError, match=r"--json .*: this user may not write there; give another place"):
        result.prepare(_arguments("--json", str(tmp_path / "x.json")), {})


def test_save_is_for_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="elsewhere use --json FILE"):
        result.prepare(_arguments("--save"), {})


def test_the_commit_is_that_of_the_code_wherever_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    if head.returncode:
        pytest.skip("this copy has no git folder")
    monkeypatch.delenv("FOURFOLD_COMMIT", raising=False)
    monkeypatch.chdir(tmp_path)
    document = record_result.document("x", command="x", parameters={}, results={}, libraries=[])
    assert document["commit"] == head.stdout.strip()


def test_an_installation_inside_another_repository_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FOURFOLD_COMMIT", raising=False)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    monkeypatch.setattr(record_result, "__file__", str(tmp_path / "record.py"))
    (tmp_path / "record.py").touch()
    assert record_result.document("x", command="x", parameters={}, results={}, libraries=[])["commit"] == ""


def test_packages_are_those_of_the_device() -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    on_cpu = command.packages(command.make_settings(parser.parse_args(["--device", "cpu"])))
    on_gpus = command.packages(command.make_settings(parser.parse_args(["--device", "cuda", "--liger"])))
    assert on_cpu["vllm"] == "fourfold-rollout[cpu]" and "liger_kernel" not in on_cpu
    assert on_gpus["vllm"] == "fourfold-rollout[gpu]" and on_gpus["liger_kernel"] == "fourfold-trainer[gpu,liger]"
