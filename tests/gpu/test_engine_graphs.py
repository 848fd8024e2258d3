"""Tests what vLLM decides on a GPU: CUDA graphs for every batch up to the limit, and asynchronous scheduling.

Skipped without a GPU or vLLM. No engine is started.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from fourfold_rollout.engine import EngineSettings
from tests.support.tiny_models import write_tiny_model

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize("samples", [5, 64, 100, 256, 512, 600, 1024])
def test_a_full_batch_is_padded_to_a_size_that_is_captured(samples: int, tmp_path: Path) -> None:
    from fourfold_rollout.vllm.engine_args import engine_args

    settings = EngineSettings(
        folder=write_tiny_model(tmp_path, "qwen2"), dtype="bfloat16", max_context_tokens=512,
        max_concurrent_samples=samples, max_batched_tokens=16384, enforce_eager=False, kv_cache_gib=1, gpus=1,
        gpu_memory_utilization=0.5, seed=0,
    )  # fmt: skip
    config = engine_args(settings).create_engine_config()
    most = config.scheduler_config.max_num_seqs
    sizes = [size for size in config.compilation_config.cudagraph_capture_sizes if size <= most]
    assert max(sizes) == most > samples, "a full batch and a probe beside it"
    assert config.scheduler_config.async_scheduling
