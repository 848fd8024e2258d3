"""Tests the arguments of `fourfold serve trainer --rank`, and numbers of the command line."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli.main import _ranks, main
from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold.service.lifecycle import ServeOptions
from fourfold_coordinator.cli import log
from fourfold_trainer.service.rank_rendezvous import check_ranks


def options(ranks: range, **tables: Any) -> ServeOptions:
    config = Config.model_validate(
        {
            "name": "ranks",
            "steps": 1,
            "model": {"source": "tiny"},
            "data": {"train": {"path": "train.jsonl"}},
            "sampling": {"max_new_tokens": 8},
            "batch": {"prompts_per_step": 4, "group_size": 4},
            "trainer": {"ranks": 4, **tables.pop("trainer", {})},
            **tables,
        }
    )
    return ServeOptions(
        role="trainer", recipe=Path("r.toml"), config=config, member_id="trainer-0", coordinator="127.0.0.1:1",
        ranks=ranks,
    )  # fmt: skip


@pytest.mark.parametrize(("text", "ranks"), [("0", range(1)), ("3", range(3, 4)), ("8-15", range(8, 16))])
def test_ranks_are_one_or_first_and_last(text: str, ranks: range) -> None:
    assert _ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "-1", "a", "3-", "4-3", "1-2-3", "0-0x2"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="names no ranks; give one, as 0, or the first and the last"):
        _ranks(text)


@pytest.mark.parametrize(
    ("words", "role"),
    [
        (["rollout", "r.toml", "--rank", "0"], "trainer"),
        (["rollout", "r.toml", "--interface", "eth0"], "trainer"),
        (["trainer", "r.toml", "--evaluate"], "coordinator"),
        (["rollout", "--list"], "reward"),
        (["rollout", "r.toml", "--scorer", "x"], "reward"),
        (["reward", "r.toml", "--pool", "x"], "rollout"),
        (["rollout", "r.toml", "--engine", "h:1"], "gateway"),
        (["rollout", "r.toml", "--gateway", "h:1"], "environment"),
    ],
)
def test_an_option_of_another_service_is_refused(
    words: list[str], role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    option = next(word for word in words if word.startswith("--"))
    assert main(["serve", *words]) == 2
    said = f"fourfold serve {words[0]}: {option} is an option of `fourfold serve {role}`; remove it\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (options(range(2, 5)), r"--rank 2-4: the recipe has trainer.ranks = 4; raise it, or pass lower ranks"),
        (
            options(range(1), trainer={"step_timeout_seconds": 60}),
            r"--rank 0: trainer.attach_seconds = 600 must be below trainer.step_timeout_seconds = 60",
        ),
        (
            options(range(1), algorithm={"preset": "ppo"}, critic={"ranks": 2}),
            r"--rank 0: a critic with ranks of its own \(critic.ranks = 2\) is on one machine",
        ),
    ],
)
def test_ranks_that_cannot_meet_are_refused_before_anything_is_loaded(made: ServeOptions, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_ranks(made)


def test_ranks_meet_through_a_coordinator() -> None:
    made = options(range(1, 2))
    with pytest.raises(ConfigError, match="through the coordinator; add --coordinator"):
        check_ranks(ServeOptions(**{**{n: getattr(made, n) for n in made.__slots__}, "coordinator": ""}))
    check_ranks(made)


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
