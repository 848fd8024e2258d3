"""`fourfold eval` as a process, with the real coordinator and reward service and toy engines; and with real ones."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fourfold_coordinator.state.eval_results import SetResult
from tests.fakes.command_line import Stage, staged, until, working_in
from tests.support.tiny_run import logs_of, write_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

EVALUATION = {"every_steps": 2, "samples_per_prompt": 4}


@pytest.fixture
def make_stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    with staged(tmp_path) as make:
        yield make


def finished(stage: Stage, *words: str, command: str = "eval", code: int = 0) -> tuple[str, str]:
    """Run a command to its end; return what it wrote."""
    process = stage.start(*words, command=command)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == code, output + errors
    assert stage.descendants() == {}
    return output, errors


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def comparable(row: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a set without what differs between two evaluations of the same weights."""
    return {key: value for key, value in row.items() if key in SetResult.__dataclass_fields__ and key != "seconds"}


@pytest.mark.slow
def test_a_command_repeats_the_evaluations_of_a_run(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=4, evaluation=EVALUATION, checkpoint={"every_steps": 2, "export_every_steps": 2})
    finished(stage, "toy.toml", command="run")
    evals = {row["step"]: row for row in read(stage.run_dir / "report.json")["evals"]}
    assert len({row["score"] for row in evals.values()}) > 1, "the weights of the steps differ"

    rows = "".join(json.dumps({"question": f"{a} * 12 =", "answer": str(12 * a)}) + "\n" for a in range(3))
    (stage.root / "more.jsonl").write_text(rows)
    words = ("--data", "more.jsonl", "--out", "result.json")
    output, _ = finished(stage, "runs/toy", *words)
    found, folder = read(stage.root / "result.json"), stage.run_dir / "evaluations" / "step-4"
    assert found == read(folder / "evaluation.json")
    assert (found["step"], found["model"]) == (4, "runs/toy/model")
    assert comparable(found["sets"][0]) == comparable(evals[4]["sets"][0])
    assert [row["name"] for row in found["sets"]] == ["holdout", "more"]
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert len(lines) == sum(row["answer_count"] for row in found["sets"])
    shown = [re.split(r" {2,}", line) for line in output.splitlines()]
    assert ["set", "score", "pass@1", "pass@2", "pass@4", "maj@2", "maj@4"] in [row[:7] for row in shown]
    assert {"holdout", "more", "mean of sets"} <= {row[0] for row in shown}

    finished(stage, "runs/toy", "--checkpoint", "2")
    again = read(stage.run_dir / "evaluations" / "step-2" / "evaluation.json")
    assert (again["model"], comparable(again["sets"][0])) == ("runs/toy/model-step-2", comparable(evals[2]["sets"][0]))


@pytest.mark.slow
def test_a_checkpoint_is_exported_before_it_is_evaluated(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=4, evaluation=EVALUATION, checkpoint={"every_steps": 2, "keep": 2})
    finished(stage, "toy.toml", command="run")
    evals = {row["step"]: row for row in read(stage.run_dir / "report.json")["evals"]}
    output, _ = finished(stage, "runs/toy", "--checkpoint", "2")
    assert "Exporting the checkpoint of step 2 to runs/toy/model-step-2" in output
    found = read(stage.run_dir / "evaluations" / "step-2" / "evaluation.json")
    assert comparable(found["sets"][0]) == comparable(evals[2]["sets"][0])
    best = max((step for step in evals if step), key=lambda step: (evals[step]["score"], step))
    finished(stage, "runs/toy", "--checkpoint", "best")
    folder = stage.run_dir / "evaluations" / (f"step-{best}-2" if best == 2 else f"step-{best}")
    assert read(folder / "evaluation.json")["step"] == best
    _, errors = finished(stage, "runs/toy", "--checkpoint", "3", code=1)
    assert "--checkpoint 3: runs/toy has the weights of step 2, 4; give one of these steps, or `best`" in errors


@pytest.mark.slow
def test_a_model_folder_is_evaluated_with_a_recipe(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(evaluation=EVALUATION)
    shutil.copytree(stage.root / "model-folder", stage.root / "other-model")
    finished(stage, "--model", "other-model", "--recipe", "toy.toml", "--set", "evaluation.samples_per_prompt=3")
    found = read(stage.root / "evaluations" / "toy" / "evaluation.json")
    assert (found["step"], found["model"]) == (None, "other-model")
    assert [each["k"] for each in found["sets"][0]["pass_at"]] == [1, 2, 3]
    assert not (stage.root / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["while the services start", "while answers are sampled"])
def test_ctrl_c_ends_every_process(make_stage: Callable[..., Stage], when: str) -> None:
    stage = make_stage()
    process = stage.start("--model", "model-folder", "--recipe", "toy.toml", command="eval", delay=30)
    folder = stage.root / "evaluations" / "toy"
    wanted = " serve rollout " if when == "while the services start" else "evaluating"
    log = folder / "logs" / "rollout-0.log"

    def reached() -> bool:
        if wanted == "evaluating":
            return log.exists() and "READY" in log.read_text()
        return any(wanted in line for line in stage.descendants().values())

    until(lambda: reached() or process.poll() is not None, 40)
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130 and "Stopped by SIGINT (Ctrl-C). Nothing was measured" in errors
    until(lambda: stage.descendants() == {}, 5)
    assert not (folder / "evaluation.json").exists()


def test_wrong_arguments_start_nothing(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(data={"holdout": None})
    for words, code, text in (
        ((), 2, "give RUN_DIR, with or without --checkpoint, or --model FOLDER and --recipe FILE"),
        (("runs/none",), 1, "not the folder of a run (no config.toml)"),
        (("--model", "model-folder", "--recipe", "toy.toml"), 1, "toy.toml has no held-out set; add [[data.eval]]"),
    ):
        _, errors = finished(stage, *words, code=code)
        assert text in errors
    assert not (stage.root / "evaluations").exists()


TABLES = """
[evaluation]
every_steps = 2
samples_per_prompt = 4

[trainer]
learning_rate = 1e-3

[checkpoint]
every_steps = 2
keep = 2
"""


@pytest.mark.slow
@pytest.mark.soak  # four minutes; in CI the same commands run with engines that need no model
@pytest.mark.timeout(600)
def test_real_engines_repeat_the_evaluations_of_a_run(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    """With vLLM and DeepSpeed: of the exported model, and of a checkpoint that a trainer exports first."""
    write_run(tmp_path, tiny_model("llama_tied", dtype="float32"), prompts_per_step=2, tables=TABLES)

    def fourfold(*words: str) -> str:
        command = [sys.executable, "-m", "fourfold", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stdout + done.stderr + logs_of(tmp_path / "runs" / "tiny")
        assert working_in(tmp_path) == {}
        return done.stdout

    fourfold("run", "recipe.toml", "--set", "model.dtype=float32")
    run_dir = tmp_path / "runs" / "tiny"
    evals = {row["step"]: row for row in read(run_dir / "report.json")["evals"]}
    assert len({row["score"] for row in evals.values()}) > 1, "the weights of the steps differ"
    for step, words in ((3, ()), (2, ("--checkpoint", "2"))):
        fourfold("eval", "runs/tiny", *words)
        found = read(run_dir / "evaluations" / f"step-{step}" / "evaluation.json")
        assert comparable(found["sets"][0]) == comparable(evals[step]["sets"][0])
