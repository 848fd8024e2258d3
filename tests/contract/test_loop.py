"""The real coordinator, loop and ledger, against services with toy engines: what it survives and what it leaves."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fourfold import config as configuration
from fourfold.channel import open_channel
from fourfold.config import Config
from fourfold.coordinator.client import RunClient
from fourfold.coordinator.v1 import run_service_pb2 as run_pb
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.serve import ServeOptions
from fourfold_coordinator import report
from fourfold_coordinator.ledger import Ledger, State
from fourfold_coordinator.serve import ADDRESS_FILE, Coordinator
from tests.fakes.run import FakeReference, FakeReward, FakeRollout, FakeTrainer, Member, make_config, write_data


class Stage:
    """One run folder, its services, and the coordinators that live in it."""

    def __init__(self, root: Path, **changes: Any) -> None:
        self.config: Config = make_config(root, **changes)
        self.folder = root / "run"
        self.folder.mkdir(exist_ok=True)
        (self.folder / "config.toml").write_text(configuration.dump(self.config))
        self.rollouts = [FakeRollout("rollout-0", self.config)]
        self.trainer = FakeTrainer("trainer-0", self.config)
        self.reward = FakeReward("reward-0", self.config)
        self.others: list[Member] = []
        self.address = ""
        self.run: asyncio.Task[int] | None = None

    @property
    def members(self) -> list[Member]:
        return [*self.rollouts, self.trainer, self.reward, *self.others]

    async def start(self, *, start_seconds: float = 5.0, join: bool = True) -> None:
        """Start a coordinator in this folder, and let the services register."""
        (self.folder / ADDRESS_FILE).unlink(missing_ok=True)
        options = ServeOptions(
            role="coordinator",
            recipe=self.folder / "config.toml",
            config=self.config,
            member_id="coordinator",
            run_dir=self.folder,
        )
        coordinator = Coordinator(options, self.folder, start_seconds=start_seconds)
        self.run = asyncio.create_task(coordinator.run())
        await until(lambda: (self.folder / ADDRESS_FILE).exists() or self.ended)
        self.address = (self.folder / ADDRESS_FILE).read_text().strip()
        if join:
            for member in self.members:
                await member.join(self.address)

    @property
    def ended(self) -> bool:
        return self.run is not None and self.run.done()

    async def finish(self, seconds: float = 20.0) -> int:
        """Wait for the coordinator's end; return its exit code."""
        assert self.run is not None
        async with asyncio.timeout(seconds):
            return await self.run

    async def kill(self) -> None:
        """End the coordinator without any of its own last words."""
        assert self.run is not None
        self.run.cancel()
        with suppress(asyncio.CancelledError):
            await self.run

    def ledger(self) -> Ledger:
        return Ledger(self.folder / "ledger.sqlite")

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.folder / "report.json").read_text())
        return report

    async def close(self) -> None:
        if self.run is not None and not self.run.done():
            await self.kill()
        for member in self.members:
            await member.kill()


