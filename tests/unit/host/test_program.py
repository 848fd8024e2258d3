"""How a user starts the program again."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from fourfold.host.program import LAUNCH_OPTIONS, program, resume_command, write_launch_options


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of this program in an environment that is not activated."""
    own = tmp_path / ".venv" / "bin" / "fourfold"
    own.parent.mkdir(parents=True)
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(own.with_name("python")))
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path)
    return own


def test_without_activation_the_program_is_named_by_its_path(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert program() == ".venv/bin/fourfold"
    monkeypatch.chdir(own.parent)
    assert program() == str(own)


def test_an_activated_environment_needs_no_path(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(own.parent))
    assert program() == "fourfold"


def test_another_fourfold_in_the_path_is_not_this_one(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = own.parents[2] / "other" / "fourfold"
    other.parent.mkdir()
    other.write_text("")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(other.parent))
    assert program() == ".venv/bin/fourfold"


def test_a_printed_command_survives_a_space_in_a_path(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spaced = own.parents[2] / "my env" / "bin" / "fourfold"
    spaced.parent.mkdir(parents=True)
    own.rename(spaced)
    monkeypatch.setattr(sys, "executable", str(spaced.with_name("python")))
    assert shlex.split(program()) == ["my env/bin/fourfold"]
    words = ["my env/bin/fourfold", "run", "--resume", "runs/my run"]
    assert shlex.split(resume_command(Path("runs/my run"))) == words


def test_a_run_continues_with_the_options_of_its_start(own: Path) -> None:
    run, words = own.parent / "run", [".venv/bin/fourfold", "run", "--resume", str(own.parent / "run")]
    run.mkdir()
    for changed, options in (
        ({}, []),
        ({"launcher": "ray"}, ["--launcher", "ray"]),
        (
            {"launcher": "ray", "ray_address": "ray://a b:10001", "listen": "0.0.0.0:50050"},
            ["--launcher", "ray", "--ray-address", "ray://a b:10001", "--listen", "0.0.0.0:50050"],
        ),
        ({"listen": "10.0.0.1:50050"}, ["--listen", "10.0.0.1:50050"]),
    ):
        write_launch_options(run, {**LAUNCH_OPTIONS, **changed, "recipe": "of no interest"})
        assert shlex.split(resume_command(run)) == [*words, *options]


@pytest.mark.parametrize("content", ["", "[]", "[" * 100_000, "null", {"listen": "\x1b[2J" * 1000}, {"set": ["a=1"]}])
def test_a_damaged_file_of_options_is_no_obstacle(own: Path, content: Any) -> None:
    (own.parent / ".launch.json").write_text(content if isinstance(content, str) else json.dumps(content))
    command = resume_command(own.parent)
    assert command.startswith(f".venv/bin/fourfold run --resume {own.parent}")
    assert command.isprintable() and len(command) < 500 and "a=1" not in command
