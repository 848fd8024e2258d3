"""`RunService` on a real server: the state at once, every later one coalesced, the last one for sure."""

from __future__ import annotations

import asyncio
import math
from typing import Any, cast

import pytest

from fourfold.contract import CONTRACT_VERSION
from fourfold.coordinator.client import AsyncCoordinatorClient
from fourfold.coordinator.v1 import run_service_pb2 as pb
from fourfold.coordinator.v1.run_service_pb2_grpc import add_RunServiceServicer_to_server
from fourfold_coordinator.reporting.run_service import RunServicer
from fourfold_coordinator.state import run_board
from fourfold_coordinator.state.eval_results import EvalRow
from fourfold_coordinator.state.ledger import CheckpointRow
from fourfold_coordinator.state.run_board import RunBoard
from tests.conftest import Serve
from tests.fakes.clock import FakeClock
from tests.support.eval_results import make_result


@pytest.fixture
def board(clock: FakeClock) -> RunBoard:
    return RunBoard(name="toy", step_count=4, clock=clock)


@pytest.fixture
async def client(serve: Serve, board: RunBoard) -> AsyncCoordinatorClient:
    service = pb.DESCRIPTOR.services_by_name["RunService"]
    return AsyncCoordinatorClient(
        await serve((service, add_RunServiceServicer_to_server, RunServicer(board))), peer="coordinator"
    )


async def test_the_run_has_the_version_of_the_contract(client: AsyncCoordinatorClient) -> None:
    assert (await client._stub.GetRun(pb.GetRunRequest(), timeout=5)).contract_version == CONTRACT_VERSION


async def test_a_run_is_reported_as_it_is(client: AsyncCoordinatorClient, board: RunBoard) -> None:
    status = await client.get_run(timeout=5)
    assert (status.name, status.step_count, status.phase) == ("toy", 4, pb.RUN_PHASE_WAITING_FOR_SERVICES)
    assert not status.HasField("start_time")
    board.mark_started()
    board.set_phase(pb.RUN_PHASE_GENERATING)
    board.set_progress(0.25)
    board.set_step(step=1, policy_version=3)
    board.set_waiting_for("a reward service")
    board.add_step(
        1, {"reward/mean": 0.5, "mismatch/kl_k3": math.nan, "diagnosis": "fine", "train/tokens_per_step": None}
    )
    board.add_eval(EvalRow(step=0, score=0.5, half_width=None, answer_count=8, missing_count=0, answers=[]))
    sets = (make_result("math", score=0.75, interval=(0.4, 0.9)),)
    board.add_eval(EvalRow(1, 0.75, half_width=0.25, answer_count=8, missing_count=0, answers=[], sets=sets))
    board.set_members([pb.Member(member_id="rollout-0", role="rollout", target="x:1", policy_version=3)])
    status = await client.get_run(timeout=5)
    assert status.start_time.seconds == 1000
    assert (status.phase, status.phase_progress) == (pb.RUN_PHASE_GENERATING, 0.25)
    assert (status.step, status.policy_version, status.waiting_for) == (1, 3, "a reward service")
    assert dict(status.steps[0].metrics) == {"reward/mean": 0.5}
    assert math.isnan(status.evals[0].half_width) and not status.evals[0].HasField("low")
    whole, [of_set] = status.evals[1], status.evals[1].sets
    assert (whole.low, whole.high) == (of_set.low, of_set.high) == (0.4, 0.9)
    assert [m.member_id for m in status.members] == ["rollout-0"]


async def test_a_run_with_a_lag_reports_its_queue(
    serve: Serve, client: AsyncCoordinatorClient, board: RunBoard, clock: FakeClock
) -> None:
    board.set_queue(lag_limit=0, running=2, ready=1, needed=3)
    status = await client.get_run(timeout=5)
    assert not status.HasField("queue") and status.phase_progress == 0
    overlapping = RunBoard(name="toy", step_count=4, max_policy_lag=4, clock=clock)
    service = pb.DESCRIPTOR.services_by_name["RunService"]
    other = AsyncCoordinatorClient(
        await serve((service, add_RunServiceServicer_to_server, RunServicer(overlapping))), peer="coordinator"
    )
    assert (await other.get_run(timeout=5)).queue == pb.SampleQueue(max_policy_lag=4, lag_limit=4)
    watch = other.watch_run()
    await anext(watch)
    overlapping.set_queue(lag_limit=3, running=2, ready=1, needed=3)
    queue = pb.SampleQueue(max_policy_lag=4, lag_limit=3, running_groups=2, ready_groups=1)
    assert (await anext(watch)).queue == queue
    overlapping.add_step(1, {"lag_change": "policy lag limit 4 -> 3: why"})
    assert (await anext(watch)).steps[0].lag_change == "policy lag limit 4 -> 3: why"


