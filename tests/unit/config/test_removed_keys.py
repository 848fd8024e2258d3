"""Removed keys: another value than the only one left is an error that says what to use; run folders still load."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold import config
from fourfold.config import recipe
from fourfold.config.older_recipes import REMOVED_KEYS, without_removed
from fourfold.errors import ConfigError
from tests.unit.config.test_config import RECIPE, write

# Keys that a table must have, and the header of a table of a list.
_REQUIRED = {"rollout.pool": 'name = "pool"\n'}
_HEADERS = {"rollout.pool": "[[rollout.pool]]"}


@pytest.mark.parametrize("name", sorted(REMOVED_KEYS))
def test_a_removed_key_loads_with_its_value_and_is_refused_with_another_one(tmp_path: Path, name: str) -> None:
    table, _, key = name.rpartition(".")
    header = _HEADERS.get(table, f"[{table}]") + "\n"
    before, after = (RECIPE if header in RECIPE else RECIPE + header).split(header)
    after = _REQUIRED.get(table, "") + after

    def load(assignment: str) -> config.Config:
        return config.load(write(tmp_path, f"{before}{header}{assignment}\n{after}"))

    if (value := REMOVED_KEYS[name].value) is not None:
        assert load(f"{key} = {recipe.toml_value(value)}") == load("")
    with pytest.raises(ConfigError) as caught:
        load(f'{key} = "other"')
    message = caught.value.message
    assert f"recipe.toml:{before.count(chr(10)) + 2}  " in message
    assert f"{key} = 'other': there is no such key any more; remove it: {REMOVED_KEYS[name].instead}" in message
    assert key not in recipe._known_keys(tuple(table.split(".")))


def test_each_of_several_tables_is_searched(tmp_path: Path) -> None:
    text = f'{RECIPE}[[reward]]\nname = "a"\ncache_samples = 65536\n[[reward]]\nname = "b"\nhedge_seconds = 2.0\n'
    with pytest.raises(ConfigError, match=r"\[\[reward\]\] 'b' hedge_seconds = 2.0: there is no such key any more"):
        config.load(write(tmp_path, text))


def test_a_table_that_a_run_stored_loses_its_removed_keys() -> None:
    assert without_removed({"name": "a", "cache_samples": 0}, "reward") == {"name": "a"}
