"""The recipe of each tutorial makes a step with everything real, on a CPU with a tiny model and its own keys."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.tiny_run import logs_of
from tests.support.tutorials import ON_A_CPU, PAGES, RECIPES, ROOT, commands_of, files_of

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(800)]
# Other tests train in the same way, so that CI leaves them out.
_ALIKE = ("grpo_7b", "lora_gpu", "async_cpu")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.soak if n in _ALIKE else ()) for n in PAGES])
def test_the_recipe_of_a_tutorial_trains(name: str, tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    if name == "other_language" and shutil.which("node") is None:
        pytest.skip("needs node")
    for path, text in (files_of(PAGES["own_data"]) | files_of(PAGES[name])).items():  # others use the data of the first
        (tmp_path / path).write_text(text)
    subprocess.run([sys.executable, "make_data.py"], cwd=tmp_path, check=True, timeout=30)
    command = next(words for words in commands_of(PAGES[name]) if words[:2] == ["fourfold", "run"] and name in words[2])
    values = {"model.source": f'"{tiny_model("llama_tied", 0, "float32")}"', **ON_A_CPU}
    words = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    done = subprocess.run(
        [sys.executable, "-m", "fourfold", "run", str(ROOT / command[2]), *command[3:], *words, "--name", "tutorial"],
        cwd=tmp_path, capture_output=True, text=True, timeout=780,
    )  # fmt: skip
    run_dir = tmp_path / "runs/tutorial"
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs_of(run_dir)}"
    (row,) = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    assert row["step"] == 1 and row["time/step"] > 0
    assert (run_dir / "model/config.json").exists()
    if name == "lora_gpu":
        assert (run_dir / "model/adapter").is_dir()
    if name == "ppo":
        assert "value/loss" in row
        assert (run_dir / "critic/config.json").exists()
    if name == "agents_guessing":
        assert row["agents/metrics/tries"] >= 1
    assert RECIPES[name].name in command[2]
