"""Asynchronous training: the real coordinator samples ahead of the trainer, within the policy lag of its recipe."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from fourfold import config as configuration
from fourfold.coordinator.v1 import run_service_pb2 as run_pb
from fourfold.errors import Unavailable
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.rollout.v1 import rollout_control_service_pb2 as control
from fourfold.sample import Sample
from fourfold_coordinator.state.ledger import SampleState
from tests.fakes.stage import Stage, check_books, fresh_processes, hang_in_step, successor, until, watch_for
from tests.fakes.toy import make_config
from tests.fakes.toy_rollout import FakeRollout

EVERY_STEP = {"checkpoint": {"every_steps": 1}}
NEVER = {"evaluation": {"every_steps": 100}}


def lag(limit: int, **keys: Any) -> dict[str, Any]:
    return {"asynchrony": {"max_policy_lag": limit, **keys}}


class Log:
    """What the trainer got: positions and lags of each step."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.positions: list[list[int]] = []
        self.lags: list[list[int]] = []  # of every sample
        self.follow()

    def follow(self) -> None:
        self.stage.trainer.on_batch = self._add

    def _add(self, samples: list[Sample]) -> None:
        self.positions.append(sorted({int(s.sample_id[1:8]) for s in samples}))
        self.lags.append([self.stage.trainer.version - s.oldest_version for s in samples])

    @property
    def largest(self) -> int:
        return max(max(lags) for lags in self.lags)


def slow_and_uneven(stage: Stage, seed: int = 0) -> None:
    """Let each request take a random time, some of them ten times as long as others."""
    chance = random.Random(seed)

    async def wait() -> None:
        await asyncio.sleep(chance.choice([0.001, 0.002, 0.02]))

    for engine in stage.rollouts:
        engine.on_generate = wait


def drawn(stage: Stage) -> list[int]:
    return [int(r.request_id[1:8]) for r in stage.rollouts[0].requests if r.request_id.startswith("p")]


@pytest.mark.parametrize("limit", [1, 4])
async def test_groups_are_trained_in_order_of_admission_and_none_is_too_old(
    make_stage: Callable[..., Stage], limit: int
) -> None:
    stage = make_stage(steps=8, **lag(limit))
    slow_and_uneven(stage)
    log = Log(stage)
    await stage.complete()
    assert log.positions == [[3 * step, 3 * step + 1, 3 * step + 2] for step in range(8)]
    assert 1 <= log.largest <= limit
    rows = stage.lines("metrics.jsonl")
    assert [row["async/token_lag_max"] for row in rows] == [float(max(lags)) for lags in log.lags]
    assert max(row["train/policy_lag_max"] for row in rows) == log.largest
    assert all(row["async/lag_limit"] == limit and row["async/stale_token_fraction"] == 0 for row in rows)
    assert all(0 <= row[f"async/{side}_wait_fraction"] <= 1 for row in rows for side in ("trainer", "rollout"))
    assert rows[-1]["async/length_bias"] == pytest.approx(0), "every group that was sampled is trained"
    assert rows[-1]["async/groups_running"] == rows[-1]["async/groups_ready"] == 0
    assert sorted(drawn(stage)) == list(range(24)), "no prompt is drawn for steps that the run does not have"
    assert stage.report()["dropped"] == {}


async def test_the_places_ahead_of_the_trainer_are_limited(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=9, **lag(2), **NEVER)
    hangs = hang_in_step(stage, 2)
    await stage.start()
    await until(hangs.is_set)
    await asyncio.sleep(0.3)
    assert len(drawn(stage)) == 3 + (2 + 1) * 3, "step 1, and what may be between admission and publication"
    await stage.kill()


async def test_places_ahead_wait_for_room_in_an_engine(make_stage: Callable[..., Stage]) -> None:
    """The engine takes 8 samples, which are two groups; the batch has three."""
    stage = make_stage(steps=3, **lag(4), **NEVER)
    release = asyncio.Event()

    async def hold() -> None:
        if not stage.rollouts[0].requests[-1].request_id.startswith("eval"):
            await release.wait()

    stage.rollouts[0].on_generate = hold
    await stage.start()
    await until(lambda: len(drawn(stage)) == 2)
    await asyncio.sleep(0.5)
    ledger = stage.ledger()
    assert sum(ledger.counts().values()) == 3 * 4, "the next batch is issued, no group beyond it"
    ledger.close()
    release.set()
    await stage.check_end()


