"""Sequence parallelism over NCCL with the CUDA kernel of packed attention, against one GPU alone.

Skipped with fewer than two GPUs. Run them with `pytest tests/gpu`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.gpu.sequence_rank import LENGTHS
from tests.support.tiny_models import write_tiny_model
from tests.support.trainer_driver import Case, trainer_environment, write_cases

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("deepspeed", "einops"))), reason="needs DeepSpeed, and einops for it"
    ),
    pytest.mark.timeout(300),
]

REPOSITORY = Path(__file__).parents[2]
COUNT = 2


def wait_for(commands: Sequence[Sequence[str]], folder: Path) -> None:
    """Run processes side by side; what they wrote is shown when one fails."""
    paths = [trainer_environment()["PYTHONPATH"], *(path for path in sys.path if path)]
    environment = {**trainer_environment(), "PYTHONPATH": os.pathsep.join(paths)}
    started = []
    try:
        for index, command in enumerate(commands):
            with (folder / f"{index}.log").open("w") as log:
                argv = [sys.executable, "-m", *command]
                started.append(
                    subprocess.Popen(argv, env=environment, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT)
                )
        codes = [process.wait(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    logs = [(folder / f"{index}.log").read_text() for index in range(len(commands))]
    assert not any(codes), "\n".join(log[-3000:] for log in logs)


def test_a_shared_row_gives_what_one_gpu_gives(tmp_path: Path) -> None:
    wait_for([("tests.gpu.sequence_rank", str(rank), str(COUNT), str(tmp_path)) for rank in range(COUNT)], tmp_path)
    whole = sum(LENGTHS) + sum(LENGTHS) % COUNT
    for rank in range(COUNT):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert seen["logprobs"] < 0.03 and seen["looked up"] < 0.03, seen
        assert seen["largest gradient"] < 0.05, seen
        assert seen["kernels"] and all(shape == [whole, 4, 32, 1] for shape in seen["kernels"]), seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gpus_that_share_rows_learn_as_one(tmp_path: Path, dtype: str) -> None:
    model = write_tiny_model(tmp_path / "model", "llama", dtype=dtype)
    commands = []
    for count in (1, COUNT):
        folder = tmp_path / str(count)
        folder.mkdir()
        case = Case(name="train", model=str(model), ranks=count, sequence=count, dtype=dtype, device="cuda", budget=64)
        write_cases(folder / "cases.json", [case])
        commands.append(("tests.support.trainer_driver", str(folder / "cases.json"), str(folder)))
    wait_for(commands, tmp_path)
    wanted, found = (np.load(tmp_path / str(count) / "train.npz") for count in (1, COUNT))
    exact = dtype == "float32"
    np.testing.assert_allclose(found["before"], wanted["before"], atol=1e-4 if exact else 0.2)
    np.testing.assert_allclose(found["losses"], wanted["losses"], atol=1e-4 if exact else 0.05)
    np.testing.assert_allclose(found["norms"], wanted["norms"], rtol=1e-3 if exact else 0.1)
    assert np.abs(found["after"] - found["before"]).max() > 0.05  # it did learn something
    if exact:
        np.testing.assert_allclose(found["after"], wanted["after"], atol=1e-3)
