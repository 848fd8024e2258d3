"""Back to a checkpoint: runs, coordinators and trainers that were killed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fourfold_coordinator.launch.run_folder import is_finished
from fourfold_coordinator.serve import main
from tests.fakes.stage import Stage, fresh_processes, hang_in_step, successor, until, watch_for
from tests.fakes.toy import write_data
from tests.fakes.toy_rollout import FakeRollout
from tests.fakes.toy_trainer import FakeTrainer


@pytest.mark.parametrize("moment", ["generate", "train", "checkpoint"])
async def test_a_killed_run_goes_on_from_its_checkpoint(make_stage: Callable[..., Stage], moment: str) -> None:
    stage = make_stage(steps=6)
    reached = asyncio.Event()

    async def stop(step: int = 0) -> None:
        if len(stage.trainer.batches) == 3 or step == 4:
            reached.set()
            await asyncio.sleep(30)

    if moment == "generate":
        stage.rollouts[0].on_generate = stop
    elif moment == "train":
        stage.trainer.on_train = stop
    else:
        stage.trainer.on_saved = stop  # the trainer has its checkpoint of step 4, the ledger has not
    await stage.start()
    await until(reached.is_set)
    await stage.kill()
    before = stage.ledger()
    done = [row.step for row in before.steps()]
    written = {row["step"] for row in stage.lines("samples.jsonl")}
    assert written == {row["step"] for row in stage.lines("tokens.jsonl")}
    assert max(row["step"] for row in stage.lines("timeline.jsonl")) <= max(written)
    # The samples of a step are written while it trains.
    assert written == {*done, 4} if moment == "train" else written == set(done)
    published, evals = before.highest_version(), before.evals()
    before.close()
    await fresh_processes(stage)
    await stage.complete()
    went_on = 4 if moment == "checkpoint" else 2
    assert stage.trainer.loaded == [went_on]
    after = stage.ledger()
    steps = after.steps()
    assert min(stage.rollouts[0].commits) > published, "versions go on above every published one"
    assert steps[went_on].policy_version > published
    assert [row.score for row in after.evals()[: len(evals)]] == [row.score for row in evals]
    assert [row.step for row in after.evals()] == [0, 2, 4, 6]
    if moment != "checkpoint":
        assert after.dropped()["TRAINER_RESTORED"] >= 12
    assert (stage.report()["restarts"], stage.report()["resumes"]) == ({}, 1)
    positions = [row.data_position for row in steps]
    assert positions == [3, 6, 9, 12, 15, 18], "the prompts of lost steps are issued again"
    after.close()


async def test_a_trainer_that_comes_back_is_brought_to_the_checkpoint(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=6, retry={"infrastructure": 0})
    died = hang_in_step(stage, 4)
    await stage.start()
    await until(died.is_set)
    old = stage.trainer
    await old.kill()
    await asyncio.sleep(1.0)  # engines take long to load
    stage.trainer = successor(old)
    await stage.trainer.join(stage.address)
    await stage.check_end()
    assert stage.trainer.loaded == [2]
    assert stage.report()["dropped"]["TRAINER_RESTORED"] >= 12
    assert (stage.report()["restarts"], stage.report()["resumes"]) == ({"trainer-0": 1}, 0)


async def test_a_trainer_that_dies_while_it_sends_is_waited_for_and_its_version_is_not_tried_again(
    make_stage: Callable[..., Stage], caplog: pytest.LogCaptureFixture
) -> None:
    stage = make_stage(steps=6)
    died = asyncio.Event()

    async def die() -> None:
        if len(stage.trainer.batches) == 4 and not died.is_set():
            died.set()
            await asyncio.sleep(30)

    stage.trainer.on_send = die
    await stage.start()
    await until(died.is_set)
    old, lost = stage.trainer, stage.trainer.version
    await until(lambda: lost in stage.rollouts[0].begun)  # BeginWeights and SendWeights run concurrently
    begun = stage.rollouts[0].begun.count(lost)
    caplog.clear()
    await old.kill()
    await asyncio.sleep(1.0)
    stage.trainer = successor(old)
    await stage.trainer.join(stage.address)
    await stage.check_end()
    assert stage.rollouts[0].weights == stage.trainer.weights
    assert stage.rollouts[0].begun.count(lost) == begun, "a version that died with its trainer is not tried again"
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    texts = [text.partition(": ")[0] for text in warnings if not text.startswith("step ")]
    assert [" ".join(text.split()[:5]) for text in texts] == [
        "GetStatus",  # the trainer did not answer; repeating the call
        f"trainer-0 at {stage.trainer.target} is a",  # new process
        "restored",
    ]


class SlowlyRestored(FakeTrainer):
    """Restores its checkpoint when an engine was asked for something, or after many turns of the broker."""

    def __init__(self, *arguments: Any, **words: Any) -> None:
        super().__init__(*arguments, **words)
        self.asked = asyncio.Event()

    async def LoadCheckpoint(self, request: Any, context: Any) -> Any:
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self.asked.wait()
        return await super().LoadCheckpoint(request, context)


async def test_an_engine_that_comes_during_a_recovery_waits_for_the_restored_weights(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(steps=6)
    died = hang_in_step(stage, 4)
    await stage.start()
    await until(died.is_set)
    old, lost = stage.trainer, stage.trainer.version
    await old.kill()
    late = FakeRollout("rollout-1", stage.config)
    trainer = successor(old, SlowlyRestored)
    assert isinstance(trainer, SlowlyRestored)
    stage.trainer = trainer

    async def note_call() -> None:
        trainer.asked.set()

    late.on_describe = note_call
    stage.rollouts.append(late)
    await late.join(stage.address)
    await trainer.join(stage.address)
    await stage.check_end()
    assert min(late.begun) > lost, "the version of the dead trainer is not published from the one that is restored"


async def test_a_trainer_that_dies_before_the_last_service_is_there_is_waited_for(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(steps=2, retry={"infrastructure": 0})
    await stage.start(join=False)
    for member in (stage.trainer, stage.reward):
        await member.join(stage.address)
    await watch_for(stage, lambda status: status.waiting_for.startswith("rollout 0 of 1"))
    await stage.trainer.kill()  # its lease goes on
    await stage.rollouts[0].join(stage.address)
    await asyncio.sleep(1.5)  # longer than gRPC tries by itself
    stage.trainer = successor(stage.trainer)
    await stage.trainer.join(stage.address)
    await stage.check_end()


async def test_a_finished_run_that_is_started_again_only_writes_its_report(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=2)
    await stage.complete()
    trained = dict(stage.trainer.batches)
    (stage.folder / "report.json").unlink()
    await fresh_processes(stage)
    await stage.complete()
    assert stage.trainer.batches == trained


async def test_a_finished_run_waits_for_no_service_unless_its_steps_were_raised(
    make_stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_stage(steps=2)
    await stage.complete()
    for member in stage.members:
        await member.kill()
    async with asyncio.timeout(5):
        assert await asyncio.to_thread(main, stage.options()) == 0
    said = capsys.readouterr().out
    assert f"{stage.folder} is finished already: its report is {stage.folder / 'report.json'}." in said

    stage.config = stage.config.model_copy(update={"steps": 4})
    await fresh_processes(stage)
    assert not is_finished(stage.folder, stage.config)
    await stage.complete()
    assert stage.trainer.loaded == [2] and stage.report()["steps"] == 4


async def test_a_run_does_not_go_on_with_other_data(
    make_stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_stage(steps=2)
    await stage.complete()
    (train,) = stage.config.data.train
    write_data(Path(train.path), digits=9)
    await fresh_processes(stage)
    await stage.start()
    assert await stage.finish() == 1
    # The other services of this stage log JSON to the same stderr.
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("{")]
    assert "the data differs from the data that the run began with" in said[-1]
