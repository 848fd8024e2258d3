"""READY samples survive a kill: they are trained on, once, by a run whose result is that of a run without the kill."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fourfold import config as configuration
from fourfold.errors import Internal
from fourfold.sample import Sample
from fourfold_coordinator.state.ledger import Ledger, SampleState
from tests.fakes.stage import Stage, fresh_processes, hang_in_step, until
from tests.fakes.toy import make_config

EVERY_STEP = {"checkpoint": {"every_steps": 1}}


def facts(samples: list[Sample]) -> list[tuple[object, ...]]:
    """Return what training depends on: position and index instead of the ids, and no version numbers."""
    return [
        (s.sample_id[:8], s.sample_id[-1], s.token_ids.tobytes(), s.behavior_logprobs.tobytes(), s.score)
        for s in samples
    ]


async def undisturbed(make_stage: Callable[..., Stage], **changes: Any) -> tuple[list[tuple[object, ...]], int]:
    """Return what a run trains on, and its last weights."""
    stage, trained = make_stage(**changes), list[Sample]()
    stage.trainer.on_batch = trained.extend
    await stage.complete()
    return facts(trained), stage.trainer.weights


def generated(stage: Stage) -> list[str]:
    return [r.request_id[:8] for r in stage.rollouts[0].requests if not r.request_id.startswith("eval")]


async def test_a_batch_that_was_leased_is_trained_on_after_a_kill_of_everything(
    make_stage: Callable[..., Stage],
) -> None:
    expected, weights = await undisturbed(make_stage, steps=4, **EVERY_STEP)
    stage = make_stage(steps=4, **EVERY_STEP)
    trained: list[Sample] = []
    stage.trainer.on_batch = trained.extend
    hangs = hang_in_step(stage, 3)
    await stage.start()
    await until(hangs.is_set)
    await stage.kill()
    before = stage.ledger()
    leased = {row.sample_id for row in before.recorded()}
    assert before.counts()[SampleState.LEASED] == len(leased) == 12
    before.close()
    await fresh_processes(stage)
    stage.trainer.on_batch = trained.extend
    await stage.complete()
    assert set(stage.trainer.batches[3]) == leased, "the very samples"
    assert generated(stage) == ["p0000009", "p0000010", "p0000011"], "only those of step 4 are sampled again"
    assert (facts(trained), stage.trainer.weights) == (expected, weights), "as if nothing had been"
    assert "TRAINER_RESTORED" not in stage.report()["dropped"]
    assert [row["train/policy_lag_max"] for row in stage.lines("metrics.jsonl")] == [0.0] * 4
    assert 0 <= stage.lines("metrics.jsonl")[2]["rollout/tokens_per_second"] < 1e9
    assert not list((stage.folder / "experiences").iterdir())


async def test_groups_that_were_ready_are_kept_and_the_others_sampled_again(make_stage: Callable[..., Stage]) -> None:
    expected, weights = await undisturbed(make_stage, steps=3, **EVERY_STEP)
    stage = make_stage(steps=3, **EVERY_STEP)
    trained, hangs = list[Sample](), asyncio.Event()
    stage.trainer.on_batch = trained.extend

    async def hang() -> None:
        if stage.rollouts[0].requests[-1].request_id.startswith("p0000004"):
            hangs.set()
            await asyncio.sleep(30)

    stage.rollouts[0].on_generate = hang
    await stage.start()
    await until(lambda: hangs.is_set() and ready_count(stage) == 8)
    await stage.kill()
    await fresh_processes(stage)
    stage.trainer.on_batch = trained.extend
    await stage.complete()
    assert generated(stage)[0] == "p0000004" and "p0000003" not in generated(stage)
    assert (facts(trained), stage.trainer.weights) == (expected, weights)
    assert stage.report()["dropped"] == {"TRAINER_RESTORED": 4}


def ready_count(stage: Stage) -> int:
    ledger = stage.ledger()
    try:
        return ledger.counts().get(SampleState.READY, 0)
    finally:
        ledger.close()


@pytest.mark.parametrize("damage", ["recipe", "record"])
async def test_samples_of_another_recipe_or_with_a_damaged_record_are_sampled_again(
    make_stage: Callable[..., Stage], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    stage = make_stage(steps=2, **EVERY_STEP)
    hangs = hang_in_step(stage, 2)
    await stage.start()
    await until(hangs.is_set)
    await stage.kill()
    if damage == "recipe":
        stage.config = make_config(stage.folder.parent, steps=2, sampling={"temperature": 0.7}, **EVERY_STEP)
        (stage.folder / "config.toml").write_text(configuration.dump(stage.config))
    else:
        (path,) = (stage.folder / "experiences").iterdir()
        path.write_bytes(path.read_bytes()[:-20])
    await fresh_processes(stage)
    await stage.complete()
    lost = 12 if damage == "recipe" else 4
    assert stage.report()["dropped"] == {"TRAINER_RESTORED": lost}
    assert len(generated(stage)) == lost // 4
    assert ("experiences: cut off a torn record: file=" in caplog.text) == (damage == "record")


async def test_samples_of_another_recipe_are_not_trained_on_if_their_recovery_is_interrupted(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_stage(steps=2, **EVERY_STEP)
    hangs = hang_in_step(stage, 2)
    await stage.start()
    await until(hangs.is_set)
    await stage.kill()
    stage.config = make_config(stage.folder.parent, steps=2, sampling={"temperature": 0.7}, **EVERY_STEP)
    (stage.folder / "config.toml").write_text(configuration.dump(stage.config))
    await fresh_processes(stage)

    def fail(*_: Any, **__: Any) -> None:
        raise Internal("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "restore", fail)
        await stage.start()
        assert await stage.finish() == 1
    await fresh_processes(stage)
    await stage.complete()
    assert stage.report()["dropped"] == {"TRAINER_RESTORED": 12} and len(generated(stage)) == 3


async def test_a_recovered_group_that_the_filter_leaves_no_room_for_is_dropped_as_stale(
    make_stage: Callable[..., Stage],
) -> None:
    """Positions 4 and 5 were drawn for step 1 because earlier groups were filtered out; after the resume none is."""
    stage = make_stage(steps=2, algorithm={"filter": {"keep": "varied"}}, checkpoint={"every_steps": 2})
    slow = asyncio.Event()

    async def hang() -> None:
        if stage.rollouts[0].requests[-1].request_id.startswith("p0000001"):
            slow.set()
            await asyncio.sleep(30)

    def outcome(constant: set[int]) -> Callable[[Any], Any]:
        from tests.contract.test_loop_filter import constant_at

        return constant_at(*constant)

    stage.rollouts[0].on_generate = hang
    stage.reward.outcome = outcome({0, 2, 3})
    await stage.start()
    await until(lambda: slow.is_set() and ready_count(stage) == 8)
    await stage.kill()
    await fresh_processes(stage)
    stage.reward.outcome = outcome(set())
    await stage.complete()
    assert stage.report()["dropped"]["STALE"] == 8
