"""A vLLM engine on a GPU takes new weights of every verified architecture, by its own loaders, eagerly and with graphs.
Those of other architectures prove at their start that an update replaces all of their weights.

Skipped without a GPU or vLLM. Run it with `pytest tests/gpu/test_model_updates.py`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.tiny_models import write_tiny_model
from tests.support.weight_engine import SIZES, Engine, running_engine
from tests.support.weight_trainer import check_updates

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One engine process for all tests."""
    with running_engine(patience=300) as running:
        yield running


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "qwen2",
        "qwen3",
        "gemma",
        "gemma2",
        "gemma3",
        "mistral",
        "phi3",
        "mixtral",
        "olmoe",
        "qwen2_moe",
        "qwen3_moe",
        # These are proven.
        "gpt2",
        "gpt_neox",
        "cohere",
    ],
)
def test_an_updated_engine_equals_a_fresh_one(family: str, engine: Engine, tmp_path: Path) -> None:
    one, two = (write_tiny_model(tmp_path / str(seed), family, seed=seed) for seed in (1, 2))
    check_updates(engine, one, two, **SIZES)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_captured_graphs_compute_with_the_new_weights(family: str, engine: Engine, tmp_path: Path) -> None:
    one, two = (write_tiny_model(tmp_path / str(seed), family, seed=seed) for seed in (1, 2))
    check_updates(engine, one, two, **SIZES, enforce_eager=False)
