"""Log-probabilities that the GPU writes to the service's memory: the kernel, and real engines that compare with vLLM's.

Skipped without a GPU or vLLM. Run it with `pytest tests/gpu/test_rollout_logprobs.py`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tiny_models import write_tiny_model

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.timeout(900),
]
_V1 = "vllm.v1.worker.gpu_model_runner"
_V2 = "vllm.v1.worker.gpu.model_runner"


class TestKernel:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("vocabulary", [49_152, 151_936, 1, 511, 4097])
    def test_it_is_the_log_softmax(self, dtype: torch.dtype, vocabulary: int) -> None:
        from fourfold_rollout.vllm.logprob_kernel import write_logprobs

        torch.manual_seed(0)
        rows, padded = 7, vocabulary + 3
        logits = (8 * torch.randn(rows, padded, device="cuda")).to(dtype)[:, :vocabulary]
        logits[1, vocabulary // 2 + 1 :] = float("-inf")  # whole blocks of it
        logits[2, 1:] = float("-inf")
        sampled = torch.randint(0, vocabulary // 2 + 1, (rows,), device="cuda")
        sampled[2] = 0
        table = torch.full((9, 20), 5.0, device="cuda")
        slots = torch.arange(rows - 1, -1, -1, device="cuda", dtype=torch.int32)
        lengths = torch.full((rows,), 10, device="cuda", dtype=torch.int32)
        write_logprobs(
            logits,
            sampled,
            states=torch.arange(rows, device="cuda", dtype=torch.int32),
            slots=slots,
            prompt_lengths=lengths,
            prefill_lengths=lengths,
            positions=torch.arange(9, 9 + rows, device="cuda"),
            table=table,
        )
        expected = torch.log_softmax(logits.float(), -1).gather(1, sampled[:, None])[:, 0]
        got = table[slots.long(), torch.arange(rows, device="cuda")]
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert got[2] == 0
        assert (table == 5.0).sum() == table.numel() - rows

    def test_rows_without_a_token_or_a_place_write_nothing(self) -> None:
        from fourfold_rollout.vllm.logprob_kernel import write_logprobs

        def numbers(*values: int) -> torch.Tensor:
            return torch.tensor(values, device="cuda", dtype=torch.int32)

        table = torch.full((2, 4), 5.0, device="cuda")
        write_logprobs(
            torch.zeros(7, 100, device="cuda"),
            numbers(0, 0, 0, 0, 0, 0, 0),
            states=numbers(0, 1, 2, 3, 4, -1, 5),
            slots=numbers(-1, 2, 0, 0, 0, 1),  # no slot, none such, ...
            prompt_lengths=numbers(3, 3, 3, 3, 3, 3),
            prefill_lengths=numbers(3, 3, 5, 3, 3, 5),
            positions=numbers(2, 2, 3, 1, 7, 2, 4),  # ..., before the prefill's end, inside the prompt, past the row
            table=table,
        )
        assert table[1, 2].item() == pytest.approx(-np.log(100), abs=1e-5)
        assert (table == 5.0).sum() == table.numel() - 1


def _draw(tmp_path: Path, runner: str, **options: Any) -> dict[str, Any]:
    """Run the cases of `logprob_driver` in an engine of its own."""
    model = write_tiny_model(tmp_path / "model", "qwen3")
    settings: dict[str, Any] = {
        "model": str(model),
        "dtype": "bfloat16",
        "gpus": 1,
        "eager": False,
        "worker": "CountingWorker",
        "blocks": 90,
        "batched": 64,
        "audit": True,
        "plain": False,
    } | options
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "VLLM_USE_V2_MODEL_RUNNER": str(int(runner == _V2))}
    answer = tmp_path / "answer.json"
    command = [sys.executable, "-m", "tests.support.logprob_driver", json.dumps(settings), str(answer)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    result: dict[str, Any] = json.loads(answer.read_text())
    assert result["workers"] == [runner] * settings["gpus"], result["workers"]
    return result


@pytest.mark.parametrize("runner", [_V2, _V1], ids=["v2", "v1"])
@pytest.mark.parametrize("gpus", [1, 2])
def test_values_are_vllms_own_whatever_happens_to_a_sample(tmp_path: Path, runner: str, gpus: int) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    answer = _draw(tmp_path, runner, gpus=gpus)
    assert answer["table"]
    assert answer["own"]["tokens"] > 2_000
    assert answer["own"]["largest"] < 1e-4
    assert answer["preemptions"][0] > 0
    assert answer["free"] == answer["slots"]
    assert "abort" in {s["finish"] for s in answer["interrupted"]}


@pytest.mark.parametrize("runner", [_V2, _V1], ids=["v2", "v1"])
def test_the_table_changes_no_token(tmp_path: Path, runner: str) -> None:
    answer = _draw(tmp_path, runner, dtype="float32", eager=True, audit=False, plain=True, blocks=1000)
    for with_table, without in zip(answer["mixed"], answer["without"], strict=True):
        assert with_table["ids"] == without["ids"]
        assert np.abs(np.array(with_table["logprobs"]) - without["logprobs"]).max() < 1e-3
