"""What the tutorials in docs/tutorials tell a reader to write and to run, and runs of recipes on a CPU."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tests.support.tiny_run import logs_of

ROOT: Final = Path(__file__).resolve().parents[2]
_NAMES: Final = {
    "own_data": "own-data",
    "grpo_7b": "grpo-7b",
    "ppo": "ppo",
    "lora_gpu": "lora",
    "agents_guessing": "agent",
    "other_language": "other-language",
    "async_cpu": "asynchronous",
}
RECIPES: Final = {name: ROOT / f"recipes/{name}.toml" for name in _NAMES}
PAGES: Final = {name: ROOT / f"docs/tutorials/{page}.md" for name, page in _NAMES.items()}

ON_A_CPU: Final = {
    "steps": "1",
    "model.dtype": '"float32"',
    "model.max_context_tokens": "192",
    "sampling.max_new_tokens": "8",
    "batch.prompts_per_step": "4",
    "batch.tokens_per_micro_batch": "512",
    "placement.colocated": "false",
    "rollout.replicas": "1",
    "rollout.gpus_per_replica": "0",
    "rollout.sleep_mode": "false",
    "rollout.kv_cache_gib": "1",
    "trainer.ranks": "1",
    "trainer.device": '"cpu"',
    "trainer.liger_kernels": "false",
    "reference.replicas": "1",
    "reference.device": '"cpu"',
    "reward.processes": "1",
    "evaluation.max_prompts": "2",
    "evaluation.samples_per_prompt": "1",
}
"""Keys that make a recipe small, and that need no GPU. All others stay those of the tutorial."""


def train(folder: Path, recipe: Path, model: Path, *words: str, **values: str) -> tuple[list[dict[str, Any]], Path]:
    """Train a recipe in `folder` with a tiny model on a CPU; return the metrics of its steps, and the run's folder.

    Args:
        words: further arguments of `fourfold run`.
        values: keys besides `ON_A_CPU`, with `__` for each dot.
    """
    keys: Mapping[str, str] = {"model.source": f'"{model}"', **ON_A_CPU} | {
        name.replace("__", "."): value for name, value in values.items()
    }
    changes = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    done = subprocess.run(
        [sys.executable, "-m", "fourfold", "run", str(recipe), *words, *changes, "--name", "tiny"],
        cwd=folder, capture_output=True, text=True, timeout=780,
    )  # fmt: skip
    run_dir = folder / "runs/tiny"
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs_of(run_dir)}"
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert (run_dir / "model/config.json").exists() and all(row["time/step"] > 0 for row in rows)
    return rows, run_dir


def files_of(page: Path) -> dict[str, str]:
    """Return the programs that a page tells the reader to save, by name."""
    blocks = r"`([a-z_]+\.(?:py|js))`[^`]*(?:`[^`\n]*`[^`]*)*?```(?:python|javascript)\n(.*?)```"
    found = re.findall(blocks, page.read_text(), re.DOTALL)
    return dict(found)


def commands_of(page: Path) -> list[list[str]]:
    """Return the words of every command of Fourfold in the blocks of a page."""
    lines = [line.strip() for line in page.read_text().splitlines()]
    return [shlex.split(line, comments=True) for line in lines if re.match("fourfold (run|plan|watch|chat) ", line)]
