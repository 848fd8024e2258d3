"""Whole runs on GPUs, by recipe and launcher alone: on one GPU, on two that all share, and on two of their own.
One engine over two GPUs; a mixture of experts.

Skipped without GPUs or vLLM. Run it with `pytest tests/gpu/test_runs.py`; all of it needs two GPUs.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold import metrics as m
from tests.support.tiny_models import write_tiny_model
from tests.support.tiny_run import logs_of, write_run

_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.skipif(_GPUS == 0, reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.timeout(900),
]
ROOT = Path(__file__).parents[2]
GIB = 1 << 30
# Large enough to be seen among what the programs themselves take.
_KV_CACHE_GIB = 8

TABLES = """
[algorithm]
kl = {{ coef = {kl} }}

[placement]
colocated = {colocated}

[rollout]
{engines}
sleep_mode = {sleep}
kv_cache_gib = {kv_cache}
enforce_eager = true
{pools}
[trainer]
device = "cuda"
ranks = {ranks}
learning_rate = 1e-3

[reference]
device = "cuda"
replicas = {references}
tokens_per_batch = 128

[weights]
verify_every = 1

[evaluation]
every_steps = 2

[checkpoint]
every_steps = 2
"""


DEFAULTS = {
    "kl": 0.01,
    "colocated": "true",
    "engines": "gpus_per_replica = 1",
    "pools": "",
    "references": 1,
    "ranks": 1,
    "sleep": "true",
    "kv_cache": _KV_CACHE_GIB,
}


def run(root: Path, *, family: str = "llama", **values: Any) -> Path:
    """Run a recipe to its end; return the run's folder."""
    model = write_tiny_model(root / "model", family, seed=1)
    write_run(root, model, prompts_per_step=4, tables=TABLES, **DEFAULTS | values)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-m", "fourfold", "run", "recipe.toml"], cwd=root, env=env, text=True, timeout=800,
        stdin=subprocess.DEVNULL, capture_output=True, check=False,
    )  # fmt: skip
    folder = root / "runs" / "tiny"
    assert done.returncode == 0, done.stdout + done.stderr + logs_of(folder)
    return folder


def check(folder: Path, *, backend: str, engines: Sequence[str] = ("rollout-0",), sleeps: bool) -> None:
    """Check what every run must have done."""
    log = (folder / "logs" / "coordinator-0.log").read_text()
    opened = set(re.findall(r"weight epoch opened epoch=\d+ ([^\"]*)\"", log))
    assert opened == {f"{backend}={','.join(engines)}"}, opened
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        for name in (m.POLICY_LOSS, m.GRAD_NORM, m.ENTROPY, m.MISMATCH_MEAN, m.RATIO_MEAN, m.APPROX_KL):
            assert row[name] is not None and math.isfinite(row[name]), (name, row[name])
        assert row[m.MISMATCH_MEAN] < 0.2, "bfloat16 on both sides; stale or lost weights would make it grow"
        assert row[m.POLICY_LAG_MAX] == 0, "each step is sampled by the weights that the one before it made"
        assert row[m.PROBE_DIFF_MEAN] < 0.2
        assert (m.TIME_SLEEP in row and m.TIME_WAKE in row) is sleeps
        parts = sum(row.get(name, 0.0) for name in m.TIMES_OF_A_STEP)
        assert parts + row[m.TIME_OTHER] == pytest.approx(row[m.TIME_STEP]) and row[m.TIME_OTHER] >= 0
    assert f"weights published version=3 engines={len(engines)} " in log


class Memory:
    """Used bytes of one GPU, looked at all the time."""

    def __init__(self) -> None:
        self.seen: list[int] = []


@contextmanager
def watching(gpu: int) -> Iterator[Memory]:
    """Look at a GPU's memory, about 50 times a second."""
    pynvml = pytest.importorskip("pynvml")
    pynvml.nvmlInit()
    names = [n for n in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if n]
    name = names[gpu] if names else str(gpu)
    handle = pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(name)
    memory, over = Memory(), threading.Event()

    def look() -> None:
        while not over.is_set():
            memory.seen.append(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
            time.sleep(0.02)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield memory
    finally:
        over.set()
        thread.join()


def times_asleep(seen: list[int], *, size: int) -> int:
    """Return how often the used memory fell by most of `size` and rose again."""
    high = low = seen[0]
    falls, down = 0, False
    for used in seen:
        if down:
            low = min(low, used)
            if used > low + size * 0.8:
                down, high, falls = False, used, falls + 1
        else:
            high = max(high, used)
            if used < high - size * 0.8:
                down, low = True, used
    return falls


def test_one_gpu_is_the_engines_and_the_trainers_in_turn(tmp_path: Path) -> None:
    with watching(0) as memory:
        folder = run(tmp_path)
    check(folder, backend="cuda_ipc", sleeps=True)
    assert times_asleep(memory.seen, size=_KV_CACHE_GIB * GIB) >= 2, "the engine's memory was free while it slept"


POOLS = """
[[rollout.pool]]
name = "exact"

[[rollout.pool]]
name = "rounded"
quantization = "fp8"
"""
ONE_GPU, TWO_GPUS, TWO_STAGES = (
    f"gpus_per_replica = {gpus}\npipeline_parallel_size = {stages}" for gpus, stages in ((1, 1), (2, 1), (2, 2))
)


@pytest.mark.skipif(_GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("keys", "pools", "engines"),
    [
        (f"{ONE_GPU}\nreplicas = 2", "", ["rollout-0", "rollout-1"]),
        (TWO_GPUS, "", ["rollout-0"]),
        (TWO_STAGES, "", ["rollout-0"]),
        (ONE_GPU, POOLS, ["rollout-exact-0", "rollout-rounded-0"]),
    ],
    ids=["two engines", "one engine", "two stages", "two pools"],
)
def test_two_gpus_are_shared_rank_by_rank(tmp_path: Path, keys: str, pools: str, engines: list[str]) -> None:
    with watching(0) as first, watching(1) as second:
        folder = run(tmp_path, engines=keys, pools=pools, references=2, ranks=2)
    check(folder, backend="cuda_ipc", engines=engines, sleeps=True)
    for memory in (first, second):
        assert times_asleep(memory.seen, size=_KV_CACHE_GIB * GIB) >= 2


@pytest.mark.skipif(_GPUS < 2, reason="needs two GPUs")
def test_services_have_gpus_of_their_own(tmp_path: Path) -> None:
    folder = run(tmp_path, colocated="false", sleep="false", kl=0.0)
    check(folder, backend="cuda_ipc", sleeps=False)


def test_a_mixture_of_experts_runs_to_its_end(tmp_path: Path) -> None:
    pytest.importorskip("vllm._custom_ops")
    if not hasattr(torch.ops._moe_C, "topk_softmax"):
        pytest.skip("this vLLM was built without the kernels of mixtures of experts")
    folder = run(tmp_path, family="qwen3_moe")
    check(folder, backend="cuda_ipc", sleeps=True)
