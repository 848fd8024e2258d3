"""Online DPO with everything real: two steps of `fourfold run` on a tiny model, at a policy lag of 1."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.tiny_run import logs_of, write_run

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

TABLES = """
[algorithm]
preset = "online-dpo"

[asynchrony]
max_policy_lag = 1

[trainer]
learning_rate = 1e-3
"""


def test_two_steps_of_online_dpo(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    write_run(tmp_path, tiny_model("llama", 0, "float32"), prompts_per_step=2, tables=TABLES)
    command = [sys.executable, "-m", "fourfold", "run", "recipe.toml", "--set", "steps=2"]
    found = subprocess.run(
        command, cwd=tmp_path, text=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=280, check=False
    )
    folder = tmp_path / "runs" / "tiny"
    assert found.returncode == 0, found.stderr + logs_of(folder)
    first, second = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    assert first["pair/margin"] == 0 and second["pair/margin"] != 0, "the reference is where training begins"
    assert math.isfinite(second["pair/chosen_logprob"]) and first["train/samples_per_step"] == 4
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    chosen = {(line["step"], line["group_id"]): set[float]() for line in samples if not line["dropped"]}
    for line in samples:
        if not line["dropped"]:
            chosen[line["step"], line["group_id"]].add(line["score"])
    assert len(chosen) == 4 and all(len(scores) == 2 for scores in chosen.values()), "one pair of each group"
    assert Counter(line["dropped"] for line in samples)["NOT_SELECTED"] >= 8
