"""The held-out sets of a recipe: one or several tables, their names, and what they inherit."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold import config
from fourfold.errors import ConfigError
from tests.unit.config.test_config import RECIPE, write

SETS = """
[evaluation]
samples_per_prompt = 3
max_prompts = 7
[[data.eval]]
path = "sets/hard problems.jsonl"
temperature = 0.0
max_new_tokens = 5
[[data.eval]]
name = "own"
reasoning_gym = "products"
size = 4
samples_per_prompt = 2
max_prompts = 0
"""


def test_a_set_has_the_keys_of_the_recipe_unless_it_has_its_own(tmp_path: Path) -> None:
    settings = config.load(write(tmp_path, RECIPE + SETS))
    found = [(s.name, s.samples_per_prompt, s.max_prompts, s.temperature, s.max_new_tokens) for s in settings.eval_sets]
    assert found == [("hard-problems", 3, 7, 0.0, 5), ("own", 2, 0, 1.0, 16)]
    (tmp_path / "dumped.toml").write_text(config.dump(settings))
    assert config.load(tmp_path / "dumped.toml") == settings


def test_one_table_is_a_list_of_one_and_the_holdout_comes_first(tmp_path: Path) -> None:
    text = RECIPE + '[data.eval]\npath = "a.jsonl"\n[data.holdout]\ngroups = 2\n'
    settings = config.load(write(tmp_path, text), ["data.eval.samples_per_prompt=4"])
    assert [(s.name, s.source is None, s.samples_per_prompt) for s in settings.eval_sets] == [
        ("holdout", True, 1), ("a", False, 4)
    ]  # fmt: skip
    assert config.load(write(tmp_path, RECIPE)).eval_sets == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('name = "own"', 'name = "hard-problems"'), ':26  data: data.eval.1.name = "hard-problems" is'),
        (("temperature = 0.0", "temperature = 0.001"), "[[data.eval]] number 1 temperature: 0.001 is below 0.01"),
        (("max_new_tokens = 5", "max_new_tokens = 64"), "data.eval hard-problems: max_new_tokens = 64 leaves no room"),
        (("samples_per_prompt = 2", "samples_per_prompt = 0"), "[[data.eval]] 'own' samples_per_prompt = 0"),
        (("max_prompts = 0", "max_prompt = 0"), "[[data.eval]] 'own' max_prompt: no such key. Did you mean"),
        (
            (
                "samples_per_prompt = 2\nmax_prompts = 0",
                "samples_per_prompt = 9\n[rollout]\nmax_concurrent_samples = 8",
            ),
            "rollout.max_concurrent_samples = 8 is below data.eval own: samples_per_prompt = 9",
        ),
        (
            ("max_prompts = 0", '[agents]\nsource = "tasks"\n[gateway]\nreplicas = 1'),
            "data.eval hard-problems: temperature and max_new_tokens are for answers that the coordinator",
        ),
    ],
)
def test_a_mistake_in_a_set_is_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(write(tmp_path, RECIPE + SETS.replace(*change)))
    assert message in caught.value.message
