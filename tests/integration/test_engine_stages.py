"""The rollout engine with two stages of a pipeline, on a CPU: samples, pauses and log-probabilities are the same."""

from __future__ import annotations

import asyncio
import multiprocessing
import multiprocessing.connection
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from fourfold.errors import FourfoldError
from fourfold_rollout.engine import EngineSettings, SampleOutput, SampleRequest

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(400)]

SAMPLES: Final = 4
TOKENS: Final = 400  # so many that the engine is usually paused before the last one
_ATTEMPTS: Final = 10
PROMPT: Final = [3, 4, 5]


class _Sink:
    def __init__(self, errors: list[str]) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(SAMPLES)]
        self.logprobs: list[list[float]] = [[] for _ in range(SAMPLES)]
        self.boundaries: dict[int, int] = {}
        self.errors = errors
        self.left = SAMPLES
        self.some, self.all = asyncio.Event(), asyncio.Event()

    def put(self, index: int, output: SampleOutput) -> None:
        self.tokens[index] += output.token_ids.tolist()
        self.logprobs[index] += output.logprobs.tolist()
        self.left -= output.finish is not None
        if all(self.tokens):
            self.some.set()
        if not self.left:
            self.all.set()

    def boundary(self, index: int, token_count: int) -> None:
        self.boundaries[index] = token_count

    def fail(self, error: FourfoldError) -> None:
        self.errors.append(str(error))
        self.all.set()


def test_two_stages_sample_and_pause_like_one(tiny_model: Callable[..., Path]) -> None:
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=_engine, args=(other, tiny_model("llama")))
    process.start()
    other.close()
    try:
        assert pipe.poll(380), "the engine did not answer"
        seen = pipe.recv()
    finally:
        process.kill()
        process.join(10)
    assert seen["workers"] == 2 and seen["errors"] == []
    assert "no table of log-probabilities" in seen["grammar_obstacle"]
    assert all(0 < count < TOKENS for count in seen["boundaries"].values()) and len(seen["boundaries"]) == SAMPLES
    assert seen["sampled while paused"] == 0
    assert seen["counts"] == [TOKENS] * SAMPLES
    assert max(seen["differences"]) < 0.2, "bfloat16: a probe computes the tokens in another batch"


def _engine(pipe: multiprocessing.connection.Connection, folder: Path) -> None:
    from fourfold_rollout.vllm import environment

    settings = EngineSettings(
        folder=folder, dtype="bfloat16", max_context_tokens=512, max_concurrent_samples=SAMPLES, max_batched_tokens=512,
        enforce_eager=True, kv_cache_gib=1, gpus=0, gpu_memory_utilization=0.5, seed=0,
        options={"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
    )  # fmt: skip
    environment.prepare(settings, "127.0.0.1")
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # by default each worker needs a NUMA node of its own
    from fourfold_rollout.vllm import engine_args
    from fourfold_rollout.vllm.engine import VllmEngine

    engine_args._WORKER_EXTENSION = "tests.support.pipeline_worker.PipelineWorker"  # type: ignore[misc]
    engine = VllmEngine.start(settings, fork=True)
    pipe.send(asyncio.run(_observe(engine)))


async def _observe(engine: Any) -> dict[str, Any]:
    from fourfold_rollout.warm_up import warm_up

    errors: list[str] = []
    await engine.attach(errors.append)
    await warm_up(engine)
    for attempt in range(_ATTEMPTS):
        sink = _Sink(errors)
        await _submit(engine, sink, attempt)
        await asyncio.wait_for(sink.some.wait(), 60)
        await engine.pause()
        if len(sink.boundaries) == SAMPLES:
            break
        await engine.resume()  # on a busy machine the last token may come before the pause: once more
        await asyncio.wait_for(sink.all.wait(), 60)
    before = engine.load().sampled_tokens
    await asyncio.sleep(0.5)
    paused = engine.load().sampled_tokens - before
    await engine.resume()
    await asyncio.wait_for(sink.all.wait(), 60)
    probes = [await engine.prompt_logprobs([*PROMPT, *tokens]) for tokens in sink.tokens]
    pairs = [zip(own, probe[len(PROMPT) :], strict=True) for own, probe in zip(sink.logprobs, probes, strict=True)]
    seen = {
        "workers": engine.description.worker_count, "errors": errors, "boundaries": sink.boundaries,
        "grammar_obstacle": engine.description.grammar_obstacle, "sampled while paused": paused,
        "counts": [len(tokens) for tokens in sink.tokens],
        "differences": [max(abs(a - b) for a, b in pair) for pair in pairs],
    }  # fmt: skip
    await engine.close()
    return seen


async def _submit(engine: Any, sink: _Sink, attempt: int) -> None:
    await engine.submit(
        [
            SampleRequest(
                key=f"sample-{attempt}-{index}", prompt_token_ids=PROMPT, temperature=1.0, top_p=1.0, top_k=0,
                max_tokens=TOKENS, stop_token_ids=(), seed=index, cache_salt="v0", streaming=True, sink=sink,
                index=index,
            )
            for index in range(SAMPLES)
        ]
    )  # fmt: skip