async def test_filtered_groups_give_their_places_back(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=6, algorithm={"filter": {"keep": "varied", "max_rounds": 4}}, **lag(2), **NEVER)
    slow_and_uneven(stage)

    def outcome(item: reward.ScoreItem) -> reward.SampleScore | None:
        name = item.experience.sample_id
        if name.startswith("p") and int(name[1:8]) % 3 == 0:
            return reward.SampleScore(score=1.0)
        return reward.SampleScore(score=float(int(name[-1]) % 2))

    stage.reward.outcome = outcome
    log = Log(stage)
    await stage.complete()
    assert all(len(positions) == 3 and not any(p % 3 == 0 for p in positions) for positions in log.positions)
    assert log.largest <= 2
    report = stage.report()
    assert set(report["dropped"]) == {"FILTERED"}
    assert sum(row["samples/dropped"] for row in stage.lines("metrics.jsonl")) <= report["dropped"]["FILTERED"]


async def test_everything_is_killed_and_ready_groups_are_trained_with_the_age_they_had(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(steps=7, **lag(2), **EVERY_STEP, **NEVER)
    log, hangs = Log(stage), hang_in_step(stage, 4)
    await stage.start()
    await until(hangs.is_set)
    await until(lambda: ready_count(stage) == 36)
    await stage.kill()
    await fresh_processes(stage)
    log.follow()
    await stage.complete()
    assert log.positions == [[3 * step, 3 * step + 1, 3 * step + 2] for step in range(7)]
    assert set(drawn(stage)) == {18, 19, 20}, "what was READY or leased is not sampled again"
    assert log.largest <= 2 and stage.report()["dropped"] == {}


def ready_count(stage: Stage) -> int:
    """Return the number of durable samples that are not trained."""
    ledger = stage.ledger()
    try:
        counts = ledger.counts()
        return counts.get(SampleState.READY, 0) + counts.get(SampleState.LEASED, 0)
    finally:
        ledger.close()


async def test_groups_of_weights_that_died_with_the_trainer_are_sampled_again(
    make_stage: Callable[..., Stage],
) -> None:
    """The checkpoint is that of step 2; the trainer dies in step 4."""
    stage = make_stage(steps=7, **lag(2), **NEVER)
    log, dies = Log(stage), hang_in_step(stage, 4)
    await stage.start()
    await until(dies.is_set)
    old = stage.trainer
    await old.kill()
    stage.trainer = successor(old)
    log.follow()
    await stage.trainer.join(stage.address)
    await stage.check_end()
    assert stage.trainer.loaded == [2]
    assert log.positions[-5:] == [[3 * step, 3 * step + 1, 3 * step + 2] for step in range(2, 7)]
    assert log.largest <= 2
    assert set(stage.report()["dropped"]) == {"TRAINER_RESTORED"}


@pytest.mark.parametrize("stale", ["drop", "train"])
async def test_a_resume_with_a_smaller_lag_drops_what_is_too_old_unless_told_to_train_on_it(
    make_stage: Callable[..., Stage], stale: str
) -> None:
    stage = make_stage(steps=7, **lag(4), **EVERY_STEP, **NEVER)
    hangs = hang_in_step(stage, 2)
    await stage.start()
    await until(hangs.is_set)
    await until(lambda: ready_count(stage) == 15 * 4)
    await stage.kill()
    stage.config = make_config(stage.folder.parent, steps=7, **lag(1, stale=stale), **EVERY_STEP, **NEVER)
    (stage.folder / "config.toml").write_text(configuration.dump(stage.config))
    await fresh_processes(stage)
    log = Log(stage)
    await stage.complete()
    assert (stage.report()["dropped"].get("STALE", 0) > 0) == (stale == "drop")
    assert (log.largest > 1) == (stale == "train")
    assert any(row["async/stale_token_fraction"] > 0 for row in stage.lines("metrics.jsonl")) == (stale == "drop")


async def test_a_run_with_a_lag_shows_its_queue_while_the_trainer_trains(make_stage: Callable[..., Stage]) -> None:
    stage, go_on = make_stage(steps=4, **lag(2)), asyncio.Event()

    async def hold(trained: int) -> None:
        if trained == 2:
            await go_on.wait()

    stage.trainer.on_train = hold
    await stage.start()
    training = run_pb.RUN_PHASE_TRAINING
    status = await watch_for(stage, lambda s: s.step == 1 and s.phase == training and s.queue.ready_groups == 6)
    assert status.queue == run_pb.SampleQueue(max_policy_lag=2, lag_limit=2, ready_groups=6), "two steps ahead"
    assert status.phase_progress == 0, "of the trainer's step, which tells none"
    go_on.set()
    assert await stage.finish() == 0
    found = stage.report()["asynchrony"]
    assert found["max_policy_lag"] == found["lag_limit"] == 2 and found["lag_changes"] == []
    assert 0 < found["token_lag_mean"] <= found["token_lag_max"] <= 2
    assert 0 < found["trainer_wait_fraction"] < 1 and 0 < found["rollout_wait_fraction"] <= 1


def hold_evaluation(engine: FakeRollout, step: int) -> tuple[asyncio.Event, asyncio.Event]:
    """Make the evaluation after a step wait at an engine; return the events of its begin and of its release."""
    begun, release = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        if engine.requests[-1].request_id.startswith(f"eval{step}-"):
            begun.set()
            await release.wait()

    engine.on_generate = wait
    return begun, release


async def test_an_evaluation_beside_the_steps_delays_the_update_of_the_only_engine(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(steps=6, **lag(2))
    begun, release = hold_evaluation(stage.rollouts[0], 2)
    await stage.start()
    await until(begun.is_set)
    await until(lambda: 3 in stage.trainer.batches)
    training = run_pb.RUN_PHASE_TRAINING
    status = await watch_for(stage, lambda s: s.phase == training and s.HasField("evaluation_progress"))
    assert (status.phase_progress, status.evaluation_progress) == (0, 0), "the phase is the trainer's"
    await asyncio.sleep(0.2)
    assert stage.rollouts[0].version == 2 and 4 not in stage.trainer.batches, "step 3 is trained and not published"
    assert len(stage.lines("metrics.jsonl")) == 1, "the line of step 2 waits for its score"
    release.set()
    await stage.check_end()
    rows = stage.lines("metrics.jsonl")
    assert [row["step"] for row in rows if "eval/score" in row] == [2, 4, 6]
    assert rows[2]["time/evaluate"] > 0.1
    assert [row["step"] for row in stage.report()["evals"]] == [0, 2, 4, 6]


async def test_an_evaluation_waits_for_no_engine_that_waits_for_the_update(
    make_stage: Callable[..., Stage], caplog: pytest.LogCaptureFixture
) -> None:
    """The only engine leaves in the update before an evaluation; another one joins while the next step publishes."""
    stage = make_stage(steps=6, **lag(2))
    engine = stage.rollouts[0]

    killed = list[asyncio.Task[None]]()

    async def leave() -> None:
        if engine.begun[-1] == 2:
            await engine.leave()
            killed.append(asyncio.create_task(engine.kill()))
            raise Unavailable("the engine's process was killed")

    engine.on_begin = leave
    await stage.start()
    await until(lambda: 3 in stage.trainer.batches)
    await asyncio.sleep(0.1)
    stage.rollouts = [FakeRollout("rollout-0", stage.config)]
    await stage.rollouts[0].join(stage.address)
    await stage.check_end(10)
    assert [row["step"] for row in stage.report()["evals"]] == [0, 2, 4, 6]
    rows = {row["step"]: row for row in stage.lines("metrics.jsonl")}
    # What really answered: the new engine had joined by the update of step 3 or 4.
    assert rows[2]["eval/policy_version_min"] == rows[2]["eval/policy_version_max"] in (3, 4)
    assert (rows[4]["eval/policy_version_min"], rows[4]["eval/policy_version_max"]) == (4, 4)
    assert "evaluation used newer weights, as no engine kept those of its step: step=2 policy_version=2" in caplog.text
    await killed[0]


@pytest.mark.parametrize("dies", [False, True])
async def test_one_of_two_engines_is_held_for_an_evaluation_and_the_other_goes_on(
    make_stage: Callable[..., Stage], dies: bool
) -> None:
    stage = make_stage(steps=6, rollout={"replicas": 2}, **lag(2))
    events = [hold_evaluation(engine, 2) for engine in stage.rollouts]
    await stage.start()
    await until(lambda: any(begun.is_set() for begun, _ in events))
    held = next(engine for engine, (begun, _) in zip(stage.rollouts, events, strict=True) if begun.is_set())
    other = next(engine for engine in stage.rollouts if engine is not held)
    await until(lambda: 5 in stage.trainer.batches, 20)
    assert (held.version, other.version) == (2, 4), (
        "the evaluation after step 4 waits, and the update of step 5 with it"
    )
    assert not any(r.request_id.startswith("eval2-") for r in other.requests), "every answer is of one version"
    if dies:
        await held.kill()
    for _, release in events:
        release.set()
    await stage.check_end()
    assert [row["step"] for row in stage.report()["evals"]] == [0, 2, 4, 6]
    row = stage.lines("metrics.jsonl")[1]
    used = 4 if dies else 2
    assert (row["eval/policy_version_min"], row["eval/policy_version_max"]) == (used, used), "what really answered"
    if not dies:
        assert held.version == stage.trainer.version, "it was updated after the evaluation"


async def test_a_trainer_that_dies_during_an_evaluation_updates_the_engine_that_was_held(
    make_stage: Callable[..., Stage], caplog: pytest.LogCaptureFixture
) -> None:
    stage = make_stage(steps=6, rollout={"replicas": 2}, **lag(2))
    events = [hold_evaluation(engine, 2) for engine in stage.rollouts]
    dies = hang_in_step(stage, 4)
    caplog.set_level("INFO")
    await stage.start()
    await until(lambda: dies.is_set() and any(begun.is_set() for begun, _ in events))
    old = stage.trainer
    await old.kill()
    stage.trainer = successor(old)
    caplog.clear()
    await stage.trainer.join(stage.address)
    await until(lambda: "weights published" in caplog.text)
    assert "weights published version=4 engines=2" in caplog.text, "all engines in the first update"
    for _, release in events:
        release.set()
    await stage.check_end()


def write_recipe(stage: Stage, **changes: Any) -> None:
    config = make_config(stage.folder.parent, **changes)
    fresh = stage.folder / "config.new"
    fresh.write_text(configuration.dump(config))
    fresh.replace(stage.folder / "config.toml")


async def test_the_lag_can_be_changed_while_the_run_goes_on(
    make_stage: Callable[..., Stage], caplog: pytest.LogCaptureFixture
) -> None:
    stage = make_stage(steps=14, **lag(0), **NEVER)
    log = Log(stage)

    async def change(step: int) -> None:
        if step == 2:
            write_recipe(stage, steps=14, **lag(3), **NEVER)
        if step == 5:
            (stage.folder / "config.toml").write_text("steps = ")
        if step == 6:
            write_recipe(stage, steps=99, **lag(3), **NEVER)
        if step == 8:
            write_recipe(stage, steps=14, **lag(0), **NEVER)
        await asyncio.sleep(0.1)

    stage.trainer.on_train = change
    await stage.start()
    with caplog.at_level("INFO"):
        assert await stage.finish() == 0
    check_books(stage)
    largest = [max(lags) for lags in log.lags]
    assert largest[:3] == [0, 0, 0] and max(largest[3:8]) == 3 and largest[-1] == 0, "what was admitted is trained"
    assert log.positions == [[3 * step, 3 * step + 1, 3 * step + 2] for step in range(14)]
    rows = stage.lines("metrics.jsonl")
    changes = {row["step"]: row["lag_change"] for row in rows if row["lag_change"]}
    assert changes == {
        2: "the recipe changed: asynchrony.max_policy_lag 0 -> 3",
        8: "the recipe changed: asynchrony.max_policy_lag 3 -> 0",
    }
    key = "asynchrony.max_policy_lag"
    recorded = [(line["step"], line["changes"]) for line in stage.lines("recipe-changes.jsonl")]
    assert recorded == [(2, {key: [0, 3]}), (8, {key: [3, 0]})]
    assert "recipe changed and is ignored" in caplog.text and "config.toml: not valid TOML" in caplog.text
    assert "only [asynchrony] can change during a run" in caplog.text
    report = stage.report()
    assert report["dropped"] == {} and len(report["asynchrony"]["lag_changes"]) == 2
    assert (report["asynchrony"]["max_policy_lag"], report["asynchrony"]["token_lag_max"]) == (0, 3), "at the end, ever"
    modes = stage.rollouts[0].pause_modes
    assert modes[0] == modes[-1] == control.PAUSE_MODE_WAIT and modes[3] == control.PAUSE_MODE_KEEP


async def test_a_change_of_another_key_keeps_the_lowered_lag(make_stage: Callable[..., Stage]) -> None:
    keys: dict[str, Any] = {"target_mismatch": 0.004}
    stage = make_stage(steps=14, **lag(4, **keys), **NEVER)
    stage.trainer.mismatch = lambda lag: 0.002 + 0.002 * lag

    async def change(step: int) -> None:
        if step == 8:  # after which the limit is lowered
            write_recipe(stage, steps=14, **lag(4, stale="train", **keys), **NEVER)
        await asyncio.sleep(0.1)

    stage.trainer.on_train = change
    await stage.complete()
    rows = stage.lines("metrics.jsonl")
    both = r"policy lag limit 4 -> \d: .*; the recipe changed: asynchrony\.stale drop -> train"
    assert re.fullmatch(both, rows[7]["lag_change"])
    assert rows[-1]["async/lag_limit"] <= rows[8]["async/lag_limit"] < 4


async def test_ready_groups_survive_two_restores_to_one_checkpoint(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=6, **lag(2), **NEVER)
    log = Log(stage)
    await stage.start()
    for _ in range(2):
        dies = hang_in_step(stage, 3)
        await until(dies.is_set)
        await until(lambda: ready_count(stage) == 9 * 4)
        old = stage.trainer
        await old.kill()
        stage.trainer = successor(old)
        log.follow()
        await stage.trainer.join(stage.address)
    await stage.check_end()
    assert stage.trainer.loaded == [2] and stage.report()["dropped"] == {}
    assert log.positions == [[3 * step, 3 * step + 1, 3 * step + 2] for step in range(6)]
    assert log.largest <= 2
