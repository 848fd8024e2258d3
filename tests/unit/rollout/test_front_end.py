"""The output barrier: callbacks run once, after all outputs that were received before."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from fourfold_rollout.vllm.patches.front_end import OutputBarrier


class FrontEnd:
    """The parts of vLLM that the barrier uses: a queue, and a hook at the end of each message."""

    def __init__(self) -> None:
        self.stats: list[Any] = []
        processor = SimpleNamespace(update_scheduler_stats=self.stats.append)
        core = SimpleNamespace(outputs_queue=asyncio.Queue())
        self.llm = SimpleNamespace(engine_core=core, output_processor=processor)

    def process(self, stats: Any) -> None:
        self.llm.output_processor.update_scheduler_stats(stats)

    async def process_mark(self) -> None:
        self.process((await self.llm.engine_core.outputs_queue.get()).scheduler_stats)


@pytest.fixture
async def front() -> FrontEnd:
    return FrontEnd()


async def test_a_mark_passes_behind_the_outputs_and_vllm_does_not_see_it(front: FrontEnd) -> None:
    barrier = OutputBarrier(front.llm)
    passed = asyncio.create_task(barrier.passed())
    await asyncio.sleep(0)
    front.process("stats")
    assert not passed.done()
    await front.process_mark()
    await asyncio.wait_for(passed, 1)
    assert front.stats == ["stats"]


async def test_a_callback_runs_once_after_the_next_outputs_and_may_register_again(front: FrontEnd) -> None:
    barrier = OutputBarrier(front.llm)
    calls: list[str] = []

    def first() -> None:
        calls.append("first")
        barrier.after_next(first)

    for call in (first, lambda: calls.append("second"), first):
        barrier.after_next(call)
    mark = asyncio.create_task(barrier.passed())
    await asyncio.sleep(0)
    await front.process_mark()
    await mark
    assert calls == [], "a mark brings no outputs"
    front.process(None)
    assert calls == ["first", "second"]
    front.process(None)
    assert calls == ["first", "second", "first"]
