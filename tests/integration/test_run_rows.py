"""`fourfold run` on pairs with the real trainer and a tiny model: from the file to the exported folder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.tiny_run import logs_of

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(200)]

RECIPE = """
name = "pairs"
seed = 3

[model]
source = "{model}"
max_context_tokens = 64
dtype = "float32"

[data]
passes = 2
chat = false
cache = "cache"
train = {{ path = "pairs.jsonl" }}

[batch]
rows_per_step = 8
tokens_per_micro_batch = 128

[algorithm]
preset = "dpo"

[trainer]
learning_rate = 1e-3
"""


def test_a_run_of_pairs_begins_with_a_margin_of_0_and_ends_with_a_model(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE.format(model=tiny_model("llama_tied", dtype="float32")))
    rows = [{"prompt": f"{n} * {n} =", "chosen": f" {n * n}", "rejected": f" {2 * n} or so"} for n in range(16)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "fourfold", "run", "recipe.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    run = tmp_path / "runs" / "pairs"
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs_of(run)}"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 4
    for name in ("pair/margin", "pair/chosen_reward", "pair/rejected_reward"):
        assert steps[0][name] == 0, "the reference is computed in the micro-batches of the first update"
    assert steps[3]["pair/margin"] > steps[1]["pair/margin"] > 0 and steps[3]["pair/accuracy"] > 0.5
    assert not any(step["diagnosis"] for step in steps)
    assert (run / "model" / "model.safetensors").exists() and len(list((tmp_path / "cache").glob("reference-*"))) == 1
