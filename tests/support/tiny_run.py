"""The working folders of runs that a tiny model of random weights can do: recipe, scorer, data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

_RECIPE: Final = """
name = "tiny"
seed = 5
steps = 3

[model]
source = "{model}"
max_context_tokens = 64

[data]
train = {{ path = "data.jsonl" }}
holdout = {{ field = "expression", unordered_numbers = true, groups = 2 }}

[sampling]
max_new_tokens = 8

[reward]
function = "scorer.py:score"

[batch]
prompts_per_step = {prompts_per_step}
group_size = 4
tokens_per_micro_batch = 128
"""
ROWS_PER_STEP: Final = 8
_ROW_RECIPE: Final = """
name = "tiny"
seed = 3

[model]
source = "{model}"
max_context_tokens = 64
dtype = "float32"

[data]
passes = 2
chat = false
cache = "cache"
train = {{ path = "rows.jsonl" }}

[batch]
rows_per_step = {rows}
tokens_per_micro_batch = 128

[algorithm]
preset = "{preset}"

[trainer]
learning_rate = 1e-3
"""
# It answers nothing; it does write texts of different lengths.
_SCORER: Final = """
from fourfold_reward import ScoreInput


def score(sample: ScoreInput) -> float:
    return len(sample.completion) % 5 / 4
"""


def write_run(root: Path, model: Path, *, prompts_per_step: int, tables: str, **values: Any) -> None:
    """Write recipe.toml, scorer.py and data.jsonl; `tables` are the recipe's others, with `values` filled in."""
    recipe = (_RECIPE + tables).format(model=model, prompts_per_step=prompts_per_step, **values)
    (root / "recipe.toml").write_text(recipe)
    (root / "scorer.py").write_text(_SCORER)
    rows = [{"question": f"What is {a} * {b}?", "expression": f"{a} * {b}"} for a in range(5) for b in range(5)]
    (root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_rows(root: Path, model: Path, *, preset: str, count: int, more: str = "") -> None:
    """Write recipe.toml and rows.jsonl of a run of rows, for the presets sft and dpo; `more` goes on in [trainer]."""
    root.mkdir(exist_ok=True)
    (root / "recipe.toml").write_text(_ROW_RECIPE.format(model=model, preset=preset, rows=ROWS_PER_STEP) + more)
    answers = ("chosen", "rejected") if preset == "dpo" else ("completion",)
    rows = [
        {"prompt": f"{n} * {n} =", **{name: (f" {n * n}", f" {2 * n} or so")[i] for i, name in enumerate(answers)}}
        for n in range(count)
    ]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def logs_of(run_dir: Path) -> str:
    """Return the end of every log of a run."""
    return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in run_dir.glob("logs/*.log"))
