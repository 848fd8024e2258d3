"""Calls that arrive together are submitted together, in one order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from fourfold.errors import Unavailable
from fourfold_rollout.engine import EngineSample, SampleRequest
from fourfold_rollout.generate.coalesce import RequestCoalescer
from tests.fakes.engine import FakeEngine, sample_request


def samples(name: str, count: int = 1) -> list[SampleRequest]:
    return [sample_request(key=f"{name}-{i}", seed=i, streaming=False) for i in range(count)]


async def test_calls_in_any_order_become_one_batch_ordered_by_id() -> None:
    engine = FakeEngine()
    coalescer = RequestCoalescer(engine)
    calls = [asyncio.create_task(coalescer.submit(samples(name, 2), at_once=False)) for name in "cab"]
    drawn = await asyncio.gather(*calls)
    assert engine.batches == [["a-0", "a-1", "b-0", "b-1", "c-0", "c-1"]]
    assert list(drawn[1]) == engine.samples[:2], "those of a"


async def test_a_steady_trickle_does_not_delay_the_first_for_ever() -> None:
    engine = FakeEngine()
    coalescer = RequestCoalescer(engine, quiet=0.03, longest=0.1)
    calls = []
    for i in range(12):
        calls.append(asyncio.create_task(coalescer.submit(samples(f"c{i:02}"), at_once=False)))
        await asyncio.sleep(0.02)
    await asyncio.gather(*calls)
    assert len(engine.batches) > 1
    assert engine.batches[0][0] == "c00-0"


async def test_nothing_waits_when_the_engine_is_busy_or_the_caller_asks() -> None:
    engine = FakeEngine()
    coalescer = RequestCoalescer(engine, quiet=10, longest=10)
    await asyncio.wait_for(coalescer.submit(samples("now"), at_once=True), 1)
    await asyncio.wait_for(coalescer.submit(samples("busy"), at_once=False), 1)
    assert engine.batches == [["now-0"], ["busy-0"]]


async def test_a_cancelled_call_leaves_nothing_in_the_engine() -> None:
    engine = FakeEngine()
    coalescer = RequestCoalescer(engine)
    gone = asyncio.create_task(coalescer.submit(samples("gone"), at_once=False))
    kept = asyncio.create_task(coalescer.submit(samples("kept"), at_once=False))
    await asyncio.sleep(0)
    gone.cancel()
    await kept
    assert engine.batches == [["kept-0"]]
    late = asyncio.create_task(coalescer.submit(samples("late"), at_once=True))
    await asyncio.sleep(0)
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    assert engine.running_count == 1
    assert engine.log == ["abandon late-0"]


class SlowEngine(FakeEngine):
    """An engine whose `submit` waits for the test."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = asyncio.Event()

    async def submit(self, requests: Sequence[SampleRequest]) -> Sequence[EngineSample]:
        await self.turn.wait()
        return await super().submit(requests)


async def test_a_call_that_is_cancelled_on_the_way_in_stays_until_its_samples_are_out_again() -> None:
    engine = SlowEngine()
    call = asyncio.create_task(RequestCoalescer(engine).submit(samples("gone", 3), at_once=True))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.sleep(0.01)
    assert not call.done(), "the engine will have its samples in a moment"
    engine.turn.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert engine.log == ["abandon gone-0", "abandon gone-1", "abandon gone-2"]


async def test_samples_that_come_at_the_moment_of_the_cancellation_are_abandoned() -> None:
    class Given(list[EngineSample]):
        """Cancels the call just before it gets its part of the samples."""

        def __getitem__(self, key: Any) -> Any:
            asyncio.get_running_loop().call_soon(call.cancel)
            return super().__getitem__(key)

    class Engine(FakeEngine):
        async def submit(self, requests: Sequence[SampleRequest]) -> Sequence[EngineSample]:
            return Given(await super().submit(requests))

    engine = Engine()
    call = asyncio.create_task(RequestCoalescer(engine).submit(samples("gone"), at_once=True))
    with pytest.raises(asyncio.CancelledError):
        await call
    assert engine.log == ["abandon gone-0"]


async def test_what_the_engine_raises_reaches_every_call() -> None:
    engine = FakeEngine()
    engine.die("the engine died: out of memory")
    coalescer = RequestCoalescer(engine)
    results = await asyncio.gather(*(coalescer.submit(samples(n), at_once=False) for n in "ab"), return_exceptions=True)
    assert [type(r) for r in results] == [Unavailable, Unavailable]
    with pytest.raises(Unavailable, match="out of memory"):
        await coalescer.submit(samples("c"), at_once=True)
