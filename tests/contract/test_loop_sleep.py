"""Engines that sleep while the trainer trains: in which order, what is lost, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fourfold import metrics as m
from fourfold.errors import CANNOT_SLEEP, WrongState
from fourfold.reward.v1 import reward_service_pb2 as reward
from tests.fakes.stage import Stage, fresh_processes, until, watch_for
from tests.fakes.toy_rollout import FakeRollout

SLEEP: dict[str, Any] = {"gpus_per_replica": 1, "sleep_mode": True}


def journal_of(stage: Stage) -> list[str]:
    """One journal for all."""
    journal: list[str] = []
    for member in (*stage.rollouts, stage.trainer):
        member.journal = journal
    return journal


async def test_engines_sleep_while_the_trainer_trains_and_wake_for_the_update(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=3, rollout=SLEEP | {"replicas": 2})
    journal = journal_of(stage)
    asleep: list[bool] = []
    awake: list[bool] = []

    async def on_train(_step: int) -> None:
        journal.append("train")
        asleep.extend(len(engine.asleep) == 2 for engine in stage.rollouts)

    async def on_saved(_step: int) -> None:
        awake.extend(not engine.asleep for engine in stage.rollouts)

    stage.trainer.on_train, stage.trainer.on_saved = on_train, on_saved
    await stage.complete()
    assert asleep == [True] * 6 and all(awake) and len(awake) == 4
    for engine in stage.rollouts:
        assert engine.sleeps == [2, 2, 2], "nothing is kept: it will be replaced"
        mine = [line.removeprefix(f"{engine.member_id} ") for line in journal if line.startswith(engine.member_id)]
        first = mine.index("sleepengine")
        woken = ["sleepengine", "wakeengine weights", "begin", "receive", "commit", "wakeengine kv_cache", "probe"]
        assert mine[first : first + 8] == [*woken, "release"]
        assert engine.version == stage.trainer.version


async def test_the_parts_of_a_step_add_up_to_it(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=2, rollout=SLEEP)
    engine = stage.rollouts[0]
    engine.on_sleep = lambda: asyncio.sleep(0.05)
    engine.on_wake = lambda: asyncio.sleep(0.1)
    await stage.complete()
    for row in stage.lines("metrics.jsonl"):
        assert row[m.TIME_SLEEP] >= 0.05 and row[m.TIME_WAKE] >= 0.2, "weights, then KV cache"
        parts = [row.get(name, 0.0) for name in m.TIMES_OF_A_STEP]
        assert all(seconds >= 0 for seconds in parts) and row[m.TIME_OTHER] >= 0
        assert sum(parts) + row[m.TIME_OTHER] == pytest.approx(row[m.TIME_STEP])


async def test_after_a_step_without_a_new_version_the_old_one_is_published_again(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(steps=2, rollout=SLEEP)
    stage.reward.outcome = lambda item: reward.SampleScore(score=0.0)
    await stage.complete()
    assert stage.report()["skipped_steps"] == 2
    assert stage.rollouts[0].commits == [0, 0] and not stage.rollouts[0].asleep
    assert all(m.TIME_WAKE in row for row in stage.lines("metrics.jsonl")), "it was part of the step"


async def test_an_engine_that_never_sleeps_ends_the_run_with_its_reason(
    make_stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_stage(steps=2, rollout=SLEEP, weights={"timeout_seconds": 2.0})
    stage.rollouts[0].busy_sleeps = 1000
    await stage.start()
    assert await stage.finish() == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "rollout-0" in last and "1 calls still have samples" in last and "weights.timeout_seconds" in last
    assert stage.trainer.batches == {}, "it would not have found memory"


async def test_an_engine_that_cannot_sleep_ends_the_run_at_once(
    make_stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_stage(steps=2, rollout=SLEEP)

    tries = 0

    async def cannot() -> None:
        nonlocal tries
        tries += 1
        raise WrongState("it runs on CPU", reason=CANNOT_SLEEP)

    stage.rollouts[0].on_sleep = cannot
    await stage.start()
    assert await stage.finish() == 1
    assert tries == 1
    assert "it runs on CPU. The trainer needs this memory; set rollout.sleep_mode = false" in capsys.readouterr().err


async def test_people_are_told_of_an_engine_that_does_not_fall_asleep(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=1, rollout=SLEEP)
    stage.rollouts[0].busy_sleeps = 1000
    await stage.start()
    await watch_for(stage, lambda status: "rollout-0 to fall asleep (" in status.waiting_for)
    stage.rollouts[0].busy_sleeps = 0
    assert await stage.finish() == 0


@pytest.mark.parametrize("call", ["SleepEngine", "WakeEngine kv_cache"])
async def test_an_engine_that_dies_on_its_way_is_left_behind(make_stage: Callable[..., Stage], call: str) -> None:
    stage = make_stage(steps=2, rollout=SLEEP | {"replicas": 2})
    stage.rollouts[0].dies_in = call
    await stage.complete()
    assert stage.rollouts[1].version == stage.trainer.version > 0
    assert stage.rollouts[1].sleeps == [2, 2]


@pytest.mark.parametrize("call", [pytest.param("on_sleep", marks=pytest.mark.slow), "on_wake"])
async def test_an_engine_that_hangs_is_left_out(make_stage: Callable[..., Stage], call: str) -> None:
    stage = make_stage(steps=2, rollout=SLEEP | {"replicas": 2}, weights={"timeout_seconds": 2.0})
    setattr(stage.rollouts[0], call, lambda: asyncio.sleep(30))
    await stage.complete()
    assert stage.rollouts[1].version == stage.trainer.version > 0
    assert stage.rollouts[1].sleeps == [2, 2]


def joins_while_training(stage: Stage, late: FakeRollout) -> None:
    """The first step's training ends when this engine has joined and has been told to sleep."""

    async def on_train(step: int) -> None:
        if step == 1:
            stage.rollouts.append(late)
            await late.join(stage.address)
            await until(lambda: "rollout-1 sleepengine" in late.journal)

    stage.trainer.on_train = on_train


