"""The prompt of a group is computed once, in the step in which all samples of the group begin."""

from __future__ import annotations

import asyncio
import multiprocessing
import multiprocessing.connection
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from fourfold_rollout.engine import EngineLoad, EngineSettings, SampleOutput, SampleRequest
from tests.support.answer import answer_of

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

BLOCK: Final = 32
PROMPT: Final = 3 * BLOCK + 5
GROUP: Final = 8
TOKENS: Final = 20


def test_a_groups_prompt_is_computed_once_in_one_step(tiny_model: Callable[..., Path]) -> None:
    steps, load, kv_cache_tokens = answer_of(_engine, tiny_model("qwen2"))
    started = [step for step in steps if any(cached is not None for cached in step)]
    assert [len(step) for step in started] == [GROUP], "all began in one step"
    # The first computes the whole prompt; of the others each computes only the block that is not full.
    assert started[0] == [0] + [PROMPT - PROMPT % BLOCK] * (GROUP - 1)
    # The load in the middle of sampling also counts samples that put all their tokens at the end.
    assert load.running_samples == GROUP
    assert 0 < load.sampled_tokens < GROUP * TOKENS
    assert load.held_tokens == GROUP * PROMPT + load.sampled_tokens
    assert kv_cache_tokens >= GROUP * (PROMPT + TOKENS)


class _Ends:
    """Counts the samples that ended."""

    def __init__(self) -> None:
        self.left = GROUP
        self.all = asyncio.Event()

    def put(self, index: int, output: SampleOutput) -> None:
        self.left -= output.finish is not None
        if not self.left:
            self.all.set()

    def boundary(self, index: int, token_count: int) -> None:
        raise AssertionError("nothing paused")

    def fail(self, error: Exception) -> None:
        raise error


def _engine(pipe: multiprocessing.connection.Connection, folder: Path) -> None:
    """Start an engine, sample one group, and send the cached prompt tokens of each step."""
    from fourfold_rollout.vllm import environment

    settings = EngineSettings(
        folder=folder, dtype="bfloat16", max_context_tokens=512, max_concurrent_samples=GROUP, max_batched_tokens=512,
        enforce_eager=True, kv_cache_gib=1, gpus=0, gpu_memory_utilization=0.5, seed=0, options={"block_size": BLOCK},
    )  # fmt: skip
    environment.prepare(settings, "127.0.0.1")
    from fourfold_rollout.vllm.engine import VllmEngine

    engine = VllmEngine.start(settings, fork=True)
    asyncio.run(_sample(pipe, engine))


async def _sample(pipe: multiprocessing.connection.Connection, engine: Any) -> None:
    await engine.attach(lambda reason: pipe.send(reason))
    steps: list[list[int | None]] = []
    loads: list[EngineLoad] = []
    processor = engine._llm.output_processor
    process = processor.process_outputs

    def look(outputs: list[Any], *args: Any, **keywords: Any) -> Any:
        steps.append([one.prefill_stats and one.prefill_stats.num_cached_tokens for one in outputs])
        result = process(outputs, *args, **keywords)
        if len(steps) == TOKENS // 2:
            loads.append(engine.load())
        return result

    processor.process_outputs = look
    ends = _Ends()
    await engine.submit(
        [
            SampleRequest(
                key=f"s-{index}", prompt_token_ids=list(range(3, 3 + PROMPT)), temperature=1.0, top_p=1.0, top_k=0,
                max_tokens=TOKENS, stop_token_ids=(), seed=index, cache_salt="v0", streaming=False, sink=ends,
                index=index,
            )
            for index in range(GROUP)
        ]
    )  # fmt: skip
    await asyncio.wait_for(ends.all.wait(), 60)
    pipe.send((steps, loads[0], engine.description.kv_cache_tokens))
    await engine.close()
