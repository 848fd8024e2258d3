"""The cosine of live and shadow gradients on GPUs, under NCCL; the step is the same with and without shadow scores.

Skipped without GPUs; two GPUs run all of it. Run it with `pytest tests/gpu/test_shadow.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.test_trainer_shadow import case, check
from tests.support.fork_server import run_cases
from tests.support.tiny_models import write_tiny_model

_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.skipif(_GPUS == 0, reason="needs a CUDA device"), pytest.mark.timeout(400)]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.skipif(_GPUS < 2, reason="needs two GPUs"))])
@pytest.mark.parametrize("mini_batches", [1, 2])
def test_zero_3_compares_as_one_process_in_float64_and_changes_nothing(
    tmp_path: Path, ranks: int, mini_batches: int
) -> None:
    llama = write_tiny_model(tmp_path / "llama", "llama_tied", seed=0, dtype="float32")
    one = case("case", llama, tmp_path, ranks=ranks, mini_batches=mini_batches, device="cuda")
    check(run_cases([one], tmp_path)["case"], llama, tmp_path / "case", {}, tolerance=1e-4)
