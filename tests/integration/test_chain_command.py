"""`fourfold run sft.toml rm.toml ppo.toml` with a real trainer, engine and reward model."""

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
RM = SFT.replace('"sft"\nseed', '"rm"\nseed').replace('"model"', '"run:sft"').replace("rows.jsonl", "pairs.jsonl")
PPO = """
[algorithm]
preset = "ppo"
kl = { coef = 0.0 }

[critic]
source = "run:rm"

[checkpoint]
every_steps = 1
"""


def fourfold(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fourfold", *words]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=380, check=False)


def test_a_run_begins_with_the_models_that_the_runs_before_have_trained(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", "llama")
    rows = [{"prompt": f"{n} * {n} =", "completion": f" {n * n}"} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": " no"} for row in rows]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (tmp_path / "sft.toml").write_text(SFT)
    (tmp_path / "rm.toml").write_text(RM.replace('preset = "sft"', 'preset = "reward-model"'))
    write_run(tmp_path, Path("run:sft"), prompts_per_step=2, tables=PPO.replace("{", "{{").replace("}", "}}"))
    recipe = (tmp_path / "recipe.toml").read_text().replace("steps = 3", "steps = 1").replace('"tiny"', '"ppo"')
    scorer = 'model = { source = "run:rm", dtype = "float32" }\ntimeout_seconds = 60'
    (tmp_path / "ppo.toml").write_text(recipe.replace('function = "scorer.py:score"', scorer))

    command = ("run", "sft.toml", "rm.toml", "ppo.toml", "--set", 'model.dtype="float32"')
    done = fourfold(tmp_path, *command)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs_of(tmp_path / 'runs/ppo')}"
    reports = {name: json.loads((tmp_path / f"runs/{name}/report.json").read_text()) for name in ("sft", "rm", "ppo")}
    assert [report["steps"] for report in reports.values()] == [2, 2, 1]
    began = reports["ppo"]["began_from"]
    assert (began["model"]["source"], began["model"]["run"]) == ("run:sft", "sft")
    assert began["model"]["began_from"] == reports["sft"]["began_from"]
    assert began["model"]["sha256"] != began["model"]["began_from"]["model"]["sha256"], "the first run has trained"
    assert [began[key]["began_from"] for key in ("critic", "reward reward")] == [reports["rm"]["began_from"]] * 2

    again = fourfold(tmp_path, *command, "--resume")
    assert again.returncode == 0 and again.stdout.count("is done already: runs/") == 3, again.stderr
