"""Reward models on a GPU against plain transformers, and their kernel against its definition.

Skipped on a machine without a GPU. Run them with `pytest tests/gpu/test_reward_model.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from fourfold.config.reward import RewardModelConfig
from fourfold.model.tokenizer import Tokenizer
from fourfold_reward.job import Job
from fourfold_reward.models import fused
from fourfold_reward.models.backend import RewardModelBackend
from tests.support.reward_models import plain_scores, write_reward_model

_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.skipif(_GPUS == 0, reason="needs a CUDA device"), pytest.mark.timeout(400)]


@pytest.mark.parametrize("shape", [(1, 1), (3, 700), (1, 5, 4864)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_equals_its_definition(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from fourfold_reward.models.kernels import silu_mul

    gate, up = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
    wanted = (torch.nn.functional.silu(gate.double()) * up.double()).to(dtype)
    torch.testing.assert_close(silu_mul(gate, up), wanted)


def test_norms_and_mlps_are_replaced(tmp_path: Path) -> None:
    folder = write_reward_model(tmp_path / "model", "qwen3", dtype="bfloat16")
    make: Any = transformers.AutoModelForSequenceClassification
    model = make.from_pretrained(folder, dtype=torch.bfloat16).to("cuda").eval()
    assert fused.fuse(model) == 2 + 5 + 4  # MLPs; norms of layers and of the end; norms of queries and keys


@pytest.mark.parametrize("gpus", [1, pytest.param(2, marks=pytest.mark.skipif(_GPUS < 2, reason="needs two GPUs"))])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "bert"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_scores_are_those_of_transformers(tmp_path: Path, family: str, dtype: Any, gpus: int) -> None:
    folder = write_reward_model(tmp_path / "model", family, dtype=dtype)
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(["the", "answer", "is", "12", "dog"], int(n))) for n in rng.integers(1, 150, 40)]
    table = RewardModelConfig(
        source=str(folder), dtype=dtype, device="cuda", tokens_per_batch=512, gpus_per_replica=gpus, chat=False
    )
    backend = RewardModelBackend(table)
    await backend.start()
    try:
        jobs = [
            Job(sample_id=str(i), prompt="", completion=text, answer="", metadata_json="", size_bytes=len(text))
            for i, text in enumerate(texts)
        ]
        outcomes = await backend.score(jobs, timeout=120)
        assert [outcome.message for outcome in outcomes if outcome.message] == []
        found = [float(outcome.score or 0.0) for outcome in outcomes]
        if family in ("llama", "qwen2", "qwen3"):
            assert backend.thread.kind == "packed"
    finally:
        await backend.close()
    tokenizer = Tokenizer.load(folder)
    ids = [tokenizer.encode(text, add_special=True) for text in texts]
    attention = "eager" if family == "gemma2" else None  # the default one leaves its softcap out
    exact = plain_scores(folder, ids, attention=attention)
    noise = np.abs(np.subtract(plain_scores(folder, ids, dtype=dtype, attention=attention), exact)).max()
    assert np.abs(np.subtract(found, exact)).max() <= 1e-3 + 3 * noise
