"""Numbers on the command line: what is none is refused with its value and the rule."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import pytest

from fourfold.cli.main import main
from fourfold.errors import ConfigError
from fourfold_coordinator.cli import log

RECIPE = str(Path(__file__).parents[3] / "recipes/quickstart.toml")


@pytest.mark.parametrize("text", ["abc", "-1", "0", "nan", "inf"])
@pytest.mark.parametrize(
    "words", [["certs", "make", "x", "--days"], ["health", "rollout", RECIPE, "127.0.0.1:1", "--timeout"]]
)
def test_a_number_is_above_0(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*words, text])
    assert f"{words[-1]}: {text!r} must be a number above 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["new", "recipe.toml", "--steps", "1.5"], "'1.5' must be a whole number"),
        (["new", "recipe.toml", "--gpus", "9" * 5000], f"'{'9' * 80}' must be a whole number"),
        (["runs", "list", "--older-than", "a week"], "'a week' must be a number"),
        (["conformance", "reward", "127.0.0.1:1", "--timeout", "abc"], "'abc' must be a number"),
        (["bench", "step", "--steps", "x"], "'x' must be a whole number"),
        (["bench", "step", "--timeout", "x"], "'x' must be a number"),
    ],
)
def test_what_is_no_number_is_refused_with_the_rule(
    words: list[str], rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert f"{words[-2]}: {rule}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["abc", "-4", "0", "1.5", "9" * 5000])
@pytest.mark.parametrize("flag", ["--rows", "--gpus"])
def test_a_count_is_a_whole_number_above_0(flag: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["import", "trl", "train.sh", flag, text])
    assert f"{flag}: {text!r} must be a whole number above 0" in capsys.readouterr().err


def test_an_unknown_sink_is_named_beside_those_that_there_are(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(Path(RECIPE).read_text())
    parser = ArgumentParser()
    log.add_arguments(parser)
    with pytest.raises(ConfigError, match="no sink has the name 'tensorbord'; did you mean `tensorboard`"):
        log.main(parser.parse_args([str(tmp_path), "tensorbord"]))
    with pytest.raises(ConfigError, match=r"has no logging\.sinks; name one: fourfold log"):
        log.main(parser.parse_args([str(tmp_path)]))
