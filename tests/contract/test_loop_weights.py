"""Weight updates of a run: damaged, stale and strange weights, engines that die or come late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from fourfold.errors import ARCHITECTURE_NOT_VERIFIED, MODEL_MISMATCH
from tests.fakes.stage import Stage, check_books, until
from tests.fakes.toy_rollout import FakeRollout


async def test_weights_that_arrive_damaged_are_not_served_and_sent_again(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=2)
    stage.rollouts[0].wrong_digests = 1
    await stage.start()
    assert await stage.finish() == 0
    check_books(stage)
    assert stage.rollouts[0].aborts == 1
    assert stage.rollouts[0].version == stage.trainer.version


async def test_an_engine_whose_weights_are_always_damaged_is_named(
    make_stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_stage(retry={"service_wait_seconds": 1.5})
    stage.rollouts[0].wrong_digests = 99
    await stage.start()
    assert await stage.finish() == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "rollout-0" in last and "arrived with digest 0000000000000000" in last
    assert stage.rollouts[0].commits == [], "a damaged version was never served"
    assert stage.rollouts[0].aborts >= 2, "it was given another chance"


async def test_an_engine_that_computes_with_old_weights_is_reported_as_stale(
    make_stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_stage(retry={"service_wait_seconds": 1.5})
    stage.rollouts[0].ignores_updates = True
    await stage.start()
    assert await stage.finish() == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "rollout-0: stale" in last and "bit for bit those of version 0" in last


async def test_an_engine_that_dies_while_it_receives_is_left_behind(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(rollout={"replicas": 2}, steps=2)
    stage.rollouts.append(FakeRollout("rollout-1", stage.config))
    stage.rollouts[0].forgets = True
    await stage.start()
    assert await stage.finish() == 0
    check_books(stage)
    assert stage.rollouts[1].version == stage.trainer.version > 0
    assert stage.rollouts[0].version == 0


@pytest.mark.parametrize("reason", [MODEL_MISMATCH, ARCHITECTURE_NOT_VERIFIED])
async def test_a_model_that_can_never_take_the_weights_ends_the_run_at_once(
    make_stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str], reason: str
) -> None:
    stage = make_stage(retry={"service_wait_seconds": 600.0})
    stage.rollouts[0].refuses = reason
    await stage.start()
    assert await stage.finish(10.0) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "no engine can take the trainer's weights: rollout-0" in last and "refuses norm.weight (64,)" in last
    assert stage.rollouts[0].opened <= 2, "once, and once more to see whose fault it is"


async def test_one_engine_with_another_model_is_left_out_for_good(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(rollout={"replicas": 2}, steps=4)
    stage.rollouts.append(FakeRollout("rollout-1", stage.config))
    stage.rollouts[1].refuses = MODEL_MISMATCH
    stage.rollouts[0].on_generate = lambda: asyncio.sleep(0.4)  # long enough for a second chance, if it had one
    await stage.start()
    assert await stage.finish() == 0
    check_books(stage)
    assert stage.rollouts[0].version == stage.trainer.version > 0
    assert stage.rollouts[1].version == 0 and stage.rollouts[1].opened <= 2


async def test_engines_on_another_host_get_their_weights_by_gloo(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=1, rollout={"replicas": 2})
    stage.rollouts.append(FakeRollout("rollout-1", stage.config, host_id="there"))
    await stage.start()
    assert await stage.finish() == 0
    assert {engine.backend for engine in stage.rollouts} == {"gloo"}


async def test_an_engine_of_another_run_is_filled_under_a_higher_version(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=1)
    stage.rollouts[0].version, stage.rollouts[0].weights = 7, 99
    await stage.start()
    assert await stage.finish() == 0
    check_books(stage)
    assert stage.rollouts[0].commits[0] == 8
    assert stage.rollouts[0].weights == stage.trainer.weights


async def test_an_engine_that_happens_to_have_the_same_version_is_not_trusted(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=4)
    stranger = FakeRollout("rollout-1", stage.config)

    async def join() -> None:
        if len(stage.trainer.batches) == 2 and stranger not in stage.rollouts:
            stage.rollouts.append(stranger)
            stranger.version, stranger.weights = stage.rollouts[0].version, 99
            await stranger.join(stage.address)
            await until(lambda: stranger.commits)

    stage.rollouts[0].on_generate = join
    await stage.start()
    assert await stage.finish() == 0
    check_books(stage)
    assert stranger.commits[0] == 3, "the second step's weights went to it under a number that it did not have"
    assert stranger.weights == stage.rollouts[0].weights == stage.trainer.weights
