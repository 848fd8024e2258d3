"""Tests the arguments of `fourfold serve trainer --rank`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli.main import _ranks, main
from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold.service.lifecycle import ServeOptions
from fourfold_trainer.service.meeting_point import check_ranks


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
