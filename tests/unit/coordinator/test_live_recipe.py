"""Tests which changes of a recipe count while its run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fourfold import config as configuration
from fourfold_coordinator.training.live_recipe import LiveRecipe
from tests.fakes.toy import make_config

SLEEPS: dict[str, Any] = {"rollout": {"gpus_per_replica": 1, "sleep_mode": True}}


async def test_a_key_of_the_command_line_stays(tmp_path: Path) -> None:
    path, before = tmp_path / "config.toml", make_config(tmp_path, asynchrony={"stale": "train"})
    path.write_text(configuration.dump(make_config(tmp_path)))
    recipe = LiveRecipe(path, before, ["asynchrony.stale=train"])
    path.write_text(path.read_text() + "# another text\n")
    assert not await recipe.update() and recipe.config.asynchrony.stale == "train"


async def test_a_lag_that_the_running_engines_cannot_have_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is without a mistake: it also ends the sleep of the engines, which cannot change during a run."""
    path, before = tmp_path / "config.toml", make_config(tmp_path, **SLEEPS)
    path.write_text(configuration.dump(before))
    recipe = LiveRecipe(path, before)
    path.write_text(configuration.dump(make_config(tmp_path, asynchrony={"max_policy_lag": 2})))
    assert not await recipe.update() and recipe.config == before
    assert "recipe changed and is ignored: asynchrony.max_policy_lag = 2" in caplog.text
    path.write_text(configuration.dump(make_config(tmp_path, asynchrony={"stale": "train"})))
    assert await recipe.update() and recipe.config.asynchrony.stale == "train"
    assert recipe.config.rollout == before.rollout and "only [asynchrony] can change" in caplog.text
