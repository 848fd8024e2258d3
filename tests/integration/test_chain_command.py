"""`fourfold run sft.toml rl.toml` with a real trainer and engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_models import write_tiny_model
from tests.support.tiny_run import logs_of, write_run

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(400)]

SFT = """
name = "sft"
seed = 5

[model]
source = "model"
max_context_tokens = 64
dtype = "float32"

[data]
passes = 1
train = { path = "rows.jsonl" }
chat = false
cache = "tokens"

[batch]
rows_per_step = 4
tokens_per_micro_batch = 128

[algorithm]
preset = "sft"

[trainer]
learning_rate = 1e-3
"""
RL = "\n[checkpoint]\nevery_steps = 1\n"


def fourfold(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fourfold", *words]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=380, check=False)


def test_a_run_begins_with_the_model_that_the_run_before_has_trained(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", "llama")
    rows = [{"prompt": f"{n} * {n} =", "completion": f" {n * n}"} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sft.toml").write_text(SFT)
    write_run(tmp_path, Path("run:sft"), prompts_per_step=2, tables=RL)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("steps = 3", "steps = 1").replace('"tiny"', '"rl"'))

    done = fourfold(tmp_path, "run", "sft.toml", "recipe.toml", "--set", 'model.dtype="float32"')
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs_of(tmp_path / 'runs/rl')}"
    reports = {name: json.loads((tmp_path / f"runs/{name}/report.json").read_text()) for name in ("sft", "rl")}
    assert (reports["sft"]["steps"], reports["rl"]["steps"]) == (2, 1)
    began = reports["rl"]["began_from"]["model"]
    assert (began["source"], began["run"], began["began_from"]) == ("run:sft", "sft", reports["sft"]["began_from"])
    assert began["sha256"] != began["began_from"]["model"]["sha256"], "the first run has trained"

    again = fourfold(tmp_path, "run", "sft.toml", "recipe.toml", "--resume", "--set", 'model.dtype="float32"')
    assert again.returncode == 0 and again.stdout.count("is done already: runs/") == 2, again.stderr
