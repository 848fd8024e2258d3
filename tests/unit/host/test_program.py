"""How a user starts the program again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fourfold.host.program import program


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
