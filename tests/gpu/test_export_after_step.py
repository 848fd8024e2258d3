"""The export right after a training step, of a model with 0.43 billion parameters and tied embeddings, with Liger.

DeepSpeed prefetches parameters of a model of this size. An export that gathered them while they were in flight ended
the trainer, which was then started again from its checkpoint.

Skipped without GPUs. Run it with `pytest tests/gpu/test_export_after_step.py`; two GPUs run all of it. By hand, a whole
run on one GPU (on two: `--layout hybrid`), which fails when a service was started again:

    fourfold bench step --device cuda --layout shared --sleep --shape 0.43b --liger --prompts 8 --group-size 4
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fourfold_bench import models
from tests.support.bench_command import bench
from tests.support.fork_server import run_cases
from tests.support.trainer_driver import Case

_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.skipif(_GPUS == 0, reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel"),
    pytest.mark.timeout(900),
]
SHAPE = "0.43b"
TWO = pytest.mark.skipif(_GPUS < 2, reason="needs two GPUs")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.parametrize("layout", ["shared", pytest.param("hybrid", marks=TWO)], ids=["one rank", "two ranks"])
def test_a_run_ends_with_its_export_and_without_a_restart(layout: str, tmp_path: Path) -> None:
    """Train 3 steps, write the checkpoint of the last one, export, end with exit code 0."""
    out, kept = tmp_path / "result.json", tmp_path / "kept"
    sizes = ("--shape", SHAPE, "--prompts", "8", "--group-size", "4", "--new-tokens", "64", "--steps", "1")
    words = ("step", "--device", "cuda", "--layout", layout, "--sleep", "--liger", *sizes)
    done = bench(*words, "--json", str(out), "--keep", str(kept), folder=tmp_path, timeout=800)
    assert done.returncode == 0, done.stderr[-6000:]
    end = json.loads(out.read_text())["results"]["end"]
    assert 0.8e9 < end["exported_bytes"] < 1e9, "bfloat16, with one matrix for both embeddings"
    log = (kept / "runs" / "bench-step" / "logs" / "trainer-0.log").read_text()
    assert "in flight" not in log and "Traceback" not in log


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=TWO)])
def test_an_export_without_a_checkpoint_has_all_weights(ranks: int, tmp_path: Path) -> None:
    """Export right after a step, and after a pass without gradients, with DeepSpeed's own prefetch sizes."""
    models.write_model(tmp_path / "model", SHAPE, context=64)
    case = Case(
        name="export", model=str(tmp_path / "model"), ranks=ranks, dtype="bfloat16", device="cuda", liger=True,
        does="export", budget=32, folder=str(tmp_path / "folder"),
    )  # fmt: skip
    found = run_cases([case], tmp_path)["export"]
    assert found["in_flight"] > 0, "or this tests nothing"
    assert found["after pass"] == found["after step"]
    np.testing.assert_array_equal(found["logprobs again"], found["logprobs"])
    assert np.isfinite(found["losses"]).all()
