"""The deadlines of weight calls: each passes its remaining seconds to the engine, and no wait exceeds it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fourfold.errors import DeadlinePassed, Unavailable
from fourfold_rollout.update.controller import WeightController
from tests.fakes.engine import FakeEngine, epoch_terms
from tests.unit.rollout.test_update_controller import begin, make, open_epoch, served


async def test_open_and_receive_end_with_their_callers() -> None:
    engine, weights = make(update_timeout=500.0)
    await weights.open(epoch_terms(), timeout=100.0)
    assert 90.0 < engine.timeouts["open"] <= 100.0
    await begin(weights)
    await weights.receive(epoch=1, policy_version=1, timeout=200.0)
    assert 190.0 < engine.timeouts["receive"] <= 200.0


async def test_sleep_and_wake_end_with_their_callers() -> None:
    engine = FakeEngine(sleep_mode=True)
    weights = WeightController(engine, update_timeout=500.0)
    await weights.sleep(1, timeout=100.0)
    assert 90.0 < engine.timeouts["sleep"] <= 100.0
    await weights.wake((), timeout=200.0)
    assert 190.0 < engine.timeouts["wake"] <= 200.0


async def test_what_a_call_waited_for_its_turn_is_no_more_left_for_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, weights = make()
    go = asyncio.Event()

    async def slow(token_ids: Any) -> list[float]:
        await go.wait()
        return [0.0, 0.0]

    monkeypatch.setattr(engine, "prompt_logprobs", slow)
    probe = asyncio.create_task(weights.probe([1, 2], timeout=5.0))
    await asyncio.sleep(0)
    opening = asyncio.create_task(open_epoch(weights))
    await asyncio.sleep(0.1)
    go.set()
    await asyncio.gather(probe, opening)
    assert engine.timeouts["open"] < 0.95, "of 1 s"


async def test_a_probe_that_the_engine_does_not_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, weights = make()

    async def never(token_ids: Any) -> list[float]:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    monkeypatch.setattr(engine, "prompt_logprobs", never)
    with pytest.raises(DeadlinePassed, match=r"the probe of 2 tokens took longer than 0\.\d s"):
        await weights.probe([1, 2], timeout=0.05)
    monkeypatch.undo()
    assert len(await weights.probe([1, 2], timeout=1.0)) == 2, "its turn is over"


async def test_a_sample_waits_no_longer_than_an_update_may_take() -> None:
    _, weights = make(update_timeout=0.05)
    await open_epoch(weights)
    await begin(weights)
    async with asyncio.timeout(10):
        with pytest.raises(Unavailable, match="being updated to version 1"):
            await served(weights, timeout=1000.0)