def test_only_the_phase_that_waits_for_samples_follows_the_queue(board: RunBoard) -> None:
    board.set_phase(pb.RUN_PHASE_GENERATING)
    board.set_queue(lag_limit=1, running=2, ready=1, needed=4)
    assert board.status.phase_progress == 0.25
    board.set_queue(lag_limit=1, running=0, ready=9, needed=4)
    assert board.status.phase_progress == 1
    board.set_phase(pb.RUN_PHASE_TRAINING)
    board.set_queue(lag_limit=1, running=2, ready=2, needed=4)
    assert board.status.phase_progress == 0


def test_an_evaluation_beside_a_phase_has_a_progress_of_its_own(board: RunBoard) -> None:
    board.set_phase(pb.RUN_PHASE_TRAINING)
    board.set_evaluation_progress(0.0)
    assert board.status.HasField("evaluation_progress")
    board.set_evaluation_progress(0.5)
    assert (board.status.phase_progress, board.status.evaluation_progress) == (0.0, 0.5)
    board.set_evaluation_progress(None)
    assert not board.status.HasField("evaluation_progress")


def test_a_status_has_the_newest_thousand_steps(board: RunBoard) -> None:
    for step in range(1, 1006):
        board.add_step(step, {"reward/mean": 0.5})
    assert [board.status.steps[0].step, board.status.steps[-1].step] == [6, 1005]


async def test_waits_and_conditions_tell_since_when(
    client: AsyncCoordinatorClient, board: RunBoard, clock: FakeClock
) -> None:
    board.set_waiting_for("a reward service")
    board.report_condition("reward-0", "HANG: no answer in 10 s")
    await clock.advance(5)
    board.set_waiting_for("a reward service")
    board.report_condition("reward-0", "HANG: no answer in 20 s")
    board.report_condition("disk", "full")
    status = await client.get_run(timeout=5)
    assert status.waiting_since.seconds == 1000
    assert [(c.subject, c.text, c.since.seconds) for c in status.conditions] == [
        ("reward-0", "HANG: no answer in 20 s", 1000),
        ("disk", "full", 1005),
    ]
    board.set_waiting_for("")
    board.resolve_condition("reward-0")
    board.resolve_condition("nothing was wrong with it")
    status = await client.get_run(timeout=5)
    assert not status.HasField("waiting_since")
    assert [c.subject for c in status.conditions] == ["disk"]


async def test_a_wait_that_goes_on_after_a_moment_is_the_same_wait(board: RunBoard, clock: FakeClock) -> None:
    board.set_waiting_for("a reward service")
    await clock.advance(20)
    board.set_waiting_for("")
    await clock.advance(0.5)
    board.set_waiting_for("a reward service (reward-0: not inspected yet)")
    assert board.status.waiting_since.seconds == 1000
    board.set_waiting_for("")
    await clock.advance(2)
    board.set_waiting_for("a reward service")
    assert board.status.waiting_since.seconds == 1022


async def test_returns_to_a_checkpoint_are_told_the_newest_ones(board: RunBoard) -> None:
    for step in range(150):
        board.add_recovery(step, "" if step == 0 else "the trainer is a new process")
    assert [r.step for r in board.status.recoveries] == list(range(50, 150))
    assert board.status.recoveries[-1].reason == "the trainer is a new process"


async def test_the_weight_plane_is_reported_as_it_is(
    serve: Serve, board: RunBoard, client: AsyncCoordinatorClient
) -> None:
    assert await client.get_weight_plane(timeout=5) == pb.GetWeightPlaneResponse(), "nobody tells: nothing is known"
    service = pb.DESCRIPTOR.services_by_name["RunService"]
    servicer = RunServicer(board, lambda: pb.GetWeightPlaneResponse(phase="transfer", epoch=7))
    other = AsyncCoordinatorClient(
        await serve((service, add_RunServiceServicer_to_server, servicer)), peer="coordinator"
    )
    plane = await other.get_weight_plane(timeout=5)
    assert (plane.phase, plane.epoch) == ("transfer", 7)


async def test_a_watcher_gets_the_state_at_once_and_the_last_one_for_sure(
    client: AsyncCoordinatorClient, board: RunBoard
) -> None:
    board.set_step(step=1, policy_version=1)
    watch = client.watch_run()
    assert (await anext(watch)).step == 1
    for step in range(2, 1000):
        board.set_step(step=step, policy_version=step)
    board.close()
    states = [status async for status in watch]
    assert len(states) <= 3, "a slow reader misses states"
    assert (states[-1].step, states[-1].phase) == (999, pb.RUN_PHASE_DONE)