async def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def plain_curve(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes half a second; one test does it."""
    if "leaves_everything_behind" not in request.node.name:
        monkeypatch.setattr(report, "draw_curve", lambda path, *args, **kwargs: path.write_bytes(b""))


@pytest.fixture
async def make_stage(tmp_path: Path) -> AsyncIterator[Callable[..., Stage]]:
    stages: list[Stage] = []

    def make(**changes: Any) -> Stage:
        root = tmp_path / f"stage{len(stages)}"
        root.mkdir()
        stages.append(Stage(root, **changes))
        return stages[-1]

    yield make
    for stage in stages:
        await stage.close()


def check_books(stage: Stage) -> None:
    """What must agree at the end of any run: ledger, trainer and files."""
    ledger = stage.ledger()
    steps = ledger.steps()
    counts = ledger.counts()
    assert set(counts) <= {State.TRAINED, State.DROPPED}
    assert [row.step for row in steps] == list(range(1, stage.config.steps + 1))
    assert [row["step"] for row in stage.lines("metrics.jsonl")] == [row.step for row in steps]
    assert [row["reward/mean"] for row in stage.lines("metrics.jsonl")] == [r.metrics["reward/mean"] for r in steps]
    trained = [sample_id for step in sorted(stage.trainer.batches) for sample_id in stage.trainer.batches[step]]
    assert len(trained) == len(set(trained)) == counts[State.TRAINED], "each sample enters exactly one step"
    assert all(ledger.state(sample_id) is State.TRAINED for sample_id in trained)
    written = {row["sample_id"]: row["step"] for row in stage.lines("samples.jsonl")}
    for step, sample_ids in stage.trainer.batches.items():
        assert all(written[sample_id] == step for sample_id in sample_ids)
    lines = stage.lines("samples.jsonl")
    assert len(lines) == len(written), "no sample is written twice"
    assert all(line["dropped"] or ledger.state(line["sample_id"]) is State.TRAINED for line in lines)
    checkpoint = ledger.last_checkpoint()
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.data_position) == (stage.config.steps, steps[-1].data_position)
    assert checkpoint.eval_count == len(ledger.evals())
    versions = [row.policy_version for row in steps]
    assert versions == sorted(versions), "versions never go back"
    ledger.close()


async def test_a_run_goes_to_its_end_and_leaves_everything_behind(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage()
    await stage.start()
    async with asyncio.timeout(10):
        states = [s async for s in RunClient(open_channel(stage.address, None), peer="coordinator").watch_run()]
    assert await stage.finish() == 0
    assert states[-1].phase == run_pb.RUN_PHASE_DONE
    assert [row.step for row in states[-1].steps] == [1, 2, 3, 4]
    assert [row.step for row in states[-1].evals] == [0, 2, 4]
    assert {m.member_id for m in states[-1].members} == {"rollout-0", "trainer-0", "reward-0"}
    check_books(stage)
    report = stage.report()
    assert report["steps"] == 4
    assert report["eval_before"]["n"] == report["eval_after"]["n"] == 4 * 2 * 2
    assert report["eval_after"]["score"] > report["eval_before"]["score"]
    assert report["model"] == "/somewhere/model"
    assert report["peak_memory_bytes"] > 10_000_000
    assert len(report["answers_before"]) == len(report["answers_after"]) == 8
    assert (stage.folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert stage.rollouts[0].version == stage.trainer.version == report["policy_version"]
    assert stage.rollouts[0].backend == "shm"
    line = stage.lines("samples.jsonl")[0]
    assert len(line["logprobs"]) == len(line["token_ids"]) - line["prompt_tokens"]
    assert line["version_spans"] == [[-1, line["prompt_tokens"]], [0, len(line["logprobs"])]]
    metrics = stage.lines("metrics.jsonl")[0]
    assert metrics["weights/probe_diff_mean"] == pytest.approx(0.01, abs=1e-4)
    assert metrics["train/policy_lag_max"] == 0


async def test_the_reference_is_asked_when_the_algorithm_needs_it(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=1, algorithm={"kl_coef": 0.1})
    stage.others.append(FakeReference("reference-0", stage.config))
    seen: list[bool] = []
    stage.trainer.on_batch = lambda samples: seen.extend(len(s.reference_logprobs) > 0 for s in samples)
    await stage.start()
    assert await stage.finish() == 0
    assert seen and all(seen)
    check_books(stage)


async def test_a_dying_rollout_service_loses_nothing(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(rollout={"replicas": 2})
    dying = stage.rollouts[0]
    stage.rollouts.append(FakeRollout("rollout-1", stage.config))

    async def die() -> None:
        if len(stage.trainer.batches) == 1:
            asyncio.get_running_loop().create_task(dying.kill())
            await asyncio.sleep(30)

    dying.on_generate = die
    await stage.start()
    assert await stage.finish() == 0
    check_books(stage)
    assert dying.requests, "it had work when it died"
    assert [len(ids) for ids in stage.trainer.batches.values()] == [12, 12, 12, 12], "every step kept its size"
    assert stage.report()["dropped"] == {}


async def test_a_run_waits_for_a_rollout_service_and_fills_it_before_it_serves(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(evaluation={"every_steps": 4})
    only = stage.rollouts[0]
    late = FakeRollout("rollout-1", stage.config)
    served: list[int] = []

    async def die() -> None:
        if len(stage.trainer.batches) == 2:
            asyncio.get_running_loop().create_task(only.kill())
            await asyncio.sleep(30)

    async def note() -> None:
        served.append(late.version)

    only.on_generate, late.on_generate = die, note
    await stage.start()
    await until(lambda: len(stage.trainer.batches) == 2)
    status = await watch_for(stage, lambda s: "rollout" in s.waiting_for)
    assert "rollout-0" in status.waiting_for
    stage.rollouts.append(late)
    await late.join(stage.address)
    assert await stage.finish() == 0
    check_books(stage)
    assert late.commits[0] == 2 and min(served) == 2, "it came with version 0 and was filled before it served"


async def test_a_run_without_a_rollout_service_fails_and_names_the_role(
    make_stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_stage(retry={"service_wait_seconds": 0.3})
    stage.rollouts.clear()
    await stage.start(start_seconds=0.3)
    assert await stage.finish() == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "no usable rollout service" in last and "none has registered" in last


async def test_a_trainer_that_is_at_another_step_is_refused(
    make_stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_stage()
    stage.trainer.step = 5
    await stage.start()
    assert await stage.finish() == 1
    assert "the trainer is at step 5" in capsys.readouterr().err.strip().splitlines()[-1]


async def test_a_score_that_is_missing_is_no_zero(make_stage: Callable[..., Stage]) -> None:
    """One answer of each group abstains, one fails for good, and one fails once."""
    stage = make_stage(steps=2)
    failed: set[str] = set()

    def outcome(item: reward.ScoreItem) -> reward.SampleScore | None:
        name = item.experience.sample_id
        if name.startswith("eval"):
            return None
        if name.endswith("-0"):
            return reward.SampleScore(abstain_reason="NO_IDEA")
        if name.endswith("-1"):
            return reward.SampleScore(error=reward.SampleError(code=13, reason="RAISED", message="ValueError"))
        if name.endswith("-2") and name not in failed:
            failed.add(name)
            return reward.SampleScore(error=reward.SampleError(code=4, reason="TIMEOUT", message="10 s"))
        return None

    stage.reward.outcome = outcome
    await stage.start()
    assert await stage.finish() == 0
    check_books(stage)
    assert [len(ids) for ids in stage.trainer.batches.values()] == [6, 6]
    assert not any(name.endswith(("-0", "-1")) for ids in stage.trainer.batches.values() for name in ids)
    assert stage.report()["dropped"] == {"NO_IDEA": 6, "RAISED": 6}
    lines = stage.lines("samples.jsonl")
    assert len(lines) == 24
    assert {line["dropped"] for line in lines if line["score"] is None} == {"NO_IDEA", "RAISED"}
    metrics = stage.lines("metrics.jsonl")[0]
    assert (metrics["score/abstain_count"], metrics["samples/dropped"]) == (3, 6)
    assert "3 NO_IDEA" in metrics["diagnosis"]


async def test_a_lost_group_is_replaced_by_the_next_prompt(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=1)

    def outcome(item: reward.ScoreItem) -> reward.SampleScore | None:
        if item.experience.sample_id.startswith("p0000001-"):
            return reward.SampleScore(abstain_reason="NO_IDEA")
        return None

    stage.reward.outcome = outcome
    await stage.start()
    assert await stage.finish() == 0
    check_books(stage)
    groups = {name.rsplit("-", 1)[0] for name in stage.trainer.batches[1]}
    assert groups == {"p0000000-0", "p0000002-0", "p0000003-0"}
    ledger = stage.ledger()
    assert ledger.steps()[0].data_position == 4
    ledger.close()


async def test_a_reward_that_always_fails_ends_the_run_with_its_reason(
    make_stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_stage()
    error = reward.SampleError(code=13, reason="RAISED", message="KeyError: 'answer'")
    stage.reward.outcome = lambda item: reward.SampleScore(error=error)
    await stage.start()
    assert await stage.finish() == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "step 1: no group is left to train on" in last and "24 RAISED" in last


async def test_a_lost_answer_of_a_step_is_asked_for_again(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=2)
    stage.trainer.lost_answers = 2
    await stage.start()
    assert await stage.finish() == 0
    check_books(stage)
    assert stage.trainer.step == 2 and len(stage.trainer.trained) == 24, "trained once"


async def test_a_step_with_nothing_to_learn_is_skipped_and_the_run_goes_on(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=2)
    stage.reward.outcome = lambda item: reward.SampleScore(score=0.0)
    await stage.start()
    assert await stage.finish() == 0
    check_books(stage)
    assert stage.trainer.version == stage.rollouts[0].version == 0
    assert stage.report()["skipped_steps"] == 2
    metrics = stage.lines("metrics.jsonl")[1]
    assert metrics["train/skipped_steps"] == 2 and metrics["groups/useful"] == 0
    assert "every sample scored 0" in metrics["diagnosis"] and "NO_ADVANTAGE" in metrics["diagnosis"]


# -- weights ----------------------------------------------------------------------------------------------------------


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
    stage = make_stage(retry={"service_wait_seconds": 2.0})
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
    stage = make_stage(retry={"service_wait_seconds": 2.0})
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


# -- back to a checkpoint ---------------------------------------------------------------------------------------------


async def fresh_processes(stage: Stage) -> None:
    """All services anew, as after kill -9 of everything; the trainer's checkpoints stay."""
    for member in stage.members:
        await member.kill()
    batches = {s: ids for s, ids in stage.trainer.batches.items() if s <= max(stage.trainer.checkpoints, default=0)}
    stage.rollouts = [FakeRollout("rollout-0", stage.config)]
    stage.trainer = FakeTrainer("trainer-0", stage.config, checkpoints=stage.trainer.checkpoints)
    stage.trainer.batches = batches
    stage.reward = FakeReward("reward-0", stage.config)


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
    async with asyncio.timeout(10):
        await reached.wait()
    await stage.kill()
    before = stage.ledger()
    published, evals = before.highest_version(), before.evals()
    before.close()
    await fresh_processes(stage)
    await stage.start()
    assert await stage.finish() == 0
    check_books(stage)
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
    positions = [row.data_position for row in steps]
    assert positions == [3, 6, 9, 12, 15, 18], "the prompts of lost steps are issued again"
    after.close()


async def test_a_new_coordinator_takes_over_services_that_live(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=5)
    await stage.start()
    await until(lambda: len(stage.trainer.batches) == 3)
    await stage.kill()
    served = stage.rollouts[0].version
    await stage.start()
    assert await stage.finish() == 0
    check_books(stage)
    assert stage.trainer.loaded == [2]
    assert served not in stage.rollouts[0].commits[stage.rollouts[0].commits.index(served) + 1 :]


async def test_a_coordinator_after_kill_9_goes_on(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=4)

    async def spawn() -> asyncio.subprocess.Process:
        (stage.folder / ADDRESS_FILE).unlink(missing_ok=True)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fourfold", "serve", "coordinator", str(stage.folder / "config.toml")),
            *("--run-dir", str(stage.folder)),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        await until((stage.folder / ADDRESS_FILE).exists, 20)
        address = (stage.folder / ADDRESS_FILE).read_text().strip()
        for member in stage.members:
            await member.join(address)
        return process

    async def hang(step: int) -> None:
        if step == 4:
            await asyncio.sleep(30)

    stage.trainer.on_train = hang
    process = await spawn()
    await until(lambda: len(stage.trainer.batches) == 3, 20)
    process.kill()
    await process.communicate()
    await fresh_processes(stage)
    process = await spawn()
    _, errors = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 0, errors.decode()
    check_books(stage)
    assert stage.trainer.loaded == [2]


async def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=4, checkpoint={"every_steps": 4})
    await stage.start()
    await until(lambda: len(stage.trainer.batches) == 2)
    await stage.kill()
    await fresh_processes(stage)
    await stage.start()
    assert await stage.finish() == 0
    check_books(stage)
    assert stage.trainer.loaded == []
    assert stage.rollouts[0].commits[0] > 0, "the first weights went out under a number of their own"


