"""`fourfold run` on pairs with the real trainer and a tiny model: from the file to the exported folder."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.tiny_run import logs_of, write_rows

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(200)]


def test_a_run_of_pairs_begins_with_a_margin_of_0_and_ends_with_a_model(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    held_out = '\n[data.holdout]\nfield = ""\ngroups = 8\n'
    write_rows(tmp_path, tiny_model("llama_tied", dtype="float32"), preset="dpo", count=24, more=held_out)
    command = [sys.executable, "-m", "fourfold"]
    done = subprocess.run([*command, "run", "recipe.toml"], cwd=tmp_path, capture_output=True, text=True, timeout=180)
    run = tmp_path / "runs" / "tiny"
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs_of(run)}"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 4
    for name in ("pair/margin", "pair/chosen_reward", "pair/rejected_reward"):
        assert steps[0][name] == 0, "the reference is computed in the micro-batches of the first update"
    assert steps[3]["pair/margin"] > steps[1]["pair/margin"] > 0 and steps[3]["pair/accuracy"] > 0.5
    assert not any(step["diagnosis"] for step in steps)
    assert (run / "model" / "model.safetensors").exists() and len(list((tmp_path / "cache").glob("reference-*"))) == 2
    report = json.loads((run / "report.json").read_text())
    (first,), (last,) = (report[key]["sets"] for key in ("eval_before", "eval_after"))
    assert (first["accuracy"], first["loss"]) == (0.5, math.log(2)) and last["loss"] < first["loss"]
    assert "Held-out accuracy: 0.50 " in done.stdout and "(8 pairs)" in done.stdout

    command += ["eval", "runs/tiny", "--out", "result.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    (again,) = json.loads((tmp_path / "result.json").read_text())["sets"]
    same = ("score", "loss", "accuracy", "interval", "measure")
    assert {key: again[key] for key in same} == {key: last[key] for key in same}
    assert "mean loss" in done.stdout and "pairs" in done.stdout and "Answers:" not in done.stdout
