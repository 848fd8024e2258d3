"""`fourfold run` with two pools of engines that differ in dtype and size, with everything real, on a tiny model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.scrape import http, parse
from tests.support.tiny_run import logs_of, write_run

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(400)]

TABLES = """
[rollout]
max_batched_tokens = 128

[[rollout.pool]]
name = "exact"
dtype = "float32"
max_concurrent_samples = 4

[[rollout.pool]]
name = "wide"
max_concurrent_samples = 16
vllm = {{ block_size = 64 }}

[trainer]
learning_rate = 1e-3

[metrics]
endpoint = true
"""


def test_engines_of_two_pools_sample_for_one_run(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    write_run(tmp_path, tiny_model("llama_tied"), prompts_per_step=4, tables=TABLES)
    run_dir, sampled = tmp_path / "runs" / "tiny", dict[str, float]()
    process = subprocess.Popen(
        [sys.executable, "-m", "fourfold", "run", "recipe.toml"], cwd=tmp_path, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        while process.poll() is None:
            sampled |= sampled_tokens(run_dir / "metrics")
            time.sleep(0.2)
        output, _ = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 0, output + logs_of(run_dir)
    assert "tiny is done: 3 steps" in output
    assert set(sampled) == {"rollout-exact-0", "rollout-wide-0"} and min(sampled.values()) > 0, sampled

    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["mismatch/logprob_diff_mean"] for row in rows) < 0.2, "both engines have the trainer's weights"
    started = {name: engine_start(run_dir / "logs" / f"{name}.log") for name in sampled}
    assert {name: log["concurrent_samples"] for name, log in started.items()} == {
        "rollout-exact-0": 4, "rollout-wide-0": 16,
    }  # fmt: skip
    # A token of the float32 engine takes twice the memory: the same cache has room for half as many.
    assert 2 * started["rollout-exact-0"]["kv_cache_tokens"] == started["rollout-wide-0"]["kv_cache_tokens"]


def sampled_tokens(folder: Path) -> dict[str, float]:
    """Return the tokens that each rollout service has sampled, of those that answer."""
    found = {}
    for path in folder.glob("rollout-*.json"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it starts, or ends
            _, _, page = asyncio.run(http(json.loads(path.read_text())[0]["targets"][0]))
            (family,) = [f for f in parse(page).values() if f.name == "fourfold_rollout_sampled_tokens"]
            found[path.stem] = family.samples[0].value
    return found


def engine_start(log: Path) -> dict[str, Any]:
    """Return the line in which a service logs what its engine runs with."""
    (line,) = [line for line in log.read_text().splitlines() if '"Engine started"' in line]
    found: dict[str, Any] = json.loads(line)
    return found