async def test_an_engine_that_falls_asleep_as_training_ends_gets_its_weights_at_once(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(steps=2, rollout=SLEEP)
    late = FakeRollout("rollout-1", stage.config)
    late.on_sleep = lambda: asyncio.sleep(0.5)
    joins_while_training(stage, late)
    await stage.complete()
    assert late.commits == [1, 2] and late.aborts == 0, "the update found it asleep, and woke it"
    assert late.sleeps == [2, 2] and not late.asleep


async def test_an_engine_that_refuses_to_sleep_is_not_asked_again_when_training_has_ended(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(steps=1, rollout=SLEEP, weights={"timeout_seconds": 30.0})
    late, later = FakeRollout("rollout-1", stage.config), FakeRollout("rollout-2", stage.config)
    late.busy_sleeps = 1000

    async def on_train(_step: int) -> None:
        stage.rollouts += [late, later]
        await late.join(stage.address)
        await until(lambda: late.busy_sleeps < 1000)
        await later.join(stage.address)
        await until(lambda: later.asleep)

    stage.trainer.on_train = on_train
    await stage.start()
    await stage.check_end(15.0)
    assert later.sleeps == [2], "it did not wait for the one that refuses"
    assert late.commits == later.commits == [1] and late.sleeps == []


async def test_engines_that_a_killed_coordinator_left_asleep_are_woken(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=2, rollout=SLEEP)
    reached = asyncio.Event()

    async def stop(_step: int) -> None:
        reached.set()
        await asyncio.sleep(30)

    stage.trainer.on_train = stop
    await stage.start()
    await until(reached.is_set)
    await stage.kill()
    engine = stage.rollouts[0]
    assert engine.asleep
    await fresh_processes(stage)
    stage.rollouts[0].asleep, stage.rollouts[0].state = set(engine.asleep), engine.state
    await stage.complete()
    assert not stage.rollouts[0].asleep


async def test_a_restarted_trainer_finds_the_engines_awake_again(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=4, rollout=SLEEP)
    stage.trainer.on_train = lambda step: die(step)

    async def die(step: int) -> None:
        if step == 3:
            old = stage.trainer
            stage.trainer = type(old)("trainer-0", stage.config, checkpoints=old.checkpoints)
            stage.trainer.batches = {s: ids for s, ids in old.batches.items() if s <= 2}
            await stage.trainer.join(stage.address)
            asyncio.get_running_loop().create_task(old.kill())
            await asyncio.sleep(30)

    await stage.complete()
    assert stage.trainer.loaded == [2] and not stage.rollouts[0].asleep