async def test_a_trainer_that_comes_back_is_brought_to_the_checkpoint(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=6)
    died = asyncio.Event()

    async def die(step: int) -> None:
        if step == 4 and not died.is_set():
            died.set()
            await asyncio.sleep(30)

    stage.trainer.on_train = die
    await stage.start()
    async with asyncio.timeout(10):
        await died.wait()
    old = stage.trainer
    await old.kill()
    stage.trainer = FakeTrainer("trainer-0", stage.config, checkpoints=old.checkpoints)
    stage.trainer.batches = {step: ids for step, ids in old.batches.items() if step <= 2}
    await stage.trainer.join(stage.address)
    assert await stage.finish() == 0
    check_books(stage)
    assert stage.trainer.loaded == [2]
    assert stage.report()["dropped"]["TRAINER_RESTORED"] >= 12


async def test_a_finished_run_that_is_started_again_only_writes_its_report(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=2)
    await stage.start()
    assert await stage.finish() == 0
    trained = dict(stage.trainer.batches)
    (stage.folder / "report.json").unlink()
    await fresh_processes(stage)
    await stage.start()
    assert await stage.finish() == 0
    check_books(stage)
    assert stage.trainer.batches == trained


async def test_a_run_does_not_go_on_with_other_data(
    make_stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_stage(steps=2)
    await stage.start()
    assert await stage.finish() == 0
    write_data(Path(stage.config.data.train.path), digits=9)
    await fresh_processes(stage)
    await stage.start()
    assert await stage.finish() == 1
    assert "the data is not what the run began with" in capsys.readouterr().err.strip().splitlines()[-1]


async def test_one_seed_gives_one_first_step(make_stage: Callable[..., Stage]) -> None:
    one, other = make_stage(steps=1), make_stage(steps=1, seed=4)
    again = make_stage(steps=1)
    for stage in (one, again, other):
        await stage.start()
        assert await stage.finish() == 0
    assert one.report()["first_step"] == again.report()["first_step"]
    assert not set(one.report()["first_step"].values()) & set(other.report()["first_step"].values())
    first, second = (
        [(r.request_id, list(r.prompt_token_ids), r.sampling_params.seed) for r in s.rollouts[0].requests]
        for s in (one, again)
    )
    assert first == second, "the same calls in the same order"


async def watch_for(stage: Stage, condition: Callable[[run_pb.RunStatus], bool]) -> run_pb.RunStatus:
    client = RunClient(open_channel(stage.address, None), peer="coordinator")
    async with asyncio.timeout(10):
        async for status in client.watch_run():
            if condition(status):
                return status
    raise AssertionError("the run ended before")
