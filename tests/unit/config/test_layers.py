"""Recipes of several layers: files that include others, and keys of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fourfold import config
from fourfold.config import layers
from fourfold.errors import ConfigError
from tests.unit.config.test_config import RECIPE, write


def refused(path: Path, *assignments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config.load(path, assignments)
    return caught.value.message.replace(str(path.parent), "DIR")


def test_a_file_replaces_single_keys_of_the_file_that_it_includes(tmp_path: Path) -> None:
    write(tmp_path, RECIPE)
    top = tmp_path / "top.toml"
    top.write_text('include = "recipe.toml"\nsteps = 9\n[sampling]\ntemperature = 0.5\n[[reward]]\nname = "a"\n')
    found = config.load(top)
    assert (found.steps, found.name) == (9, "tiny")
    assert (found.sampling.temperature, found.sampling.max_new_tokens) == (0.5, 16)
    assert config.load(top, ["steps=2"]).steps == 2
    assert "include" not in config.dump(found), "the folder of the run needs no other file"


def test_included_files_are_read_in_order_and_relative_to_the_file(tmp_path: Path) -> None:
    inner = tmp_path / "base"
    inner.mkdir()
    write(inner, RECIPE)
    (inner / "long.toml").write_text('include = ["recipe.toml"]\nsteps = 50\n')
    (inner / "small.toml").write_text("[batch]\ngroup_size = 2\n")
    top = tmp_path / "top.toml"
    top.write_text('include = ["base/long.toml", "base/small.toml"]\n')
    found = config.load(top)
    assert (found.steps, found.batch.group_size, found.batch.prompts_per_step) == (50, 2, 2)


def test_links_in_a_circle_and_deep_nesting_are_mistakes(tmp_path: Path) -> None:
    (tmp_path / "a.toml").symlink_to("b.toml")
    (tmp_path / "b.toml").symlink_to("a.toml")
    assert "DIR/a.toml: cannot read the recipe (Too many levels" in refused(tmp_path / "a.toml")
    deep = write(tmp_path, RECIPE + "x = " + "[" * 2000)
    assert "DIR/recipe.toml: its values, tables or included files nest too deeply" in refused(deep)


def test_a_byte_order_mark_is_no_part_of_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(b"\xef\xbb\xbf" + write(tmp_path, RECIPE).read_bytes())
    assert config.load(path).name == "tiny"


def test_a_mistake_is_named_in_the_file_that_has_it(tmp_path: Path) -> None:
    write(tmp_path, RECIPE.replace("group_size = 4", "group_size = 4\nprompts = 3"))
    top = tmp_path / "top.toml"
    top.write_text('include = "recipe.toml"\n\n[sampling]\ntemperature = -1\n')
    message = refused(top)
    assert "DIR/recipe.toml:14  batch.prompts: no such key" in message
    assert "DIR/top.toml:4  sampling.temperature = -1" in message
    assert "--set steps  steps = 'many': input should be" in refused(top, "steps=many")


def test_a_rule_about_two_tables_is_named_at_its_first_key(tmp_path: Path) -> None:
    path = write(tmp_path, RECIPE + "[placement]\ncolocated = true\n")
    assert "DIR/recipe.toml:18  the recipe: placement.colocated = true needs" in refused(path)
    plain = write(tmp_path, RECIPE)
    assert "--set placement.colocated  the recipe: placement.colocated" in refused(plain, "placement.colocated=true")


def test_a_file_that_is_included_twice_is_read_once_and_counts_at_its_last_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    parse = layers._parse

    def note(path: Path) -> Any:
        read.append(path.name)
        return parse(path)

    monkeypatch.setattr(layers, "_parse", note)
    levels = 40  # each reads the next twice, by two names
    (tmp_path / f"{levels}.toml").write_text(RECIPE)
    for level in range(levels):
        link = tmp_path / f"link{level + 1}.toml"
        link.symlink_to(f"{level + 1}.toml")
        (tmp_path / f"{level}.toml").write_text(f'include = ["{level + 1}.toml", "{link.name}"]\nseed = {level}\n')
    assert config.load(tmp_path / "0.toml").seed == 0 and len(read) == levels + 1
    (tmp_path / "base.toml").write_text(RECIPE + "[retry]\nrestarts = 5\ndata = 9\n")
    (tmp_path / "a.toml").write_text('include = "base.toml"\nseed = 3\n[retry]\ndata = 8\n')
    (tmp_path / "b.toml").write_text('include = "base.toml"\n[retry]\nrestarts = 7\n')
    (tmp_path / "top.toml").write_text('include = ["a.toml", "b.toml"]\n')
    found = config.load(tmp_path / "top.toml")
    assert (found.seed, found.retry.restarts, found.retry.data) == (3, 7, 9)


@pytest.mark.parametrize(
    ("include", "message"),
    [
        ('"gone.toml"', "top.toml:1  include = 'gone.toml': DIR/gone.toml: cannot read the recipe (No such file"),
        ('"top.toml"', "top.toml:1  include = 'top.toml': the files include each other in a circle"),
        ('"loop.toml"', "loop.toml:1  include = 'top.toml': the files include each other in a circle"),
        ('"broken.toml"', "top.toml:1  include = 'broken.toml': DIR/broken.toml: not valid TOML"),
        ("3", "top.toml:1  include = 3: must be the path of a TOML file, or a list of paths"),
        ('["recipe.toml", 3]', "must be the path of a TOML file, or a list of paths"),
    ],
)
def test_a_file_that_cannot_be_included_is_one_clear_error(tmp_path: Path, include: str, message: str) -> None:
    (tmp_path / "loop.toml").write_text('include = "top.toml"\n')
    (tmp_path / "broken.toml").write_text("steps = \n")
    top = tmp_path / "top.toml"
    top.write_text(f"include = {include}\n")
    found = refused(top)
    assert message in found and "\n" not in found


@pytest.mark.parametrize(
    ("assignment", "key", "value"),
    [
        ("steps=7", "steps", 7),
        ("name=other", "name", "other"),
        ('name="other"', "name", "other"),
        ("trainer.learning_rate=1e-5", "trainer.learning_rate", 1e-5),
        ("trainer . learning_rate = 2e-5", "trainer.learning_rate", 2e-5),
        ("model.source=models/a=b", "model.source", "models/a=b"),
        ("sampling.stop_token_ids=[1, 2]", "sampling.stop_token_ids", (1, 2)),
        ("reward.timeout_seconds=3", "reward.0.timeout_seconds", 3.0),
        ("reward.0.timeout_seconds=3", "reward.0.timeout_seconds", 3.0),
    ],
)
def test_a_key_of_the_command_line_wins(tmp_path: Path, assignment: str, key: str, value: object) -> None:
    path = write(tmp_path, RECIPE + '[[reward]]\nname = "a"\nfunction = "last_number"\n')
    found = config.load(path, ["steps=5", assignment])
    for part in key.split("."):
        found = found[int(part)] if part.isdecimal() else getattr(found, part)  # type: ignore[index]
    assert found == value


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("steps", "--set steps: must be KEY=VALUE"),
        ("=3", "--set =3: must be KEY=VALUE"),
        ("a b=3", "must be KEY=VALUE"),
        ("steps\nname=3", "must be KEY=VALUE"),
        ("include=x.toml", "only files include others"),
        ("steps.x=3", "--set steps.x=3: steps is no table"),
        ("reward.2.weight=3", "reward has 2 tables; give a number from 0"),
        ("reward.weight=3", "reward has 2 tables; give a number from 0"),
        ("reward.0=3", "--set reward.0=3: reward.0 is an element of a list; set the list, or a key of it"),
        ("stepz=3", "--set stepz  stepz: no such key. Did you mean `steps`?"),
        ("trainer.lr=3", "--set trainer.lr  trainer.lr: no such key. Did you mean `learning_rate`?"),
        ("steps=0", "--set steps  the recipe: `steps` is missing or 0"),
    ],
)
def test_a_mistake_of_the_command_line_is_named(tmp_path: Path, assignment: str, message: str) -> None:
    rewards = "".join(f'[[reward]]\nname = "{name}"\nfunction = "last_number"\n' for name in "ab")
    assert message in refused(write(tmp_path, RECIPE + rewards), assignment)
