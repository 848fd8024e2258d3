"""`fourfold sample` as a process, with the real coordinator and reward service and toy engines."""

from __future__ import annotations

import re
import shlex
import signal
from pathlib import Path

import pytest

from tests.fakes.command_line import staged, until
from tests.fakes.toy_services import CALLS_VARIABLE

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(120)]

WORDS = ("toy.toml", "--out", "rows.jsonl", "--select", "best", "--prompts", "40")


def test_kills_and_ctrl_c_neither_double_nor_lose_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CALLS_VARIABLE, "4")  # else all prompts are done at the same time
    with staged(tmp_path) as make:
        stage = make()
        groups, rows = tmp_path / "rows.jsonl.run" / "groups.jsonl", tmp_path / "rows.jsonl"

        def done() -> int:
            return groups.read_bytes().count(b"\n") if groups.exists() else 0

        whole = stage.start("toy.toml", "--out", "whole.jsonl", *WORDS[3:], command="sample")
        output, errors = whole.communicate(timeout=60)
        assert whole.returncode == 0, output + errors
        assert re.search(r"40 prompts, 160 scored answers, mean score 0\.\d+; 40 rows\nRows: whole.jsonl", output)

        killed = stage.start(*WORDS, command="sample", delay=0.4)
        until(lambda: done() > 2 or killed.poll() is not None, 40)
        assert killed.poll() is None, killed.communicate()
        killed.kill()
        killed.communicate(timeout=10)
        until(lambda: stage.descendants() == {}, 10)
        assert not rows.exists() and 2 < done() < 40

        stopped = stage.start(*WORDS, command="sample", delay=30)
        until(lambda: " serve rollout " in str(stage.descendants()) or stopped.poll() is not None, 40)
        stopped.send_signal(signal.SIGINT)
        _, errors = stopped.communicate(timeout=20)
        (command,) = re.findall(r"It continues after \d+ prompts that are done: \S*fourfold sample (.*)", errors)
        assert stopped.returncode == 130 and tuple(shlex.split(command)) == WORDS
        until(lambda: stage.descendants() == {}, 10)

        last = stage.start(*shlex.split(command), command="sample")
        output, errors = last.communicate(timeout=60)
        assert last.returncode == 0, output + errors
        made = (rows.read_text(), (tmp_path / "whole.jsonl").read_text())
        without_recipe = [re.sub(r'"recipe_sha256": "\w+"', "", text) for text in made]
        assert without_recipe[0] == without_recipe[1] and stage.descendants() == {}
        assert not groups.exists()

        other = stage.start(*WORDS, command="sample")
        _, errors = other.communicate(timeout=20)
        assert other.returncode == 1 and "--out rows.jsonl: it exists already; remove it" in errors
        rows.unlink()
        anew = stage.start(*WORDS[:-1], "3", "--set", "data.holdout.groups=2", command="sample")
        output, errors = anew.communicate(timeout=60)
        assert anew.returncode == 0 and "3 prompts, 12 scored answers" in output, output + errors
