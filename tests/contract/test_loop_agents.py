"""Runs whose trajectories come from agents through a gateway: tasks, own groups, faults, restarts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from fourfold.coordinator.v1 import experience_service_pb2 as pb
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.reward.v1.reward_service_pb2 import ScoreItem
from fourfold.rpc.codec import pack_floats
from fourfold.sample import Sample
from fourfold_coordinator.state.ledger import Ledger, SampleState
from tests.fakes.stage import Stage, hang_in_step, successor, until
from tests.fakes.toy import Member, Services
from tests.fakes.toy_gateway import FakeGateway, new_attempt_id, trajectory
from tests.fakes.toy_rollout import FakeRollout

AGENTS = {"source": "tasks", "lease_seconds": 20.0, "group_seconds": 20.0}


async def begin(stage: Stage, *, work: bool = True) -> FakeGateway:
    """Start the run and a gateway, which knows the newest version of the engines."""
    gateway = FakeGateway("gateway-0", stage.config, version=lambda: stage.rollouts[0].version)
    stage.others.append(gateway)
    await stage.start()
    if work:
        gateway.start_work(stage.address)
    return gateway


class FakeEnvironment(Member):
    """Registers as an environment service, and does nothing."""

    role = Role.ROLE_ENVIRONMENT

    def services(self) -> Services:
        return []

    @property
    def incarnation(self) -> str:
        return self._incarnation


async def lease(stub: Any, count: int, gateway: str = "gateway-0", agent: str = "") -> list[pb.LeasedTask]:
    tasks: list[pb.LeasedTask] = []
    async with asyncio.timeout(10):
        while len(tasks) < count:
            request = pb.LeaseTasksRequest(max_task_count=count - len(tasks), gateway=gateway, agent_incarnation=agent)
            request.wait.FromMilliseconds(500)
            try:
                tasks += (await stub.LeaseTasks(request, timeout=5)).tasks
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                await asyncio.sleep(0.05)
    return tasks


async def put(stub: Any, *messages: pb.Trajectory) -> list[int]:
    response = await stub.PutTrajectories(pb.PutTrajectoriesRequest(trajectories=messages), timeout=5)
    return [result.code for result in response.results]


OK, INVALID, NOT_FOUND, EXISTS = 0, 3, 5, 6


async def test_agents_make_every_trajectory_of_a_run(make_stage: Callable[..., Stage]) -> None:
    stage, batches = make_stage(agents=AGENTS, asynchrony={"max_policy_lag": 2}), list[list[Sample]]()
    stage.trainer.on_batch = batches.append
    gateway = await begin(stage)
    gateway.segments = 2
    assert await stage.finish() == 0
    assert not [r for engine in stage.rollouts for r in engine.requests], "no engine samples for the coordinator"
    assert [len(batch) for batch in batches] == [24] * 4, "12 trajectories of 2 segments"
    for batch in batches:
        for first, second in zip(batch[::2], batch[1::2], strict=True):
            assert (first.trajectory, second.trajectory) == (first.sample_id, first.sample_id)
            assert (first.segment_index, second.segment_index, second.segment_count) == (0, 1, 2)
            assert first.score == second.score == int(first.sample_id.rpartition("-")[2]) % 2
    rows = stage.lines("metrics.jsonl")
    assert all(row["length/turns_mean"] == 4 for row in rows)
    assert all(row["agents/metrics/steps"] == 2 for row in rows)
    assert sum(row["agents/tasks_taken"] for row in rows) >= 48
    ledger = stage.ledger()
    assert ledger.counts() == {SampleState.TRAINED: 48}
    assert all(row.answer_count and not row.missing_count for row in ledger.evals())
    assert any(task.evaluation for task in gateway.tasks) and len(ledger.evals()) == 3
    assert all(result.code == OK for result in gateway.results)
    assert {line["scorer"] for line in stage.lines("samples.jsonl")} == {"agent"}


async def test_a_group_closes_with_the_attempts_that_arrived(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(
        steps=1,
        agents={**AGENTS, "min_attempts": 2, "group_seconds": 1.0},
        batch={"prompts_per_step": 1},
        data={"holdout": None},
    )
    gateway = await begin(stage)
    gateway.on_task = lambda t: (
        {0: "ABANDONED", 1: None}.get(t.sample_index) or (None if t.sample_index == 1 else gateway.attempt(t))
    )
    assert await stage.finish() == 0
    ledger = stage.ledger()
    assert ledger.counts() == {SampleState.TRAINED: 2, SampleState.DROPPED: 2}
    assert ledger.dropped() == {"ABANDONED": 1, "EXPIRED": 1}


async def test_tasks_return_at_once_when_their_environment_or_their_gateway_has_left(
    make_stage: Callable[..., Stage],
) -> None:
    """The leases last for 20 s, and nobody waits for their end."""
    stage = make_stage(steps=1, agents=AGENTS, data={"holdout": None})
    environment = FakeEnvironment("environment-0", stage.config)
    replacement = FakeEnvironment("environment-0", stage.config)
    other = FakeGateway("gateway-1", stage.config)
    stage.others += [environment, other]
    gateway = await begin(stage, work=False)
    stub = other.stub(stage.address)
    async with asyncio.timeout(10):
        first = {task.task_id for task in await lease(stub, 12, agent=environment.incarnation)}
        await environment.stop_answering()
        await replacement.join(stage.address)  # in its place
        stage.others.append(replacement)
        again = await lease(stub, 12, agent=replacement.incarnation)
        assert {task.task_id for task in again} == first
        await replacement.leave()
        again = await lease(stub, 12)
        assert {task.task_id for task in again} == first
        await gateway.leave()
        again = await lease(stub, 12, gateway="gateway-1")
    assert await put(stub, *map(trajectory, again)) == [OK] * 12
    await stage.check_end()


async def test_a_put_is_idempotent_and_a_bad_trajectory_costs_one_attempt(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=1, agents=AGENTS, data={"holdout": None})
    gateway = await begin(stage, work=False)
    stub = gateway.stub(stage.address)
    tasks = await lease(stub, 12)
    good = [trajectory(task) for task in tasks]
    assert await put(stub, good[0], good[0]) == [OK, OK]
    assert await put(stub, trajectory(tasks[0], reward=0.25)) == [EXISTS]
    assert await put(stub, pb.Trajectory(task_id="p9-9-9")) == [NOT_FOUND]
    bad = trajectory(tasks[1])
    bad.segments[0].token_ids = b"\xff" * len(bad.segments[0].token_ids)
    future = trajectory(tasks[1], version=7)
    assert await put(stub, bad) == [INVALID]
    (task,) = await lease(stub, 1)
    assert task.task_id == tasks[1].task_id, "it is leased again"
    assert await put(stub, future) == [INVALID]
    assert await put(stub, good[1]) == [NOT_FOUND], "it had two tries"
    await put(stub, *good[2:])
    # The group of the lost attempt is lost, too, and another one is made in its place.
    more = await lease(stub, 4)
    assert await put(stub, *map(trajectory, more)) == [OK] * 4
    assert await stage.finish() == 0
    faults = {(row["peer"], row["kind"]): row for row in stage.report()["faults"]}
    assert faults["gateway-0", "BAD_TRAJECTORY"]["count"] == 2
    assert "token id -1" in faults["gateway-0", "BAD_TRAJECTORY"]["first"]


async def test_a_trajectory_whose_gateway_dies_while_it_is_stored_is_taken_once(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_stage(steps=1, agents=AGENTS, data={"holdout": None})
    gateway = await begin(stage, work=False)
    stub = gateway.stub(stage.address)
    first, *others = [trajectory(task) for task in await lease(stub, 12)]
    in_ledger, go_on, real = threading.Event(), threading.Event(), Ledger.sync

    def sync(ledger: Ledger) -> None:
        in_ledger.set()
        assert go_on.wait(10)
        real(ledger)

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "sync", sync)
        putting = asyncio.create_task(put(stub, first))
        await until(in_ledger.is_set)
        putting.cancel()
        await asyncio.gather(putting, return_exceptions=True)
        await asyncio.sleep(0.1)  # the cancellation arrives
    go_on.set()
    assert await put(stub, first, *others) == [OK] * 12
    await stage.check_end()


async def test_tasks_of_an_earlier_coordinator_are_unknown(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=2, agents=AGENTS, data={"holdout": None})
    gateway = await begin(stage, work=False)
    stub = gateway.stub(stage.address)
    tasks = await lease(stub, 12)
    assert await put(stub, trajectory(tasks[0])) == [OK]
    await stage.kill()
    await stage.start()
    stub = gateway.stub(stage.address)
    fresh = await lease(stub, 12)
    assert not {task.task_id for task in fresh} & {task.task_id for task in tasks}
    assert await put(stub, trajectory(tasks[1])) == [NOT_FOUND]
    assert await put(stub, *map(trajectory, fresh)) == [OK] * 12
    gateway.start_work(stage.address)
    await stage.check_end()


async def test_agents_bring_groups_of_their_own(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(
        steps=1,
        agents={**AGENTS, "source": "groups"},
        data={"train": None, "holdout": None},
        batch={"prompts_per_step": 2},
    )
    gateway = await begin(stage, work=False)
    stub = gateway.stub(stage.address)

    async def join(key: str, attempt: str) -> pb.LeasedTask:
        request = pb.JoinGroupRequest(attempt_id=attempt, key=key, description="3 * 4", gateway="gateway-0")
        response: pb.JoinGroupResponse = await stub.JoinGroup(request, timeout=5)
        return response.task

    ids = [new_attempt_id() for _ in range(4)]
    async with asyncio.timeout(10):
        while True:
            try:
                first = await join("a", ids[0])
                break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.05)
    assert (await join("a", ids[0])).task_id == first.task_id, "a repeated call takes no second place"
    tasks = [first, *[await join("a", name) for name in ids[1:]]]
    assert len({task.task_id for task in tasks}) == 4
    with pytest.raises(grpc.aio.AioRpcError, match="has its 4 attempts"):
        await join("a", new_attempt_id())
    tasks += [await join("b", new_attempt_id()) for _ in range(4)]
    with pytest.raises(grpc.aio.AioRpcError, match="takes no further group now"):
        await join("c", new_attempt_id())
    assert await put(stub, *map(trajectory, tasks)) == [OK] * 8
    await stage.check_end()
    assert {line["prompt"] for line in stage.lines("samples.jsonl")} == {"3 * 4"}


async def test_ready_groups_of_agents_survive_the_coordinator(make_stage: Callable[..., Stage]) -> None:
    """Each group lacks an attempt, and each trajectory has two segments."""
    stage, batches = (
        make_stage(
            steps=2,
            agents={**AGENTS, "source": "groups", "min_attempts": 3},
            data={"train": None, "holdout": None},
            batch={"prompts_per_step": 1},
        ),
        list[list[Sample]](),
    )
    stage.trainer.on_batch = batches.append
    gateway = await begin(stage, work=False)

    async def bring(key: str) -> None:
        stub = gateway.stub(stage.address)
        tasks: list[pb.LeasedTask] = []
        async with asyncio.timeout(10):
            while len(tasks) < 4:
                request = pb.JoinGroupRequest(attempt_id=new_attempt_id(), key=key, description=f"{key} of 3 * 4")
                try:
                    tasks.append((await stub.JoinGroup(request, timeout=5)).task)
                except grpc.aio.AioRpcError:  # not ready yet
                    await asyncio.sleep(0.05)
        released = pb.ReleasedTask(task_id=tasks[0].task_id, reason="ABANDONED")
        await stub.ReleaseTasks(pb.ReleaseTasksRequest(tasks=[released]), timeout=5)
        version = stage.rollouts[0].version
        assert await put(stub, *(trajectory(t, segments=2, version=version) for t in tasks[1:])) == [OK] * 3

    hangs = hang_in_step(stage, 1)
    await bring("first")
    await until(hangs.is_set)
    await stage.kill()
    for member in (stage.trainer, *stage.rollouts):
        await member.kill()
    stage.trainer, stage.rollouts = successor(stage.trainer), [FakeRollout("rollout-0", stage.config)]
    stage.trainer.on_batch = batches.append
    await stage.start()
    await until(lambda: stage.trainer.batches)
    assert [s.sample_id for s in batches[-1]] == [s.sample_id for s in batches[0]], "the stored group is trained"
    assert [s.segment_count for s in batches[-1]] == [2] * 6
    await bring("second")
    assert await stage.finish() == 0
    lines = [line for line in stage.lines("samples.jsonl") if not line["dropped"]]
    assert [line["prompt"] for line in lines] == ["first of 3 * 4"] * 3 + ["second of 3 * 4"] * 3
    assert stage.report()["dropped"] == {"ABANDONED": 2}


async def test_lines_of_samples_have_the_prompt_of_the_agent(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=1, agents=AGENTS)
    gateway = await begin(stage)

    def attempt(task: pb.LeasedTask) -> pb.Trajectory:
        task.messages_json, task.text = "", "0123456789"  # the tokenizer of the toy decodes 33 characters further
        return trajectory(task)

    gateway.on_task = attempt
    assert await stage.finish() == 0
    assert {line["prompt"] for line in stage.lines("samples.jsonl")} == {"QRSTUVWXYZ"}


async def test_the_reward_service_scores_what_agents_do_not(make_stage: Callable[..., Stage]) -> None:
    stage, scored = make_stage(steps=1, agents={**AGENTS, "reward": "service"}), dict[str, str]()

    def note(item: ScoreItem) -> None:
        scored[item.experience.sample_id] = item.completion_text

    stage.reward.outcome = note
    gateway = await begin(stage)

    def attempt(task: pb.LeasedTask) -> pb.Trajectory:
        message = trajectory(task, segments=2)
        if task.sample_index != 1:
            message.ClearField("reward")
        return message

    gateway.on_task = attempt
    assert await stage.finish() == 0
    lines = stage.lines("samples.jsonl")
    scorers = [line["scorer"] for line in lines]
    assert scorers.count("agent") == 3
    assert len(scorers) == 12 and all(scorers)
    for line in lines:
        if line["scorer"] != "agent":
            turn = scored[line["sample_id"]]
            assert line["completion"] == f"{turn}`{turn}", "the last turn is scored, not the conversation"
    ledger = stage.ledger()
    assert [row.missing_count for row in ledger.evals()] == [0, 0]


async def test_a_filter_keeps_groups_that_differ_in_the_rewards_of_their_turns(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(steps=1, agents=AGENTS, data={"holdout": None}, algorithm={"filter": {"keep": "varied"}})
    gateway = await begin(stage)

    def attempt(task: pb.LeasedTask) -> pb.Trajectory:
        message = trajectory(task, reward=1.0)
        (segment,) = message.segments
        tokens = len(segment.token_ids) // 4
        segment.token_rewards = pack_floats([0.0] * (tokens - 1) + [float(task.sample_index)])
        return message

    gateway.on_task = attempt
    assert await stage.finish() == 0
    row = stage.lines("metrics.jsonl")[0]
    assert (row["groups/filter_accept_rate"], row["groups/useful"], row["reward/mean"]) == (1, 1, 1)
    assert stage.report()["dropped"] == {}