async def test_a_failed_run_tells_its_watchers_why(client: AsyncCoordinatorClient, board: RunBoard) -> None:
    watch = client.watch_run()
    await anext(watch)
    board.close(failure="no usable rollout service")
    states = [status async for status in watch]
    assert (states[-1].phase, states[-1].failure) == (pb.RUN_PHASE_FAILED, "no usable rollout service")


def test_a_run_that_was_stopped_did_not_fail(board: RunBoard) -> None:
    board.close(stopped="stopped by SIGTERM after step 3")
    assert (board.status.phase, board.status.failure) == (pb.RUN_PHASE_STOPPED, "stopped by SIGTERM after step 3")


def test_a_run_that_continues_shows_the_step_of_its_checkpoint(board: RunBoard) -> None:
    board.set_recovering(CheckpointRow(step=3, data_position=24, policy_version=5, eval_count=1))
    assert (board.status.phase, board.status.step) == (pb.RUN_PHASE_RECOVERING, 3)


def test_the_answers_of_an_evaluation_belong_to_its_phase(board: RunBoard) -> None:
    board.set_phase(pb.RUN_PHASE_EVALUATING)
    board.set_answers(30, 120)
    assert (board.status.answers_done, board.status.answer_count, board.status.phase_progress) == (30, 120, 0.25)
    board.set_phase(pb.RUN_PHASE_GENERATING)
    assert board.status.answer_count == 0


async def test_a_watcher_that_comes_after_the_end_gets_the_end(client: AsyncCoordinatorClient, board: RunBoard) -> None:
    board.close()
    assert [s.phase async for s in client.watch_run()] == [pb.RUN_PHASE_DONE]


async def test_nothing_is_sent_while_nothing_changes(client: AsyncCoordinatorClient, board: RunBoard) -> None:
    watch = client.watch_run()
    await anext(watch)
    board.set_members([])
    board.set_waiting_for("")
    later = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.3)
    assert not later.done()
    board.set_progress(0.5)
    async with asyncio.timeout(2):
        assert (await later).phase_progress == 0.5
    await watch.aclose()


async def test_a_watcher_gets_a_sign_of_life(
    client: AsyncCoordinatorClient, board: RunBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_board, "HEARTBEAT_SECONDS", 0.05)
    board.add_step(1, {"reward/mean": 0.1})
    watch = client.watch_run()
    async with asyncio.timeout(5):
        statuses = [await anext(watch) for _ in range(3)]
    assert [[row.step for row in status.steps] for status in statuses] == [[1]] * 3
    await watch.aclose()


async def test_history_is_replaced_after_a_restore(client: AsyncCoordinatorClient, board: RunBoard) -> None:
    for step in (1, 2, 3):
        board.add_step(step, {"reward/mean": step / 10})
    board.set_history([(1, {"reward/mean": 0.1})], [])
    assert [row.step for row in (await client.get_run(timeout=5)).steps] == [1]


async def test_a_watcher_gets_rows_once_and_sees_all_of_them(
    client: AsyncCoordinatorClient, board: RunBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_board, "_PERIOD_SECONDS", 0.001)
    board.add_step(1, {"reward/mean": 0.1})
    board.set_members([pb.Member(member_id="rollout-0", role="rollout", target="x:1")])
    watch, raw = client.watch_run(), cast(Any, client._stub).WatchRun(pb.WatchRunRequest(changes_only=True), timeout=5)
    await anext(watch)
    first = await raw.read()
    assert len(first.status.steps) == len(first.status.members) == 1
    assert not first.steps_appended and not first.members_unchanged
    board.add_step(2, {"reward/mean": 0.2})
    board.set_waiting_for("a scorer")
    board.add_eval(EvalRow(step=2, score=0.5, half_width=None, answer_count=8, missing_count=0, answers=[]))
    second, status = await raw.read(), await anext(watch)
    assert second.steps_appended and [row.step for row in second.status.steps] == [2]
    assert second.members_unchanged and not second.status.members
    assert status == board.status or math.isnan(status.evals[0].half_width)
    assert [row.step for row in status.steps] == [1, 2] and status.waiting_for == "a scorer"
    assert [member.member_id for member in status.members] == ["rollout-0"]
    board.set_history([(1, {"reward/mean": 0.3})], [])  # after a restore
    third, status = await raw.read(), await anext(watch)
    assert not third.steps_appended and [row.metrics["reward/mean"] for row in status.steps] == [0.3]
    raw.cancel()
