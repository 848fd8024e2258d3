"""Sources `run:NAME`: which export of which run they name, and what they say about a run that has none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fourfold.errors import ConfigError
from fourfold.model import folder as model_folder
from fourfold.model import runs
from fourfold.model.classifier import ClassifierFolder
from fourfold.model.runs import ExpectedRun
from fourfold_coordinator.launch.run_folder import pin_sources
from fourfold_coordinator.launch.run_names import CONFIG_FILE, MODEL_FOLDER, REPORT_FILE, STEP_FOLDER
from tests.unit.model.test_folder import write_model

KEY = "model.source"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_run(name: str = "sft", *, steps: int = 60, done: int | None = 60, exports: tuple[str, ...] = ()) -> Path:
    """Write a run with 60 steps, evaluations after 20, 40 and 60, and a checkpoint of step 20."""
    folder = Path("runs") / name
    (folder / "checkpoints" / "step-000020").mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(f"steps = {steps}\n")
    scores = {20: 0.5, 40: 0.75, 60: 0.25}
    if done is not None:
        evals = [{"step": step, "score": score} for step, score in scores.items()]
        (folder / REPORT_FILE).write_text(json.dumps({"steps": done, "evals": evals}))
    for export in exports:
        write_model(folder / export)
    return folder


def test_a_source_names_the_last_the_best_or_any_export_of_a_run() -> None:
    folder = make_run(exports=(MODEL_FOLDER, f"{STEP_FOLDER}40"))
    wanted = {"run:sft": MODEL_FOLDER, "run:sft@60": MODEL_FOLDER, "run:sft@40": "model-step-40"}
    for source, export in {**wanted, "run:sft@best": "model-step-40"}.items():
        assert model_folder.resolve(source) == folder.absolute() / export
    assert model_folder.shape("run:sft").hidden == 8
    model_folder.check("run:sft@best")
    tables = {
        "model": {"source": "run:sft@best"},
        "reward": [{"model": {"source": "run:sft"}}],
        "data": {"path": "run:x"},
    }
    assert pin_sources(tables) == {**tables, "model": {"source": "run:sft@40"}}, "a resumed run has the same weights"


@pytest.mark.parametrize(
    ("source", "run", "text"),
    [
        ("run:stf", {}, "no run stf in .*/runs; did you mean run:sft. To make it: fourfold run RECIPE.toml --name stf"),
        ("run:sft", {"done": None}, "the run sft has not ended; .* fourfold run --resume runs/sft"),
        ("run:sft", {"steps": 90}, "the run sft has not ended"),
        ("run:sft", {}, "runs/sft has the weights of step 20; give one of these steps"),
        ("run:sft@20", {"exports": ("model",)}, "no export of step 20. .* --checkpoint 20"),
        ("run:sft@best", {"exports": ("model",)}, "no export of step 20"),
        ("run:sft@30", {}, "runs/sft has the weights of step 20; give one of these steps"),
        ("run:sft@last", {}, "write run:NAME, run:NAME@STEP or run:NAME@best"),
        ("run:latest", {}, "runs/latest is a link that each start moves"),
        ("run:../sft", {}, "not the source of a run; write run:NAME"),
    ],
)
def test_a_run_without_the_export_is_named_with_the_command_that_makes_it(
    source: str, run: dict[str, Any], text: str
) -> None:
    make_run(**run)
    with pytest.raises(ConfigError, match=text) as caught:
        model_folder.resolve(source)
    assert caught.value.message.startswith(f"{KEY} = {source!r}: ")
    with pytest.raises(ConfigError, match=f"^reward.model.source = {re.escape(repr(source))}: "):
        ClassifierFolder.read(source)


def test_the_best_of_a_run_without_scores_is_refused() -> None:
    (make_run() / REPORT_FILE).write_text('{"steps": 60, "evals": [{"step": 60, "score": 0.5}]}')
    with pytest.raises(
        ConfigError, match="runs/sft has no held-out score of the steps whose weights it has: step 20; give one"
    ):
        model_folder.resolve("run:sft@best")


def test_an_expected_run_has_the_files_of_the_model_that_it_begins_with() -> None:
    base = str(write_model(Path("base")))
    run = ExpectedRun(source=base, steps=60, export_every_steps=20)
    with runs.expect_runs() as expect:
        expect("sft", run)
        for source in ("run:sft", "run:sft@40", "run:sft@60", "run:sft@best"):
            assert model_folder.resolve(source) == Path(base).absolute()
            assert runs.pin(source, KEY) == source
        assert ClassifierFolder.read("run:sft").parameter_count == 10, "its head is made by the run"
        with pytest.raises(ConfigError, match=r"exports its last weights, run:sft, and those of every .* = 20"):
            model_folder.resolve("run:sft@30")
    with pytest.raises(ConfigError, match="no run sft in"):
        model_folder.resolve("run:sft")
