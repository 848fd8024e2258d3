"""The plan without the distribution that predicts step times."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from fourfold.cli.main import main
from fourfold.install import install_command

QUICKSTART = str(Path(__file__).parents[3] / "recipes" / "quickstart.toml")


def missing() -> str:
    """Return the message, whose command depends on the environment of the test."""
    command = install_command("fourfold-tools")
    return f"a prediction of the step time needs fourfold-tools, which is not installed; {command}"


@pytest.fixture(autouse=True)
def without_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the entry points of the tools."""
    find = importlib.metadata.entry_points

    def others(**query: str) -> object:
        return () if query.get("group") == "fourfold.tools" else find(**query)

    monkeypatch.setattr(importlib.metadata, "entry_points", others)


def test_a_plan_names_the_distribution_that_predicts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", QUICKSTART, "--skip-checks"]) == 0
    assert f"speed unknown: {missing()}" in " ".join(capsys.readouterr().out.split())


def test_rates_need_the_distribution(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", QUICKSTART, "--skip-checks", "--rates", str(tmp_path)]) == 1
    assert missing() in capsys.readouterr().err
