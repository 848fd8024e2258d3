"""Removed keys: another value than the only one left is an error that says what to use; run folders still load."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold import config
from fourfold.config import recipe
from fourfold.config.older_recipes import REMOVED_KEYS, without_removed
from fourfold.errors import ConfigError
from tests.unit.config.test_config import RECIPE, write


@pytest.mark.parametrize("name", sorted(REMOVED_KEYS))
def test_a_removed_key_loads_with_its_value_and_is_refused_with_another_one(tmp_path: Path, name: str) -> None:
    table, _, key = name.rpartition(".")
    text = RECIPE if f"[{table}]\n" in RECIPE else f"{RECIPE}[{table}]\n"
    before, after = text.split(f"[{table}]\n")
    line = text.count("\n", 0, len(before)) + 2

    def load(assignment: str) -> config.Config:
        return config.load(write(tmp_path, f"{before}[{table}]\n{assignment}\n{after}"))

    if (value := REMOVED_KEYS[name].value) is not None:
        assert load(f"{key} = {recipe.toml_value(value)}") == load("")
    with pytest.raises(ConfigError) as caught:
        load(f'{key} = "other"')
    assert f"recipe.toml:{line}  {name} = 'other': there is no such key any more; remove it: " in caught.value.message
    assert key not in recipe._known_keys(tuple(table.split(".")))


def test_each_of_several_tables_is_searched(tmp_path: Path) -> None:
    text = f'{RECIPE}[[reward]]\nname = "a"\ncache_samples = 65536\n[[reward]]\nname = "b"\nhedge_seconds = 2.0\n'
    with pytest.raises(ConfigError, match=r"\[\[reward\]\] 'b' hedge_seconds = 2.0: there is no such key any more"):
        config.load(write(tmp_path, text))


def test_a_table_that_a_run_stored_loses_its_removed_keys() -> None:
    assert without_removed({"name": "a", "cache_samples": 0}, "reward") == {"name": "a"}
