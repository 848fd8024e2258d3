"""Sleep and wake of an engine: requests wait, awake weights can be updated, level 2 loses the weights."""

from __future__ import annotations

import asyncio

import pytest

from fourfold.errors import DeadlinePassed, FourfoldError, Internal, Unavailable, WrongState
from fourfold_rollout.pause.controller import PauseMode
from fourfold_rollout.update.controller import WeightController
from tests.fakes.engine import FakeEngine, epoch_terms


def make(*, sleep_mode: bool = True, device_type: str = "cuda") -> tuple[FakeEngine, WeightController]:
    engine = FakeEngine(sleep_mode=sleep_mode, device_type=device_type)
    return engine, WeightController(engine, update_timeout=5.0)


async def update(weights: WeightController, version: int) -> None:
    await weights.open(epoch_terms(version), timeout=1)
    await weights.begin(epoch=version, policy_version=version, mode=PauseMode.KEEP, timeout=1)
    await weights.receive(epoch=version, policy_version=version, timeout=1)
    await weights.commit(epoch=version, policy_version=version, timeout=1)


async def served(weights: WeightController, timeout: float = 0.05) -> int:
    async with weights.serving(timeout) as lease:
        return lease.version


async def test_new_samples_wait_for_the_wake() -> None:
    engine, weights = make()
    for _ in range(2):
        await weights.sleep(1, timeout=1)
    assert weights.sleeping
    with pytest.raises(Unavailable, match="the engine sleeps") as caught:
        await served(weights)
    assert caught.value.reason == "ASLEEP"
    waiting = asyncio.create_task(served(weights, 1))
    await weights.wake(["weights"], timeout=1)
    await asyncio.sleep(0.01)
    assert not waiting.done()
    for _ in range(2):
        await weights.wake([], timeout=1)
    assert await waiting == 0
    assert engine.log == ["sleep 1", "wake weights", "wake kv_cache"]


async def test_who_waits_for_the_wake_is_sent_away_when_nobody_is_served_any_more() -> None:
    _, weights = make()
    await weights.sleep(1, timeout=1)
    waiting = asyncio.create_task(served(weights, 30))
    await asyncio.sleep(0.01)
    weights.refuse(Unavailable("draining", reason="DRAINING"))
    for call in (waiting, served(weights)):
        with pytest.raises(Unavailable, match="draining"):
            await asyncio.wait_for(call, 10)


async def test_it_sleeps_neither_with_samples_nor_in_an_update() -> None:
    engine, weights = make()
    async with weights.serving(1):
        with pytest.raises(WrongState, match="1 calls still have samples"):
            await weights.sleep(1, timeout=0.1)
        assert await served(weights) == 0, "it goes on as before"
    await weights.open(epoch_terms(), timeout=1)
    await weights.begin(epoch=1, policy_version=1, mode=PauseMode.WAIT, timeout=1)
    with pytest.raises(WrongState, match="an update to version 1 is open"):
        await weights.sleep(1, timeout=1)
    await weights.abort(epoch=1, timeout=1)
    assert await served(weights) == 0
    await weights.sleep(1, timeout=1)
    with pytest.raises(WrongState, match="wake it before"):
        await weights.sleep(2, timeout=1)
    with pytest.raises(WrongState, match="wake it before a probe"):
        await weights.probe([1, 2], timeout=1)
    assert engine.log[-1] == "sleep 1"


async def test_it_sleeps_when_what_runs_has_finished_and_nothing_new_comes_in_between() -> None:
    engine, weights = make()
    async with weights.serving(1):
        sleeping = asyncio.create_task(weights.sleep(1, timeout=5))
        await asyncio.sleep(0.01)
        with pytest.raises(Unavailable):
            await served(weights)
        assert engine.log == []
    await sleeping
    assert engine.log == ["sleep 1"]


async def test_weights_that_are_awake_can_be_updated_and_nothing_is_sampled_before_the_rest_is() -> None:
    engine, weights = make()
    await weights.sleep(2, timeout=1)
    with pytest.raises(WrongState, match='wake "weights" first'):
        await update(weights, 1)
    await weights.wake(["weights"], timeout=1)
    await update(weights, 2)
    assert "settle" not in engine.log  # that would wake the scheduler
    with pytest.raises(Unavailable, match="the engine sleeps"):
        await served(weights)
    await weights.wake(["kv_cache"], timeout=1)
    assert await served(weights) == 2


async def test_a_deep_sleep_loses_the_weights_until_an_update_brings_others() -> None:
    _, weights = make()
    await weights.sleep(2, timeout=1)
    await weights.wake([], timeout=1)
    assert weights.dirty
    with pytest.raises(Unavailable, match="dropped its weights") as caught:
        await served(weights)
    assert caught.value.reason == "WEIGHTS_DIRTY"
    await update(weights, 1)
    assert await served(weights) == 1


async def test_the_kv_cache_may_wake_while_an_update_is_open() -> None:
    _, weights = make()
    await weights.sleep(1, timeout=1)
    await weights.wake(["weights"], timeout=1)
    await weights.open(epoch_terms(), timeout=1)
    await weights.begin(epoch=1, policy_version=1, mode=PauseMode.KEEP, timeout=1)
    await weights.wake(["kv_cache"], timeout=1)
    with pytest.raises(Unavailable, match="being updated to version 1"):
        await served(weights)
    await weights.receive(epoch=1, policy_version=1, timeout=1)
    await weights.commit(epoch=1, policy_version=1, timeout=1)
    assert await served(weights) == 1


@pytest.mark.parametrize("error", [DeadlinePassed("no answer"), Internal("the engine failed: unmap")])
async def test_a_sleep_that_was_not_confirmed_counts_as_one_until_the_engine_is_asked_to_wake(
    error: FourfoldError,
) -> None:
    engine, weights = make()
    engine.late = error
    with pytest.raises(type(error)):
        await weights.sleep(1, timeout=1)
    assert weights.dirty and weights.sleeping
    engine.late = None
    with pytest.raises(WrongState, match='wake "weights" first'):
        await update(weights, 1)
    await weights.wake(["weights"], timeout=1)
    await update(weights, 2)
    await weights.wake([], timeout=1)
    assert not engine.asleep
    assert await served(weights) == 2


async def test_a_sleep_that_was_not_confirmed_is_asked_for_again() -> None:
    engine, weights = make()
    engine.late = DeadlinePassed("no answer")
    with pytest.raises(DeadlinePassed):
        await weights.sleep(1, timeout=1)
    engine.late = None
    for _ in range(2):
        await weights.sleep(1, timeout=1)
    assert engine.log == ["sleep 1", "sleep 1"]


async def test_a_wake_that_was_not_confirmed_can_be_repeated() -> None:
    engine, weights = make()
    await weights.sleep(1, timeout=1)
    engine.late = DeadlinePassed("no answer")
    with pytest.raises(DeadlinePassed):
        await weights.wake(["weights"], timeout=1)
    assert weights.sleeping
    engine.late = None
    await weights.wake([], timeout=1)
    assert not engine.asleep and not weights.sleeping
    assert await served(weights) == 0


@pytest.mark.parametrize(
    ("device_type", "words"), [("cpu", "runs on CPU"), ("cuda", "rollout.sleep_mode = true")], ids=["cpu", "not-asked"]
)
async def test_engines_that_cannot_sleep_say_why(device_type: str, words: str) -> None:
    _, weights = make(sleep_mode=False, device_type=device_type)
    with pytest.raises(WrongState, match=words):
        await weights.sleep(1, timeout=1)
    assert await served(weights) == 0
