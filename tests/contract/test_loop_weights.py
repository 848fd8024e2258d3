"""Weight updates of a run: damaged, stale and strange weights, engines that die or come late."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from fourfold.coordinator.client import AsyncCoordinatorClient
from fourfold.errors import (
    ARCHITECTURE_NOT_VERIFIED,
    MODEL_MISMATCH,
    DeadlinePassed,
    Unavailable,
    WrongState,
)
from fourfold.rollout.v1 import rollout_control_service_pb2 as control
from fourfold.rpc.channel import open_channel
from fourfold_coordinator.weights import broker
from fourfold_coordinator.weights.update import WeightUpdater
from tests.fakes.stage import Stage, until, watch_for
from tests.fakes.toy_rollout import FakeRollout


async def test_an_engine_whose_probe_differs_again_and_again_costs_a_group_one_try(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(broker, "_FIRST_BACKOFF_SECONDS", 0.01)
    stage = make_stage(retry={"service_wait_seconds": 1.5, "infrastructure": 2})
    engine = stage.rollouts[0]
    engine.ignores_updates = True
    await stage.start()
    assert await stage.finish() == 1
    assert engine.aborts > 3
    requests = [request for request in engine.requests if request.min_policy_version]
    assert 0 < len(requests) <= stage.config.batch.prompts_per_step
    assert "rollout-0: stale" in capsys.readouterr().err.strip().splitlines()[-1], "no group was lost"


async def test_an_engine_that_hangs_does_not_keep_the_others_of_its_group_out(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(rollout={"replicas": 2}, steps=2)
    hung, well = stage.rollouts

    async def hang() -> None:
        raise DeadlinePassed("it does not answer")

    async def wait_for_the_other() -> None:
        if well.places[-1][1] > 1:
            raise DeadlinePassed("a member of the group is stuck")

    hung.on_begin, well.on_begin = hang, wait_for_the_other
    await stage.complete()
    assert well.version == stage.trainer.version > 0
    assert hung.version == 0


async def test_a_model_that_can_never_take_the_weights_ends_the_run_at_once(
    make_stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_stage(retry={"service_wait_seconds": 600.0})
    stage.rollouts[0].refuses = ARCHITECTURE_NOT_VERIFIED
    await stage.start()
    assert await stage.finish(10.0) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "no engine can accept the trainer's weights: rollout-0" in last and "refuses norm.weight (64,)" in last
    assert stage.rollouts[0].opened <= 2, "once, and once more to see whose fault it is"


@pytest.mark.slow
async def test_one_engine_with_another_model_is_left_out_for_good(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(rollout={"replicas": 2}, steps=4)
    stage.rollouts[1].refuses = MODEL_MISMATCH
    stage.rollouts[0].on_generate = lambda: asyncio.sleep(0.4)  # long enough for a second chance, if it had one
    await stage.complete()
    assert stage.rollouts[0].version == stage.trainer.version > 0
    assert stage.rollouts[1].version == 0 and stage.rollouts[1].opened <= 2


def _join_while_it_trains(stage: Stage, late: FakeRollout) -> None:
    """Let an engine join in the second step, in which the trainer is busy until it serves or half a second is over."""

    async def join(step: int) -> None:
        if step == 2:
            stage.rollouts.append(late)
            await late.join(stage.address)
            with suppress(TimeoutError):
                await until(lambda: late.commits, 1.0)

    stage.trainer.on_train = join


async def test_a_late_engine_is_fed_by_a_peer_while_the_trainer_trains(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=3)
    first, late = stage.rollouts[0], FakeRollout("rollout-1", stage.config, host_id="there")
    stage.trainer.journal = []
    _join_while_it_trains(stage, late)
    await stage.complete()
    assert first.fed == [1]
    assert late.places[0] == (b"offer of a peer", 1, 0)
    assert late.commits[0] == first.commits[0], "the version of the first step"
    sends = [word for word in stage.trainer.journal if word.endswith("send")]
    assert len(sends) == len(stage.trainer.skipped_sums) == 3, "the trainer sent each version once"
    assert late.commits == first.commits, "later versions come from the trainer"


@pytest.mark.parametrize("fault", ["refuses", "dies", "damages"])
async def test_the_trainer_feeds_a_late_engine_that_no_peer_can_feed(
    make_stage: Callable[..., Stage], fault: str
) -> None:
    stage = make_stage(steps=3)
    first, late = stage.rollouts[0], FakeRollout("rollout-1", stage.config)
    first.feeds_nothing, late.wrong_digests = fault == "refuses", int(fault == "damages")
    first.dies_in = "FeedWeights" if fault == "dies" else ""
    _join_while_it_trains(stage, late)
    await stage.complete()
    assert late.version == stage.trainer.version
    assert all(offer.startswith(b"offer of group") for offer, _, _ in late.places[-1:])


@pytest.mark.parametrize("pause", ["keep", "recompute", "wait", "abort"])
async def test_nothing_else_stands_between_pause_and_resume(make_stage: Callable[..., Stage], pause: str) -> None:
    stage = make_stage(steps=1, rollout={"replicas": 2}, weights={"pause": pause, "timeout_seconds": 5.0})
    journal: list[str] = []
    for member in (*stage.rollouts, stage.trainer):
        member.journal = journal
    # Each would wait for ever if the calls came one after the other: begin for the sender, it for the receivers.
    for engine in stage.rollouts:
        engine.on_begin = lambda: until(lambda: "trainer-0 send" in journal)
    stage.rollouts[1].pause_seconds = 0.0002
    stage.trainer.on_send = lambda: until(lambda: {"rollout-0 receive", "rollout-1 receive"} <= set(journal))
    await stage.complete()
    first = journal.index("trainer-0 send")
    assert journal[:first].count("trainer-0 probe") == 1, "of version 0 when it settled"
    received = max(journal.index(f"{engine.member_id} receive") for engine in stage.rollouts)
    assert journal.index("trainer-0 probe", first) > received, "after the transfer"
    begins = [journal.index(f"{engine.member_id} begin") for engine in stage.rollouts]
    for engine in stage.rollouts:
        rest = [word for word in journal[min(begins) :] if word.startswith(engine.member_id)]
        assert [word.split()[1] for word in rest] == ["begin", "receive", "commit", "probe", "release"]
        assert journal.index(f"{engine.member_id} receive") > max(begins), "when all have begun"
        assert engine.pause_modes == [control.PauseMode.Value(f"PAUSE_MODE_{pause.upper()}")]
    assert [engine.places[-1] for engine in stage.rollouts] == [(b"offer of group 0", 2, i) for i in range(2)]
    assert stage.trainer.groups == [("shm", 2)]
    row = stage.lines("metrics.jsonl")[-1]
    parts = ("join", "lookup", "send", "pause", "transfer", "commit", "probe")
    assert all(0 < row[f"weights/{part}_seconds"] <= row["weights/publish_seconds"] for part in parts)
    assert row["weights/pause_seconds"] == 0.0002, "of the slowest engine, which knows it best"


async def test_sums_are_taken_at_first_and_then_now_and_then(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=8, weights={"verify_first": 1, "verify_every": 3, "timeout_seconds": 5.0})
    late = FakeRollout("rollout-1", stage.config)

    async def join() -> None:
        if len(stage.trainer.batches) == 4 and late not in stage.rollouts:
            stage.rollouts.append(late)
            await late.join(stage.address)
            await until(lambda: late.commits)

    stage.rollouts[0].on_generate = join
    await stage.complete()
    summed = [version for version, skipped in stage.trainer.skipped_sums.items() if not skipped]
    assert late.commits == [*range(4, stage.trainer.version + 1)] and stage.trainer.version > 6
    # 1: the first. 3, 6: every third. 4 again: the first of the newcomer's epoch. 5: the first of both together.
    assert summed == [1, 3, 4, 5, 6]


async def test_the_tensor_that_differs_is_named(
    make_stage: Callable[..., Stage], caplog: pytest.LogCaptureFixture
) -> None:
    stage = make_stage(steps=1)
    stage.rollouts[0].wrong_digests = 1
    await stage.complete()
    assert stage.rollouts[0].aborts == 1 and stage.rollouts[0].version == stage.trainer.version
    assert "the trainer sent" in caplog.text and ": one differs; the engine does not serve them" in caplog.text
    assert "trainer-0 abort" in stage.trainer.journal and "rollout-0 abort" in stage.rollouts[0].journal


async def test_an_engine_whose_probe_differs_gives_nothing_out_and_the_others_go_on(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(rollout={"replicas": 2}, steps=2)
    stage.rollouts[0].ignores_updates = True
    await stage.complete()
    bad, good = stage.rollouts
    assert bad.commits == [] and bad.state == control.WEIGHT_STATE_DIRTY and bad.aborts >= 1
    assert good.commits == [1, 2] and good.aborts == 0
    # Requests of the second step that it got while it held its tokens back failed, and went to the other engine.
    assert all(request.min_policy_version <= 1 for request in bad.requests), "it was not asked after that"


async def test_the_next_step_is_sampled_while_the_trainer_computes_the_probe(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(rollout={"replicas": 2}, steps=3, weights={"timeout_seconds": 10.0})
    seen: list[tuple[int, int, bool]] = []  # at the arrival of each request: versions of both engines, tokens held back
    one, two = stage.rollouts

    async def note() -> None:
        seen.append((one.version, two.version, one.held or two.held))

    async def probe() -> None:
        version = stage.trainer.version
        if 0 < version < 3:
            await until(lambda: any(r.min_policy_version == version for e in stage.rollouts for r in e.requests))

    for engine in stage.rollouts:
        engine.on_generate = note
    stage.trainer.on_probe = probe
    await stage.complete()
    assert all(first == second for first, second, _ in seen), "when all engines have the version"
    assert {first for first, _, held in seen if held} == {1, 2}
    for row in stage.lines("metrics.jsonl"):
        assert 0 < row["weights/sampling_seconds"] < row["weights/publish_seconds"]


async def test_a_trainer_that_does_not_compute_the_probe_leaves_no_engine_serving(
    make_stage: Callable[..., Stage], capsys: pytest.CaptureFixture[str]
) -> None:
    stage = make_stage(rollout={"replicas": 2}, steps=2)

    async def fail() -> None:
        if stage.trainer.version:
            raise WrongState("the trainer cannot compute the probe")

    stage.trainer.on_probe = fail
    await stage.start()
    assert await stage.finish() == 1
    assert "the trainer cannot compute the probe" in capsys.readouterr().err.strip().splitlines()[-1]
    for engine in stage.rollouts:
        assert engine.commits == [] and engine.aborts == 1 and engine.state == control.WEIGHT_STATE_DIRTY


async def test_a_lost_answer_of_the_trainers_probe_is_asked_for_again(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=1)
    lost = [Unavailable("the answer is lost")]

    async def lose() -> None:
        if stage.trainer.version and lost:
            raise lost.pop()

    stage.trainer.on_probe = lose
    await stage.complete()
    assert stage.rollouts[0].commits == [1] and stage.rollouts[0].aborts == 0 and not lost


@pytest.mark.parametrize("call", ["BeginWeights", "ReceiveWeights", "CommitWeights", "ReleaseWeights"])
async def test_an_engine_that_dies_holds_nobody_up(make_stage: Callable[..., Stage], call: str) -> None:
    stage = make_stage(rollout={"replicas": 2}, steps=2, weights={"timeout_seconds": 100.0})
    stage.rollouts[0].dies_in = call
    await stage.complete()
    assert stage.rollouts[1].version == stage.trainer.version > 0
    assert stage.rollouts[0].commits == []


async def test_an_engine_that_hangs_is_left_as_soon_as_it_is_no_member(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(rollout={"replicas": 2}, steps=2, weights={"timeout_seconds": 100.0})
    replacement = FakeRollout("rollout-0", stage.config)

    async def hang() -> None:
        stage.others.append(replacement)
        await stage.rollouts[0].stop_answering()
        await replacement.join(stage.address)  # whose registration ends the lease of the one that hangs
        await asyncio.sleep(100)

    stage.rollouts[0].on_begin = hang
    await stage.complete()
    assert stage.rollouts[1].commits == [1, 2] and stage.rollouts[0].commits == []


@pytest.mark.parametrize("where", ["on_begin", "on_held"])
async def test_a_coordinator_that_is_killed_in_an_update_is_followed_by_one_that_gets_all_going(
    make_stage: Callable[..., Stage], where: str
) -> None:
    stage = make_stage(
        rollout={"replicas": 2}, steps=3, weights={"timeout_seconds": 100.0}, checkpoint={"every_steps": 1}
    )
    reached, began = asyncio.Event(), time.time()

    async def hang() -> None:
        if len(stage.trainer.batches) < 2:
            return
        reached.set()
        await asyncio.sleep(100)

    setattr(stage.rollouts[0], where, hang)
    # The killed coordinator must not get an abort through.
    stage.trainer.refuses_aborts = stage.rollouts[0].refuses_aborts = stage.rollouts[1].refuses_aborts = True
    await stage.start()
    await asyncio.wait_for(reached.wait(), 10)
    await stage.kill()
    epoch = stage.trainer.epoch
    setattr(stage.rollouts[0], where, None)
    stage.trainer.refuses_aborts = stage.rollouts[0].refuses_aborts = stage.rollouts[1].refuses_aborts = False
    await stage.complete()
    assert stage.trainer.epoch > epoch
    # In milliseconds, an epoch that follows a killed one at once is above all that it can have made.
    assert 0 <= stage.trainer.epoch - began * 1000 < 60_000
    assert {engine.version for engine in stage.rollouts} == {stage.trainer.version}
    assert {engine.weights for engine in stage.rollouts} == {stage.trainer.weights}


async def test_people_are_told_who_waits_for_whom(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "_SLOW_SECONDS", 0.05)
    monkeypatch.setattr(broker, "_SHOW_SECONDS", 0.05)
    stage = make_stage(rollout={"replicas": 2}, steps=1, weights={"timeout_seconds": 60.0})
    go = asyncio.Event()
    stage.rollouts[1].on_begin = stage.trainer.on_send = go.wait
    await stage.start()
    await until(lambda: stage.rollouts[1].journal[-1:] == ["rollout-1 begin"])
    line = re.compile(r"weights of version 1: pause for \d+ s \(rollout-1, trainer-0\)")
    await watch_for(stage, lambda status: line.fullmatch(status.waiting_for) is not None)
    plane = await AsyncCoordinatorClient(open_channel(stage.address, None), peer="coordinator").get_weight_plane(
        timeout=5
    )
    assert (plane.policy_version, plane.phase, plane.epoch) == (1, "pause", stage.trainer.epoch)
    trainer, first, second = plane.parties
    assert (trainer.member_id, trainer.state, list(trainer.waits_for)) == ("trainer-0", "updating", ["rollout-1"])
    assert (first.state, list(first.waits_for), first.backend) == ("waiting", ["rollout-1"], "shm")
    assert (second.state, list(second.waits_for), second.policy_version) == ("updating", [], 0)
    assert "rollout-0  waiting" in await print_weights(stage)
    go.set()
    await watch_for(stage, lambda status: status.waiting_for == "")
    assert await stage.finish() == 0


async def test_an_engine_of_another_run_is_filled_under_a_higher_version(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=1)
    stage.rollouts[0].version, stage.rollouts[0].weights = 7, 99
    await stage.complete()
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
    await stage.complete()
    assert stranger.commits[0] == 3, "the second step's weights went to it under a number that it did not have"
    assert stranger.weights == stage.rollouts[0].weights == stage.trainer.weights


async def print_weights(stage: Stage) -> str:
    """Return what `fourfold weights` prints of the run in the stage's folder."""
    code = (
        "import argparse, sys; from fourfold_coordinator.cli import weights; parser = argparse.ArgumentParser(); "
        "weights.add_arguments(parser); sys.exit(weights.main(parser.parse_args()))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(stage.folder), stdout=asyncio.subprocess.PIPE, env=environment
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


ENGINE_CALLS = ("OpenWeights", "BeginWeights", "ReceiveWeights", "CommitWeights", "ProbeLogprobs", "ReleaseWeights")
TRAINER_CALLS = ("MakeOffer", "OpenWeights", "SendWeights")


def note_deadlines(member: Any, calls: tuple[str, ...]) -> dict[str, list[float]]:
    """Note the seconds that each of a member's calls has left when it arrives, at every call from now on."""
    seen: dict[str, list[float]] = {}

    def wrap(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        async def call(request: Any, context: Any) -> Any:
            seen.setdefault(name, []).append(context.time_remaining())
            return await method(request, context)

        return call

    for name in calls:
        setattr(member, name, wrap(name, getattr(member, name)))
    return seen


async def test_every_call_of_an_update_has_what_is_left_of_its_deadline(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=1, weights={"timeout_seconds": 321.0})
    stage.rollouts[0].wrong_digests = 1  # so that there are aborts, too
    engine = note_deadlines(stage.rollouts[0], (*ENGINE_CALLS, "AbortWeights", "GetWeightSums"))
    trainer = note_deadlines(stage.trainer, (*TRAINER_CALLS, "AbortWeights", "GetManifest"))
    await stage.complete()
    for seen, calls in ((engine, ENGINE_CALLS), (trainer, TRAINER_CALLS)):
        for call in calls:
            # Of an update's one deadline; the probe of an engine that is new has a shorter one of its own.
            assert 300.0 < max(seen[call]) < 323.0, call
    for seen in (engine, trainer):
        assert all(0.0 < left < 17.0 for left in seen["AbortWeights"]), "an abort has its own"
    assert all(0.0 < left < 12.0 for left in (*engine["GetWeightSums"], *trainer["GetManifest"]))


async def test_a_fault_of_ours_in_an_abort_is_not_lost(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(self: WeightUpdater, engine: Any) -> None:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(WeightUpdater, "_abort_engine", broken)
    stage = make_stage(steps=1)
    stage.rollouts[0].wrong_digests = 1
    await stage.start()
    assert await stage.finish() == 1
    assert "ZeroDivisionError: a fault of ours" in caplog.text


@pytest.mark.parametrize("refuses", [False, True])
async def test_a_trainer_that_could_not_abort_is_told_and_no_other(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refuses: bool
) -> None:
    async def refuse(request: Any, context: Any) -> Any:
        raise WrongState("the trainer does not know that epoch")

    stage = make_stage(steps=1)
    stage.rollouts[0].wrong_digests = 1
    if refuses:
        monkeypatch.setattr(stage.trainer, "AbortWeights", refuse)
    await stage.complete()
    assert stage.rollouts[0].aborts == 1
    assert ("trainer did not abort the update" in caplog.text) == refuses
