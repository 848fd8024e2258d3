"""ZeRO++ hpZ on two GPUs: the second copy of the weights changes no step, and a restored checkpoint makes it stale.

Skipped without two GPUs. The same on CPUs, with two groups: tests/integration/test_trainer_deepspeed.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.integration.test_trainer_deepspeed import WIDE
from tests.support.fork_server import run_cases
from tests.support.tiny_models import write_tiny_model
from tests.support.trainer_driver import Case

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_second_partition_changes_nothing(tmp_path: Path, dtype: str) -> None:
    model = write_tiny_model(tmp_path / "model", "llama_tied", sizes=WIDE, dtype=dtype)
    seen = []
    for hpz in (1, 2):
        folder = tmp_path / str(hpz)
        (folder / "saved").mkdir(parents=True)
        case = Case(
            name="two", model=str(model), ranks=2, hpz=hpz, dtype=dtype, device="cuda", budget=64, does="restore",
            folder=str(folder / "saved"),
        )  # fmt: skip
        seen.append(run_cases([case], folder)["two"])
    flat, second = seen
    assert (flat["straight"] != flat["before"]).any()
    np.testing.assert_array_equal(second["after"], second["straight"])
    for name, values in flat.items():
        np.testing.assert_allclose(second[name], values, rtol=1e-6, atol=1e-6, err_msg=name)
