"""Weights from GPU to GPU into a real vLLM: every backend, in place and reloaded, sliced, staged, asleep, with graphs.

Skipped without GPUs or vLLM. Run it with `pytest tests/gpu/test_weight_plane.py`; all of it needs three GPUs.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.support.tiny_models import write_tiny_model
from tests.support.weight_engine import SIZES, Engine, running_engine
from tests.support.weight_trainer import Trainer, check_updates

_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.skipif(_GPUS == 0, reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.timeout(900),
]


@contextmanager
def engine_on(first: int, count: int) -> Iterator[Engine]:
    """An engine process that sees some of this process's GPUs."""
    if first + count > _GPUS:
        pytest.skip(f"needs {first + count} GPUs")
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name] or list(
        map(str, range(_GPUS))
    )
    with (
        mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=",".join(names[first : first + count])),
        running_engine(patience=300) as engine,
    ):
        yield engine


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """Two weights of one model, which two workers can share."""
    one, two = (write_tiny_model(tmp_path / str(seed), "llama", seed=seed) for seed in (1, 2))
    return one, two


@pytest.mark.parametrize(("backend", "first"), [("cuda_ipc", 0), ("cuda_ipc", 1), ("nccl", 1)])
@pytest.mark.parametrize("workers", [1, 2])
def test_in_place(backend: str, first: int, workers: int, models: tuple[Path, Path]) -> None:
    one, two = models
    with engine_on(first, workers) as engine:
        trainer = Trainer(two, device="cuda:0", workers=workers)
        report = check_updates(
            engine, one, two, backend=backend, trainer=trainer, tensor_parallel_size=workers, **SIZES
        )
    assert report["reload"] == 0 and report["direct"] > 0


@pytest.mark.parametrize(("backend", "first"), [("cuda_ipc", 0), ("nccl", 1)])
def test_stages_of_a_pipeline_take_their_layers_in_place(backend: str, first: int, models: tuple[Path, Path]) -> None:
    one, two = models
    with engine_on(first, 2) as engine:
        trainer = Trainer(two, device="cuda:0", workers=2)
        report = check_updates(engine, one, two, backend=backend, trainer=trainer, pipeline_parallel_size=2, **SIZES)
    assert report["reload"] == 0 and report["direct"] > 0


@pytest.mark.parametrize(("backend", "first"), [("cuda_ipc", 0), ("nccl", 1)])
def test_what_is_cast_on_the_way_goes_through_windows(backend: str, first: int, models: tuple[Path, Path]) -> None:
    one, two = models
    with engine_on(first, 1) as engine:
        trainer = Trainer(two, dtype=torch.bfloat16, held="float32", device="cuda:0")
        check_updates(engine, one, two, backend=backend, trainer=trainer, **SIZES)


@pytest.mark.parametrize(("backend", "first"), [("cuda_ipc", 0), ("nccl", 1)])
def test_a_quantised_engine_reloads_what_comes_from_a_gpu(backend: str, first: int, models: tuple[Path, Path]) -> None:
    one, two = models
    with engine_on(first, 1) as engine:
        trainer = Trainer(two, device="cuda:0")
        report = check_updates(
            engine, one, two, backend=backend, trainer=trainer, quantization="fp8_per_tensor", **SIZES
        )
    assert report["direct"] == 0 and "quantised" in report["reason"]


def test_captured_graphs_compute_with_what_was_written_in_place(models: tuple[Path, Path]) -> None:
    one, two = models
    with engine_on(0, 1) as engine:
        trainer = Trainer(two, device="cuda:0")
        check_updates(engine, one, two, backend="cuda_ipc", trainer=trainer, enforce_eager=False, **SIZES)


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_sleeps_is_filled_when_its_weights_have_memory(level: int, models: tuple[Path, Path]) -> None:
    one, two = models
    with engine_on(0, 1) as engine:
        engine.load(two, **SIZES)
        fresh = engine.generate()
        engine.load(one, enable_sleep_mode=True, **SIZES)
        trainer = Trainer(two, device="cuda:0")
        trainer.open(engine, "cuda_ipc")
        for _ in range(2):
            engine.sleep(level)
            engine.wake("weights")
            trainer.update(engine)
            engine.wake("kv_cache")
            assert engine.generate() == fresh
