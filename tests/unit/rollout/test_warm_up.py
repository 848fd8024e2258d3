"""The warm-up of an engine: it samples and probes once, in a bounded time."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence

import pytest

from fourfold.errors import ARCHITECTURE_NOT_VERIFIED, DeadlinePassed, Unavailable, WrongState
from fourfold_rollout.warm_up import prove_updates, warm_up
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


async def test_the_proof_of_updates_is_compared_by_a_probe() -> None:
    engine = FakeEngine()
    await prove_updates(engine)
    assert engine.log == ["probe", "prove", "probe"]
    for engine.after_proof in (0.02, math.nan):
        engine.shift = 0.0
        with pytest.raises(WrongState, match="differ by") as caught:
            await prove_updates(engine)
        assert caught.value.reason == ARCHITECTURE_NOT_VERIFIED


@pytest.mark.parametrize(("hangs", "place"), [(1, "before"), (2, "after")])
async def test_a_probe_around_the_proof_has_a_deadline(hangs: int, place: str) -> None:
    engine, probes = FakeEngine(), 0
    answer = engine.prompt_logprobs

    async def probe(token_ids: Sequence[int], *, first: bool = True) -> list[float]:
        nonlocal probes
        probes += 1
        if probes == hangs:
            await asyncio.sleep(60)
        return await answer(token_ids, first=first)

    engine.prompt_logprobs = probe  # type: ignore[method-assign]
    with pytest.raises(DeadlinePassed, match=f"did not finish a probe {place} the proof of updates in 0 s"):
        await asyncio.wait_for(prove_updates(engine, probe_timeout=0.01), 10)


async def test_an_engine_that_cannot_be_updated_serves_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    engine.refusal = "it is AWQ"
    with caplog.at_level(logging.WARNING):
        await prove_updates(engine)
    assert "Weight updates will be refused. reason=it is AWQ" in caplog.text
