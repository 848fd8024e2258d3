"""The tutorials: what a reader copies from them works, and their tables of keys are those of the recipes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fourfold import ScoreInput, config
from fourfold_reward.environment import Action, Message, Task
from tests.support.tutorials import PAGES, RECIPES, ROOT, commands_of, files_of


@pytest.mark.parametrize("name", PAGES)
def test_a_table_of_keys_has_the_values_of_the_recipe(name: str) -> None:
    tables = config.load(RECIPES[name]).model_dump()
    rows = re.findall(r"^\| `([a-z_]+(?:\.[a-z_]+)+)` \| `?([^|`]+)`? \|", PAGES[name].read_text(), re.MULTILINE)
    for key, text in rows:
        if re.fullmatch(r"[\d.e-]+|\"[^\"]*\"|true|false", text.strip()):
            value = tables
            for part in key.split("."):
                value = (value[0] if isinstance(value, tuple) else value)[part]
            wanted = tomllib.loads(f"x = {text.strip()}")["x"]
            assert value in (wanted, (wanted,)), f"{PAGES[name].name}: {key}"


@pytest.mark.parametrize("name", PAGES)
def test_a_tutorial_runs_its_recipe(name: str) -> None:
    recipe = str(RECIPES[name].relative_to(ROOT))
    commands = commands_of(PAGES[name])
    assert any(words[:3] == ["fourfold", "plan", recipe] for words in commands)
    assert any(words[:3] == ["fourfold", "run", recipe] for words in commands)
    for words in commands:
        if words[:2] == ["fourfold", "run"] and words[2].endswith(".toml"):
            config.load(ROOT / words[2], [words[i + 1] for i, word in enumerate(words) if word == "--set"])


def test_the_files_of_the_first_tutorial_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, text in files_of(PAGES["own_data"]).items():
        (tmp_path / path).write_text(text)
    done = subprocess.run([sys.executable, "make_data.py"], cwd=tmp_path, timeout=30, check=False)
    assert done.returncode == 0
    recipe = config.load(RECIPES["own_data"])
    for source in (*recipe.data.train, *recipe.data.eval):
        for line in (tmp_path / source.path).read_text().splitlines():
            assert {recipe.data.prompt_field, recipe.data.answer_field} <= json.loads(line).keys()
    monkeypatch.syspath_prepend(tmp_path)
    import my_reward  # type: ignore[import-not-found]

    answers = {"It is 7.": 1.0, "It is 8.": 0.1, "no idea": 0.0}
    for completion, score in answers.items():
        sample = ScoreInput(sample_id="s", prompt="", completion=completion, answer="7", metadata={})
        assert my_reward.score(sample) == score


def test_the_game_of_the_agent_tutorial_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_game.py").write_text(files_of(PAGES["agents_guessing"])["my_game.py"])
    monkeypatch.syspath_prepend(tmp_path)
    import my_game  # type: ignore[import-not-found]

    game = my_game.Between(width=3)
    first = game.reset(Task(task_id="t", group_id="g", answer="7"))
    assert first.content == "Name a number above 7 and below 11."
    contents = [game.step(_action(text)).content for text in ("seven", "7", "11")]
    assert contents == ["No number.", "7 is too low.", "11 is too high."]
    assert game.step(_action("It is 8.")).reward == 1 / 4 and game.truncate().reward == 0


def _action(text: str) -> Action:
    return Action(text=text, message=Message("assistant", text))


@pytest.mark.skipif(not shutil.which("node"), reason="Node is not installed")
def test_the_program_of_the_other_language_works(tmp_path: Path) -> None:
    page = PAGES["other_language"]
    (tmp_path / "score.js").write_text(files_of(page)["score.js"])
    (line,) = re.findall(r"^echo '(.*)' \| node score\.js$", page.read_text(), re.MULTILINE)
    lines = [line, line.replace("12.", "13."), line.replace("12.", "unknown")]
    done = subprocess.run(
        ["node", "score.js"],
        cwd=tmp_path,
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert [json.loads(row)["score"] for row in done.stdout.splitlines()] == [1, 0.1, 0]
