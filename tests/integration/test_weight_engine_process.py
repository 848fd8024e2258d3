"""vLLM's own process tree: the verbs through `AsyncLLM.collective_rpc`, and no engine without its service."""

from __future__ import annotations

import asyncio
import multiprocessing
import multiprocessing.connection
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import transformers

from fourfold.errors import DeadlinePassed
from fourfold.weights.digest import digest_of
from fourfold.weights.sender import WeightSender
from fourfold.weights.source.dense import DenseSource
from fourfold.weights.worker_control import unwrap

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    "in_core",
    [
        pytest.param(False, id="service-core-worker"),
        pytest.param(True, id="service-core", marks=pytest.mark.soak),
    ],
)
def test_verbs_cross_the_processes_and_the_engine_dies_with_its_service(
    in_core: bool, tiny_model: Callable[..., Path]
) -> None:
    folder = tiny_model("llama", 1)
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    service = context.Process(target=_service, args=(other, str(folder), in_core), daemon=False)
    service.start()
    other.close()
    family: list[psutil.Process] = []
    try:

        def verb(name: str, *args: Any) -> Any:
            pipe.send((name, args))
            assert pipe.poll(150), f"{name} was not answered"
            return unwrap(pipe.recv())[0]

        assert verb("weights_describe")["device_type"] == "cpu"
        family = psutil.Process(service.pid).children(recursive=True)
        engine = [p for p in family if "resource_tracker" not in " ".join(p.cmdline())]
        assert len(engine) == (1 if in_core else 2)

        assert verb("weights_prove") == {"refusal": "", "intact": True}
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        sender = WeightSender(DenseSource(model), rank=0, rank_count=1)
        offer = sender.make_offer(1, "shm", 1, timeout=10)
        verb("weights_open", 1, "shm", sender.manifest().to_bytes(), [offer], 1, 0, 10.0)
        sender.open(1, timeout=10)
        sent = sender.send(1, 1, timeout=10)
        assert verb("weights_receive", 1, 1, 10.0) == digest_of(sender.manifest(), sent.partial_sums)
        verb("weights_commit", 1, 1)
        with pytest.raises(DeadlinePassed, match="version 2 from trainer rank 0"):
            verb("weights_receive", 1, 2, 0.2)
        assert verb("weights_abort", 1) == "clean"

        service.kill()
        service.join(10)
        _, alive = psutil.wait_procs(engine, timeout=5)
        assert alive == []
    finally:
        service.kill()
        for process in family:
            if process.is_running():
                process.kill()


def _service(pipe: multiprocessing.connection.Connection, folder: str, in_core: bool) -> None:
    """An engine's service: passes verbs on."""
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="WARNING", HF_HUB_OFFLINE="1")
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    if in_core:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    asyncio.run(_serve(pipe, folder))


async def _serve(pipe: multiprocessing.connection.Connection, folder: str) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=folder,
            worker_extension_cls="fourfold.weights.apply.vllm_worker.WeightWorker",
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            dtype="bfloat16",
        )
    )
    while True:
        while not pipe.poll():
            await asyncio.sleep(0.01)
        name, args = pipe.recv()
        pipe.send(await llm.collective_rpc(name, args=args))
