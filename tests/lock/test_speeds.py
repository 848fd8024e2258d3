"""Four speeds, each relative to plain code that does the same work in the same minute: slow machines pass, too.

The limits are 2.5 to 4 times what a busy machine measured: they find a speed that was lost, not one that changed.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
import torch
import transformers

from fourfold.weights.local import Publisher
from fourfold.weights.sender import WeightSender
from fourfold.weights.source.dense import DenseSource
from fourfold_bench.models import SHAPES, write_model
from fourfold_bench.trainer_speed import make_samples
from tests.lock.seeded_run import ROOT
from tests.support.weight_peers import make_model
from tests.unit.weights.test_local import PlainEngine

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.lock, pytest.mark.timeout(400)]

_COORDINATOR: Final = 4.0  # bare calls a sample; 1.2 measured
_TRAINER: Final = 2.0  # plain passes, one sample at a time, an update; 0.5 measured
_ROLLOUT: Final = 3.0  # times the seconds of vLLM alone; 1.2 measured
_WEIGHTS: Final = 20.0  # copies an update; 5 measured


def bench(out: Path, *words: str) -> dict[str, Any]:
    """Run a benchmark in a small form; return its results."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    command = [sys.executable, *words, "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, Any] = json.loads(out.read_text())["results"]
    return results


def median_seconds(act: Callable[[], object], count: int = 7) -> float:
    """Return the median duration of an act, without the first."""
    seconds = []
    for _ in range(count + 1):
        began = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def hold(ratio: float, limit: float, text: str) -> None:
    """Fail if a ratio is above its limit; `pytest -s` shows it."""
    sys.stdout.write(f"{ratio:.2f}, at most {limit:g}: {text}\n")
    assert ratio < limit, text


async def bare_call_us(size: int, count: int = 500) -> float:
    """Return the CPU time of this process for a gRPC call that echoes so many bytes, client and server."""
    server = grpc.aio.server()

    async def echo(request: bytes, _: object) -> bytes:
        return request

    handler = grpc.method_handlers_generic_handler("bare", {"echo": grpc.unary_unary_rpc_method_handler(echo)})
    server.add_generic_rpc_handlers([handler])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Any = channel.unary_unary("/bare/echo")
        await call(bytes(size))
        began = time.process_time()
        for _ in range(count):
            await call(bytes(size))
        spent = time.process_time() - began
    await server.stop(0)
    return 1e6 * spent / count


def test_the_coordinator_spends_few_bare_calls_on_a_sample(tmp_path: Path) -> None:
    words = ("-m", "fourfold_bench.experience_path", "--samples", "400", "--runs", "5", "--warmup", "1")
    sample = bench(tmp_path / "path.json", *words)["coordinator_us_per_sample"]
    call = asyncio.run(bare_call_us(8 * 1024))  # ids and log-probabilities of 1,024 tokens
    hold(sample / call, _COORDINATOR, f"{sample} us per sample, {call:.0f} us per bare call")


def test_an_update_takes_little_more_than_plain_passes(tmp_path: Path) -> None:
    results = bench(tmp_path / "trainer.json", "-m", "fourfold_bench.trainer_speed", "--runs", "5")
    write_model(tmp_path / "model", "tiny", context=512, dtype="bfloat16")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    batches = [
        torch.from_numpy(s.token_ids).long()[None] for s in make_samples(8192, 512, SHAPES["tiny"]["vocab_size"])
    ]

    def passes() -> None:
        for ids in batches:
            model(input_ids=ids, labels=ids).loss.backward()

    plain, update = median_seconds(passes), results["update"]["seconds"]
    hold(update / plain, _TRAINER, f"{update} s an update, {plain:.3f} s the same passes in plain torch")


def test_the_rollout_service_keeps_the_speed_of_vllm(tmp_path: Path) -> None:
    results = bench(tmp_path / "rollout.json", "-m", "fourfold", "bench", "rollout", "--alone", "plain")
    hold(1 / results["summary"]["ratio"]["service"], _ROLLOUT, f"tokens/s: {results['summary']['tokens_per_second']}")


def test_an_update_of_the_weights_takes_few_copies() -> None:
    size = 1 << 25
    trainer, engine = make_model(1, big=size), PlainEngine()
    tensors = dict(trainer.named_parameters())
    for name, tensor in tensors.items():
        engine.model.parameters.setdefault(name, torch.zeros_like(tensor.data))
    sender = WeightSender(DenseSource(trainer), rank=0, rank_count=1)
    source, copy = torch.ones(size, dtype=torch.bfloat16), torch.zeros(size, dtype=torch.bfloat16)
    versions = iter(range(1, 100))
    with Publisher([sender], [engine], backend="shm", timeout=60) as publisher:
        update = median_seconds(lambda: publisher.publish(next(versions), verify=False))
    plain = median_seconds(lambda: copy.copy_(source))
    assert engine.holds(trainer)
    hold(update / plain, _WEIGHTS, f"{update:.3f} s an update, {plain:.4f} s a copy of its bytes")
