"""`fourfold run` on pairs with the real trainer and a tiny model: from the file to the exported folder."""

from __future__ import annotations

import json
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
    write_rows(tmp_path, tiny_model("llama_tied", dtype="float32"), preset="dpo", count=16)
    command = [sys.executable, "-m", "fourfold", "run", "recipe.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    run = tmp_path / "runs" / "tiny"
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs_of(run)}"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 4
    for name in ("pair/margin", "pair/chosen_reward", "pair/rejected_reward"):
        assert steps[0][name] == 0, "the reference is computed in the micro-batches of the first update"
    assert steps[3]["pair/margin"] > steps[1]["pair/margin"] > 0 and steps[3]["pair/accuracy"] > 0.5
    assert not any(step["diagnosis"] for step in steps)
    assert (run / "model" / "model.safetensors").exists() and len(list((tmp_path / "cache").glob("reference-*"))) == 1
