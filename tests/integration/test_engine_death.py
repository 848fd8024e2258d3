"""Errors in vLLM's output task: an error of one sample ends that sample, an error of vLLM ends the engine."""

from __future__ import annotations

import asyncio
import multiprocessing
import multiprocessing.connection
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from fourfold.errors import FourfoldError, Unavailable
from fourfold_rollout.engine import EngineSettings, SampleOutput, SampleRequest
from tests.support.answer import answer_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SAMPLES: Final = 8
TOKENS: Final = 400
STEPS_BEFORE: Final = 10
# The search for the cause looks 50 times for an exit code. If it blocked the event loop, as it did once, the loop would
# turn only about twice for each sample.
TURNS: Final = 25


@pytest.mark.slow
def test_an_error_ends_its_sample_or_the_engine_and_never_the_event_loop(tiny_model: Callable[..., Path]) -> None:
    seen = answer_of(_engine, tiny_model("qwen2"))
    assert seen["of a sample"] == ["Internal: an output of the engine cannot be used: ValueError: not mine"]
    assert seen["others finished"] == SAMPLES - 1
    assert seen["told"] == [], "the engine goes on after an error of a sample"
    (reason,) = seen["told of vLLM's"]
    assert "vLLM's task for the engine's outputs failed: RuntimeError: no such token" in reason
    assert seen["of vLLM"] == [f"Unavailable: {reason}"] * SAMPLES
    assert seen["later"] == [("ENGINE_DEAD", reason)] * 3
    assert seen["core lived"]
    assert seen["turns"] > TURNS


class _Takes:
    """Counts the samples that ended, and how; refuses the outputs of one."""

    def __init__(self, refused: int | None = None) -> None:
        self.refused = refused
        self.finished = 0
        self.errors: list[str] = []
        self.all = asyncio.Event()

    def put(self, index: int, output: SampleOutput) -> None:
        if index == self.refused and output.finish is not None:
            raise ValueError("not mine")
        self._ended(output.finish is not None)

    def boundary(self, index: int, token_count: int) -> None:
        raise AssertionError("nothing paused")

    def fail(self, error: FourfoldError) -> None:
        self.errors.append(f"{type(error).__name__}: {error.message}")
        self._ended(0)

    def _ended(self, finished: int) -> None:
        self.finished += finished
        if self.finished + len(self.errors) == SAMPLES:
            self.all.set()


def _engine(pipe: multiprocessing.connection.Connection, folder: Path) -> None:
    """Start an engine, cause both kinds of error, and send the observations."""
    from fourfold_rollout.vllm import environment

    settings = EngineSettings(
        folder=folder, dtype="bfloat16", max_context_tokens=512, max_concurrent_samples=SAMPLES, max_batched_tokens=512,
        enforce_eager=True, kv_cache_gib=1, gpus=0, gpu_memory_utilization=0.5, seed=0,
    )  # fmt: skip
    environment.prepare(settings, "127.0.0.1")
    from fourfold_rollout.vllm.engine import VllmEngine

    engine = VllmEngine.start(settings, fork=True)
    pipe.send(asyncio.run(_both(engine)))


async def _both(engine: Any) -> dict[str, Any]:
    told: list[str] = []
    await engine.attach(told.append)
    (core,) = engine._launched.processes
    takes = _Takes(refused=3)
    await engine.submit(_requests(takes, "a", tokens=8))
    await asyncio.wait_for(takes.all.wait(), 60)
    seen: dict[str, Any] = {
        "of a sample": takes.errors, "others finished": takes.finished, "told": list(told)
    }  # fmt: skip
    takes, steps, failed = _Takes(), 0, asyncio.Event()
    process_outputs = engine._llm.output_processor.process_outputs

    def fails(*arguments: Any, **options: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > STEPS_BEFORE:
            failed.set()
            raise RuntimeError("no such token")
        return process_outputs(*arguments, **options)

    engine._llm.output_processor.process_outputs = fails
    await engine.submit(_requests(takes, "b", tokens=TOKENS))
    await asyncio.wait_for(failed.wait(), 60)
    seen["turns"] = await _turns(takes.all.wait())
    seen |= {"told of vLLM's": told, "of vLLM": takes.errors, "core lived": core.is_alive()}
    seen["later"] = [
        await _error_of(call)
        for call in (engine.submit(_requests(takes, "c", tokens=1)), engine.prompt_logprobs([3, 4]), engine.pause())
    ]
    await engine.close()
    return seen


def _requests(takes: _Takes, name: str, *, tokens: int) -> list[SampleRequest]:
    return [
        SampleRequest(
            key=f"{name}-{index}", prompt_token_ids=[3, 4, 5, index + 3], temperature=1.0, top_p=1.0, top_k=0,
            max_tokens=tokens, stop_token_ids=(), seed=index, cache_salt="v0", streaming=index % 2 == 0, sink=takes,
            index=index,
        )
        for index in range(SAMPLES)
    ]  # fmt: skip


async def _turns(work: Any) -> int:
    """Await `work`; return the number of turns of the event loop, which does not depend on the machine's speed."""
    task, count = asyncio.ensure_future(asyncio.wait_for(work, 60)), 0
    while not task.done():
        await asyncio.sleep(0.001)
        count += 1
    await task
    return count


async def _error_of(call: Any) -> tuple[str, str]:
    """Return the reason and message of the error that a call ends with."""
    with pytest.raises(Unavailable) as caught:
        await asyncio.wait_for(call, 10)
    return caught.value.reason, caught.value.message
