"""The folder of a run has the recipe that runs, and each change of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fourfold import config as configuration
from fourfold.config import Config
from fourfold_coordinator.state.files import DiskWriter
from fourfold_coordinator.state.ledger import Ledger, SampleState
from fourfold_coordinator.state.recipe_history import CHANGES_FILE, RecipeHistory, describe_changes
from fourfold_coordinator.state.run_board import RunBoard
from fourfold_coordinator.training.live_recipe import LiveRecipe
from tests.fakes.toy import make_config


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    (tmp_path / "run").mkdir()
    ledger = Ledger(tmp_path / "run" / "ledger.sqlite")
    yield ledger
    ledger.close()


class Run:
    """Coordinators of one run that are started one after the other, each with its recipe."""

    def __init__(self, root: Path, ledger: Ledger) -> None:
        self.file, self.ledger = root / "run" / "config.toml", ledger
        self.disk = DiskWriter(root, RunBoard(name="toy", step_count=1), wait_seconds=1.0)

    async def start(self, recipe: Path, **changes: Any) -> None:
        config = write(recipe, **changes)
        await RecipeHistory(self.ledger, self.disk, self.file, recipe).record(config)

    def changes(self) -> list[tuple[int, dict[str, Any]]]:
        path = self.file.with_name(CHANGES_FILE)
        lines = path.read_text().splitlines() if path.exists() else []
        return [(entry["step"], entry["changes"]) for entry in map(json.loads, lines)]


def write(recipe: Path, **changes: Any) -> Config:
    config = make_config(recipe.parent, **changes)
    recipe.write_text(configuration.dump(config))
    return config


def do_step(ledger: Ledger) -> None:
    ids = ledger.issue(step=1, position=0, count=1).sample_ids
    for state in (SampleState.RUNNING, SampleState.ROLLED, SampleState.READY):
        ledger.move(ids, state)
    ledger.lease(1, ids)
    ledger.acknowledge(1, policy_version=1, skipped_reason="", data_position=1)


async def test_a_coordinator_that_is_restarted_with_an_edited_recipe_records_it(
    tmp_path: Path, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    run, recipe = Run(tmp_path, ledger), tmp_path / "mine.toml"
    await run.start(recipe, steps=6)
    await run.start(recipe, steps=6)
    assert configuration.load(run.file).steps == 6 and run.changes() == [] and not caplog.text
    do_step(ledger)
    await run.start(recipe, steps=2, sampling={"max_new_tokens": 7})
    assert configuration.load(run.file) == configuration.load(recipe), "what runs"
    ((step, changes),) = run.changes()
    assert step == 1 and changes.keys() == {"steps", "sampling.max_new_tokens"} and changes["steps"] == [6, 2]
    assert f"recipe changed: after_step=1 file={run.file} changes: steps 6 -> 2, sampling.max_" in caplog.text


async def test_an_edit_of_the_file_of_the_run_is_recorded_and_the_file_kept(tmp_path: Path, ledger: Ledger) -> None:
    run = Run(tmp_path, ledger)
    await run.start(run.file, steps=6)
    run.file.write_text("# mine\n" + run.file.read_text())
    config = make_config(run.file.parent, steps=9)
    await RecipeHistory(ledger, run.disk, run.file, run.file).record(config)
    assert run.changes() == [(0, {"steps": [6, 9]})] and run.file.read_text().startswith("# mine\n")
    longer = config.model_copy(update={"steps": 10})
    await RecipeHistory(ledger, run.disk, run.file, run.file, ["steps=10"]).record(longer)
    assert configuration.load(run.file) == longer, "with keys of the command line"
    history = RecipeHistory(ledger, run.disk, run.file, run.file, ["steps=11"])
    longest = config.model_copy(update={"steps": 11})
    assert describe_changes(history.changes(longest)) == "steps 10 -> 11"
    assert configuration.load(run.file) == longer, "a check writes nothing"
    await history.record(longest)
    run.file.write_text("# mine\n" + run.file.read_text())
    await history.record(longest.model_copy(update={"steps": 12}))
    assert run.file.read_text().startswith("# mine\n"), "which its user edited since the first record"


async def test_a_run_without_a_recorded_recipe_is_compared_with_its_file(tmp_path: Path, ledger: Ledger) -> None:
    run = Run(tmp_path, ledger)
    run.file.write_text(configuration.dump(make_config(tmp_path, steps=4)))
    await run.start(tmp_path / "mine.toml", steps=5)
    assert run.changes() == [(0, {"steps": [4, 5]})]
    run.file.write_text("steps = ")
    await run.start(tmp_path / "mine.toml", steps=5)
    assert configuration.load(run.file).steps == 5 and len(run.changes()) == 1, "a broken file is repaired"


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
