"""The environment of vLLM: variables, and log levels that pass its start-up messages and warnings only."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fourfold.host import network
from fourfold_rollout.engine import EngineSettings
from fourfold_rollout.vllm import environment


@pytest.fixture(autouse=True)
def _left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = os.environ.copy()
    loggers = [logging.getLogger(name) for name in ("vllm", *environment._STARTUP, *environment._NOISY_LOGGERS)]
    states = [(logger.level, logger.filters[:]) for logger in loggers]
    yield
    os.environ.clear()
    os.environ.update(before)
    for logger, (level, filters) in zip(loggers, states, strict=True):
        logger.setLevel(level)
        logger.filters[:] = filters


def prepare(*, host: str = "127.0.0.1", **keys: object) -> None:
    settings = {
        "folder": Path("/model"), "dtype": "bfloat16", "max_context_tokens": 64, "max_concurrent_samples": 4,
        "max_batched_tokens": 64, "enforce_eager": True, "kv_cache_gib": 2, "gpus": 0, "gpu_memory_utilization": 0.5,
        "seed": 0, **keys,
    }  # fmt: skip
    environment.prepare(EngineSettings(**settings), host)  # type: ignore[arg-type]


def test_seconds_of_the_start_are_logged_and_small_talk_is_not(caplog: pytest.LogCaptureFixture) -> None:
    prepare()
    caplog.set_level(logging.INFO)
    runner = logging.getLogger("vllm.v1.worker.gpu_model_runner")
    runner.info("Starting to load model %s...", "x")
    runner.info("Model loading took %s GiB memory and %.6f seconds", 1, 2.0)
    runner.warning("a warning")
    logging.getLogger("vllm.v1.engine.core").info("init engine (profile, create kv cache, warmup model) took %.2f s", 3)
    logging.getLogger("vllm.elsewhere").info("hello")
    logging.getLogger("torch._library.triton").warning("Triton not available")
    said = [record.getMessage().split(" took")[0] for record in caplog.records]
    assert said == ["Model loading", "a warning", "init engine (profile, create kv cache, warmup model)"]


def test_variables_that_somebody_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_V1_OUTPUT_PROC_CHUNK_SIZE", "7")
    prepare()
    assert os.environ["VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"] == "7"
    monkeypatch.delenv("VLLM_V1_OUTPUT_PROC_CHUNK_SIZE")
    prepare()
    assert os.environ["VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"] == "32"
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "2"


def test_nccl_uses_the_network_of_the_address_of_an_engine_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "interface_of", {"10.0.0.1": "eth1"}.__getitem__)
    for gpus, host, given, expected in (
        (1, "10.0.0.1", "", "=eth1"),
        (1, "10.0.0.1", "ib0", "ib0"),
        (1, "127.0.0.1", "", "=lo"),
        (0, "10.0.0.1", "", "=lo"),
    ):
        os.environ["NCCL_SOCKET_IFNAME"] = given
        prepare(gpus=gpus, host=host)
        assert os.environ["NCCL_SOCKET_IFNAME"] == expected, (gpus, host, given)


def test_nothing_is_compiled_on_a_cpu_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    for options in ({"enforce_eager": False}, {"gpus": 1}):
        prepare(**options)
        assert "TORCHDYNAMO_DISABLE" not in os.environ
    prepare()
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
