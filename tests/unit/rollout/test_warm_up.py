"""The warm-up of an engine: it samples and probes once, in a bounded time."""

from __future__ import annotations

import asyncio

import pytest

from fourfold.errors import DeadlinePassed, Unavailable
from fourfold_rollout.warm_up import warm_up
from tests.fakes.engine import FakeEngine


async def test_it_samples_with_and_without_filters_and_probes() -> None:
    engine = FakeEngine()
    work = asyncio.create_task(warm_up(engine))
    while not work.done():
        engine.tick()
        await asyncio.sleep(0)
    await work
    assert [(s.request.top_p, s.request.top_k, s.tokens) for s in engine.samples] == [(1.0, 0, 2), (0.9, 2, 2)]
    assert engine.running_count == 0
    assert engine.log == ["probe"]


async def test_an_engine_that_does_not_sample_is_not_waited_for() -> None:
    with pytest.raises(DeadlinePassed, match="did not finish its warm-up in 0 s"):
        await warm_up(FakeEngine(), timeout=0.01)


async def test_the_death_of_the_engine_is_what_is_raised() -> None:
    engine = FakeEngine()
    work = asyncio.create_task(warm_up(engine))
    while not engine.samples:
        await asyncio.sleep(0)
    engine.die("the engine died: out of memory")
    with pytest.raises(Unavailable, match="out of memory"):
        await work
