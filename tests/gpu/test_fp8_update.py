"""A vLLM engine that quantises to fp8 takes new weights: afterwards it is what a fresh one with them would be.

Skipped without a GPU or vLLM. Run it with `pytest tests/gpu/test_fp8_update.py`; the engine has a process of its own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from fourfold.errors import ARCHITECTURE_NOT_VERIFIED, WrongState
from tests.support.tiny_models import write_tiny_model
from tests.support.weight_engine import SIZES, Engine, running_engine
from tests.support.weight_trainer import Trainer, check_updates

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.timeout(900),
]

FP8: Final[dict[str, Any]] = {"quantization": "fp8_per_tensor", **SIZES}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One engine process for all tests."""
    with running_engine(patience=300) as running:
        yield running


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "llama"])  # tied with biases; untied
def test_an_updated_fp8_engine_equals_a_fresh_one(family: str, eager: bool, engine: Engine, tmp_path: Path) -> None:
    one, two = (write_tiny_model(tmp_path / str(seed), family, seed=seed) for seed in (1, 2))
    check_updates(engine, one, two, **FP8, enforce_eager=eager)


def test_fp8_is_not_what_the_weights_are(engine: Engine, tmp_path: Path) -> None:
    """The engines above were quantised: without it, the same weights say something else."""
    folder = write_tiny_model(tmp_path / "model", "llama", seed=1)
    answers = []
    for arguments in (FP8, {**FP8, "quantization": None}):
        engine.load(folder, **arguments)
        answers.append([logprobs for _, logprobs in engine.generate()])
    assert answers[0] != answers[1]


def test_experts_in_fp8_are_refused(engine: Engine, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "qwen3_moe", seed=1)
    engine.load(folder, **FP8)
    before = engine.generate()
    with pytest.raises(WrongState) as caught:
        Trainer(folder).open(engine)
    assert caught.value.reason == ARCHITECTURE_NOT_VERIFIED
    assert engine.generate() == before
