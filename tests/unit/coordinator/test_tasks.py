"""Tests of the task queue on a fake clock, and of the checks of trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from google.rpc import code_pb2

from fourfold.config import AgentsConfig
from fourfold.coordinator.v1 import experience_service_pb2 as pb
from fourfold.errors import InvalidInput, NotFound, Overloaded, Unavailable, WrongState
from fourfold_coordinator.data.prompts import own_prompt
from fourfold_coordinator.state.experiences import ExperienceStore
from fourfold_coordinator.state.faults import FaultLog
from fourfold_coordinator.state.samples import Trajectory
from fourfold_coordinator.tasks import task_queue as queue_module
from fourfold_coordinator.tasks.check import TrajectoryRules, check_trajectory
from fourfold_coordinator.tasks.servicer import ExperienceServicer, TaskSource
from fourfold_coordinator.tasks.task_queue import Attempt, AttemptState, OwnProblem, TaskGroup, TaskQueue, check_reason
from tests.fakes.clock import FakeClock
from tests.fakes.toy import make_config
from tests.fakes.toy_gateway import trajectory

PROMPT = own_prompt("3 * 4", answer="12", metadata_json="")
RULES = TrajectoryRules(
    vocabulary_size=258, max_tokens=64, max_segments=2, newest_version=3, temperature=1.0, needs_reward=True
)
TASK = pb.LeasedTask(task_id="t-0", group_id="t", text="3 * 4")


def make_queue(clock: FakeClock) -> TaskQueue:
    return TaskQueue(AgentsConfig(source="tasks", lease_seconds=10, group_seconds=25), clock=clock)


def make_group(name: str = "g", *, evaluation: bool = False, size: int = 2) -> TaskGroup:
    names = [f"{name}-{index}" for index in range(size)]
    return TaskGroup(group_id=name, prompt=PROMPT, task_ids=names, seed=3, evaluation=evaluation)


async def opened(queue: TaskQueue, group: TaskGroup) -> asyncio.Task[None]:
    task = asyncio.create_task(queue.collect(group))
    await asyncio.sleep(0)
    return task


async def test_agents_hear_of_the_end_of_the_run_also_while_they_wait() -> None:
    queue = make_queue(FakeClock())
    waiting = asyncio.create_task(queue.lease("gateway-0", 1, wait=60))
    await asyncio.sleep(0)
    queue.end()
    with pytest.raises(WrongState, match="no task follows") as error:
        await waiting
    assert error.value.reason == "RUN_ENDED"
    own = OwnProblem("agent", "key", PROMPT, asyncio.get_running_loop().create_future())
    with pytest.raises(WrongState, match="no task follows"):
        await queue.join("gateway-0", "0" * 32, own)
    queue.begin()  # the trainer restarted
    collecting = await opened(queue, make_group())
    assert len(await queue.lease("gateway-0", 5, wait=0)) == 2
    collecting.cancel()


async def test_a_lease_that_is_renewed_lives_and_another_one_returns_to_waiting() -> None:
    clock = FakeClock()
    queue, group = make_queue(clock), make_group()
    collecting = await opened(queue, group)
    first, second = await queue.lease("gateway-0", 5, wait=0)
    await clock.advance(6)
    assert queue.renew(["g-0", "unknown"]) == ["unknown"]
    await clock.advance(6)
    queue.tick()
    assert (first.state, second.state) == (AttemptState.LEASED, AttemptState.WAITING)
    assert [a.task_id for a in await queue.lease("gateway-1", 5, wait=0)] == ["g-1"]
    assert queue.renew(["g-1"]) == []
    await clock.advance(13)  # 25 s after the first lease
    queue.tick()
    await collecting
    assert [(a.state, a.reason) for a in group.attempts] == [(AttemptState.MISSING, "EXPIRED")] * 2
    with pytest.raises(NotFound, match="its group closed"):
        queue.find("g-0")


async def test_a_group_does_not_close_while_a_trajectory_is_stored() -> None:
    clock = FakeClock()
    queue, group = make_queue(clock), make_group()
    collecting = await opened(queue, group)
    (attempt,) = await queue.lease("gateway-0", 1, wait=0)
    queue.begin_storing(attempt)
    await clock.advance(100)
    queue.tick()
    assert not group.closed.is_set()
    queue.return_tasks("gateway-0")
    assert attempt.state is AttemptState.STORING
    (segment,) = check_trajectory(trajectory(TASK), group_id="t", rules=RULES)
    queue.take(attempt, Trajectory(prompt=PROMPT, segments=(segment,), completion=""), b"digest")
    await collecting
    assert [a.state for a in group.attempts] == [AttemptState.TAKEN, AttemptState.MISSING]
    assert queue.find(attempt.task_id) == b"digest"


async def test_tasks_of_an_evaluation_are_leased_first_and_released_ones_end_or_wait() -> None:
    queue, group, evaluation = make_queue(FakeClock()), make_group(), make_group("e", evaluation=True)
    for each in (group, evaluation):
        await opened(queue, each)
    leased = await queue.lease("gateway-0", 3, wait=0)
    assert [a.task_id for a in leased] == ["e-0", "e-1", "g-0"]
    queue.release("e-0", "ABANDONED", again=False)
    queue.release("e-1", "ABANDONED", again=True)
    queue.release("e-0", "OTHER", again=True)
    states = [(a.state, a.reason) for a in evaluation.attempts]
    assert states == [(AttemptState.MISSING, "ABANDONED"), (AttemptState.WAITING, "")]
    queue.return_tasks("gateway-0")
    assert leased[2].state is AttemptState.WAITING


async def test_a_key_without_an_offer_is_refused_with_a_retry_time() -> None:
    queue = make_queue(FakeClock())
    problem = OwnProblem("agent", "key", PROMPT, asyncio.get_running_loop().create_future())
    with pytest.raises(Overloaded) as refused:
        await queue.join("gateway-0", "0" * 32, problem)
    assert refused.value.retry_after


async def test_a_lease_that_ended_neither_keeps_nor_ends_the_next_one() -> None:
    """A gateway was cut off for longer than its lease, and the task went to another one."""
    clock = FakeClock()
    queue = make_queue(clock)
    await opened(queue, make_group())
    (first,) = await queue.lease("gateway-0", 1, wait=0)
    old = first.lease
    await clock.advance(11)
    queue.tick()
    (again,) = await queue.lease("gateway-1", 1, wait=0)
    assert again is first and again.lease != old and again.leases == {old, again.lease}
    await clock.advance(6)
    assert queue.renew(["g-0"], [old]) == ["g-0"]
    queue.release("g-0", "ABANDONED", again=False, lease=old)
    assert {again.state} == {AttemptState.LEASED}
    assert queue.renew(["g-0"], [again.lease]) == [] == queue.renew(["g-0"], [""])
    queue.release("g-0", "ABANDONED", again=False, lease=again.lease)
    assert again.state is AttemptState.MISSING


async def test_tasks_belong_to_the_processes_that_attempt_them() -> None:
    """An environment service was killed, and the run stood for 124 s: until its sessions had been idle for too long."""
    queue = make_queue(FakeClock())
    await opened(queue, make_group(size=4))
    old, other = await queue.lease("gateway-0", 1, wait=0, agent="a" * 32), await queue.lease("gateway-0", 1, wait=0)
    queue.on_agent_left("a" * 32)
    assert (old[0].state, other[0].state) == (AttemptState.WAITING, AttemptState.LEASED)
    assert not await queue.lease("gateway-0", 1, wait=0, agent="a" * 32), "a call of the dead process still waited"
    queue.on_agent_joined("a" * 32)  # it was only slow
    assert await queue.lease("gateway-0", 1, wait=0, agent="a" * 32) == old


async def test_a_task_whose_environment_never_opens_a_session_returns_soon() -> None:
    """A gateway was stopped while it took a task for an environment, whose call had ended: the run stood for 94 s."""
    clock = FakeClock()
    queue = TaskQueue(AgentsConfig(source="tasks", lease_seconds=120), clock=clock)
    await opened(queue, make_group())
    (lost,), (held,) = [await queue.lease("gateway-0", 1, wait=0, agent="a" * 32) for _ in range(2)]
    assert queue.renew([held.task_id], [held.lease]) == []
    await clock.advance(15)
    queue.tick()
    assert queue.leased() == [held]
    assert await queue.lease("gateway-0", 1, wait=0, agent="a" * 32) == [lost]
    await clock.advance(90)
    queue.tick()
    assert queue.leased() == [held]


async def test_a_new_gateway_keeps_the_tasks_that_it_names_and_others_are_leased_again(tmp_path: Path) -> None:
    """A gateway was killed with tasks whose sessions were not open yet: they were lost until their leases ended."""
    queue = make_queue(FakeClock())
    await opened(queue, make_group(size=4))
    named, lost, moved, foreign = [
        (await queue.lease(name, 1, wait=0))[0] for name in ("gateway-0", "gateway-0", "gateway-0", "gateway-1")
    ]
    request = pb.RenewTasksRequest(
        task_ids=[named.task_id, moved.task_id], leases=[named.lease, "older"], gateway="gateway-0", all=True
    )
    servicer = make_servicer(tmp_path, queue, cast(Any, None))
    unclear = pb.RenewTasksRequest(task_ids=[named.task_id], gateway="gateway-0", all=True)
    with pytest.raises(InvalidInput, match="all = true, and no leases of 1 tasks; send one for each"):
        await servicer.RenewTasks(unclear, cast(Any, None))
    gone = (await servicer.RenewTasks(request, cast(Any, None))).gone_task_ids
    assert list(gone) == [moved.task_id]
    states = [attempt.state for attempt in (named, lost, moved, foreign)]
    leased, waiting = AttemptState.LEASED, AttemptState.WAITING
    assert states == [leased, waiting, waiting, leased]
    queue.return_tasks("gateway-0")
    assert (named.state, foreign.state) == (waiting, leased)


async def test_a_task_that_agents_give_back_again_and_again_is_missing() -> None:
    queue = make_queue(FakeClock())
    await opened(queue, make_group(size=1))
    for reason in ("SESSION_EXPIRED", "DROPPED", "DROPPED", "ENVIRONMENT_DIED", "ENVIRONMENT_DIED"):
        (attempt,) = await queue.lease("gateway-0", 1, wait=0)
        queue.release(attempt.task_id, reason, again=True)
    assert (attempt.state, attempt.reason) == (AttemptState.MISSING, "ENVIRONMENT_DIED")


async def test_the_queue_tells_for_which_sessions_it_waits_and_what_ends_that(tmp_path: Path) -> None:
    clock = FakeClock()
    queue = make_queue(clock)
    servicer = make_servicer(tmp_path, queue, cast(Any, None))
    servicer._clock = clock
    await opened(queue, make_group(size=5))
    attempts = await queue.lease("gateway-0", 4, wait=0)
    request = pb.RenewTasksRequest(task_ids=[a.task_id for a in attempts[:3]], gateway="gateway-0")
    for idle, seconds in ((30, 480), (20, 470), (None, 600)):
        session = request.sessions.add(session_id=f"s{seconds}", turn_count=2)
        session.expires_in.FromSeconds(seconds)
        if idle:
            session.idle.FromSeconds(idle)
    await servicer.RenewTasks(request, cast(Any, None))
    assert queue.describe() == (
        "gateway-0: 2 sessions idle, they expire in 8:00 min, 1 session at work, "
        "1 task without a session, leased for 10 s; 1 task for which no agent asks"
    )
    assert queue.moved_at == clock.monotonic(), "turns have come"
    await clock.advance(5)
    await servicer.RenewTasks(request, cast(Any, None))
    assert queue.moved_at == clock.monotonic() - 5
    tasks = (await servicer.ListTasks(pb.ListTasksRequest(), cast(Any, None))).tasks
    found = [(t.gateway, t.session.session_id, t.session.idle.seconds, t.age.seconds) for t in tasks]
    assert found == [("gateway-0", name, idle, 5) for name, idle in (("s480", 30), ("s470", 20), ("s600", 0), ("", 0))]
    assert not tasks[2].session.HasField("idle") and not tasks[3].HasField("session")


def make_servicer(
    tmp_path: Path, queue: TaskQueue, keep: Callable[[Trajectory], Awaitable[None]]
) -> ExperienceServicer:
    servicer = ExperienceServicer()
    source = TaskSource(
        config=make_config(tmp_path, agents={"source": "tasks"}),
        run_id="0" * 32,
        queue=queue,
        experiences=cast(ExperienceStore, SimpleNamespace(keep=keep)),
        faults=FaultLog(),
        vocabulary_size=lambda: 258,
        newest_version=lambda: 3,
    )
    servicer.open(source)
    return servicer


async def put(servicer: ExperienceServicer, message: pb.Trajectory) -> tuple[int, str]:
    response = await servicer.PutTrajectories(pb.PutTrajectoriesRequest(trajectories=[message]), cast(Any, None))
    return response.results[0].code, response.results[0].reason


async def test_a_trajectory_of_another_run_with_the_same_task_id_is_not_taken(tmp_path: Path) -> None:
    """Runs count their prompts from 0: a gateway that kept the sessions of an earlier one has tasks of equal ids."""

    async def keep(trajectory: Trajectory) -> None:
        return

    clock = FakeClock()
    queue, group = make_queue(clock), make_group()
    collecting = await opened(queue, group)
    attempts = await queue.lease("gateway-0", 2, wait=0)
    servicer = make_servicer(tmp_path, queue, keep)
    messages = [trajectory(servicer._to_task(attempt)) for attempt in attempts]
    messages[0].lease, messages[1].lease = "of another run", attempts[1].lease
    assert await put(servicer, messages[0]) == (code_pb2.NOT_FOUND, "OTHER_LEASE")
    assert [attempt.state for attempt in attempts] == [AttemptState.LEASED] * 2 and not attempts[0].refused
    await clock.advance(11)
    queue.tick()
    await queue.lease("gateway-1", 2, wait=0)
    assert await put(servicer, messages[1]) == (code_pb2.OK, ""), "the first one is taken, also after its lease"
    messages[0].lease = attempts[0].lease
    assert await put(servicer, messages[0]) == (code_pb2.OK, "")
    await collecting


async def test_an_attempt_that_cannot_be_stored_does_not_keep_its_group_open(tmp_path: Path) -> None:
    async def keep(trajectory: Trajectory) -> None:
        raise Unavailable("the disk is full")

    clock = FakeClock()
    queue, group = make_queue(clock), make_group()
    collecting = await opened(queue, group)
    attempts = await queue.lease("gateway-0", 2, wait=0)
    servicer = make_servicer(tmp_path, queue, keep)
    message = trajectory(servicer._to_task(attempts[0]))
    assert await put(servicer, message) == (code_pb2.UNAVAILABLE, "UNAVAILABLE")
    assert attempts[0].state is AttemptState.LEASED, "its gateway may bring it again"
    await clock.advance(26)  # but it died
    queue.tick()
    await asyncio.wait_for(collecting, 1)


async def join(queue: TaskQueue, key: str = "k", attempt_id: str = "0" * 32) -> Attempt:
    problem = OwnProblem("agent", key, PROMPT, asyncio.get_running_loop().create_future())
    return await queue.join("gateway-0", attempt_id, problem)


async def test_an_own_group_whose_agents_left_before_it_opened_closes_at_its_deadline() -> None:
    clock = FakeClock()
    queue = make_queue(clock)
    offer = asyncio.create_task(queue.offer())
    await asyncio.sleep(0)
    joining = asyncio.create_task(join(queue))
    group = make_group()
    group.own = await offer
    joining.cancel()
    await asyncio.gather(joining, return_exceptions=True)
    collecting = await opened(queue, group)
    await clock.advance(24)
    queue.tick()
    assert not collecting.done()
    assert (await join(queue)).group is group, "an agent that returns finds it, and has the whole time"
    await clock.advance(24)
    queue.renew(["g-0"])
    queue.tick()
    assert not collecting.done()
    await clock.advance(2)
    queue.tick()
    await asyncio.wait_for(collecting, 1)


@pytest.mark.parametrize("again", [False, True])
async def test_an_own_group_that_opens_too_late_is_found_or_ends(monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    """With `again`, its agent has opened the key a second time by then."""
    monkeypatch.setattr(queue_module, "_OPENING_SECONDS", 0.01)
    queue, groups = make_queue(FakeClock()), [make_group("g"), make_group("h")]
    offers = [asyncio.create_task(queue.offer()) for _ in groups]
    await asyncio.sleep(0)
    for offer, group in zip(offers[: 1 + again], groups, strict=False):
        with pytest.raises(Unavailable, match="in time"):
            await join(queue)
        group.own = await offer
    late, second = groups
    if again:
        collecting = await opened(queue, second)
        assert (await join(queue)).group is second
        await asyncio.wait_for(await opened(queue, late), 1)
        assert {attempt.state for attempt in late.attempts} == {AttemptState.MISSING}
        assert (await join(queue, attempt_id="1" * 32)).group is second and not collecting.done()
    else:
        await opened(queue, late)
        assert (await join(queue)).group is late


async def test_agents_do_not_share_a_place_whose_lease_ended() -> None:
    clock = FakeClock()
    queue, group = make_queue(clock), make_group()
    offer = asyncio.create_task(queue.offer())
    await asyncio.sleep(0)
    joining = asyncio.create_task(join(queue))
    group.own = await offer
    await opened(queue, group)
    first = await joining
    await clock.advance(11)
    queue.tick()
    assert await join(queue, attempt_id="1" * 32) is first
    assert await join(queue) is not first


@pytest.mark.parametrize("reason", ["", "lower", "A" * 64, "NO SPACE", "X;Y"])
def test_reasons_are_checked(reason: str) -> None:
    with pytest.raises(InvalidInput, match="UPPER_SNAKE_CASE"):
        check_reason(reason)


def test_a_trajectory_that_no_micro_batch_holds_is_refused_where_the_loss_needs_it_whole(tmp_path: Path) -> None:
    """The trainer would refuse the whole batch, and a resumed run would send it again."""
    message = trajectory(TASK, version=3, segments=2)
    tokens = sum(len(segment.token_ids) // 4 for segment in message.segments)
    assert check_trajectory(message, group_id="t", rules=replace(RULES, max_total_tokens=tokens))
    with pytest.raises(InvalidInput, match=f"its 2 segments have {tokens} tokens, more than a micro-batch"):
        check_trajectory(message, group_id="t", rules=replace(RULES, max_total_tokens=tokens - 1))

    async def keep(trajectory: Trajectory) -> None:
        return

    servicer, limits = make_servicer(tmp_path, make_queue(FakeClock()), keep), []
    for kind in ("ppo", "gspo"):
        servicer._source = replace(servicer._run, config=make_config(tmp_path, algorithm={"loss": {"kind": kind}}))
        for evaluation in (False, True):
            (attempt, _) = make_group(evaluation=evaluation).attempts
            limits.append(servicer._rules(attempt).max_total_tokens)
    assert limits == [0, 0, servicer._run.config.batch.tokens_per_micro_batch, 0]


BAD: list[tuple[Callable[[pb.Trajectory], object], str]] = [
    (lambda m: m.ClearField("segments"), "0 segments; it must have 1 to 2"),
    (lambda m: m.segments.add(), "3 segments"),
    (lambda m: m.ClearField("reward"), "no reward"),
    (lambda m: setattr(m, "reward", float("nan")), "reward is nan"),
    (lambda m: setattr(m, "reward", 1e300), "finite float32"),
    (lambda m: setattr(m, "turn_count", 0), "turn_count is 0"),
    (lambda m: m.metrics.update({"a b": 1.0}), "metric 'a b'"),
    (lambda m: m.metrics.update({"x": float("inf")}), "metric 'x' is inf"),
    (lambda m: m.metrics.update({str(i): 0.0 for i in range(99)}), "metrics; it may have 64"),
    (lambda m: setattr(m.segments[1], "sample_id", "t-0"), "sample_id is 't-0'; it must be 't-0-seg1'"),
    (lambda m: setattr(m.segments[0], "group_id", "u"), "group_id is 'u'"),
    (lambda m: setattr(m.segments[1], "segment_index", 0), "segment_index is '0'"),
    (lambda m: setattr(m.segments[0], "segment_count", 5), "segment_count is '5'"),
    (lambda m: setattr(m.segments[0], "score", 1.0), "it has a score"),
    (lambda m: setattr(m.segments[0], "temperature", 0.5), "temperature 0.5"),
    (lambda m: setattr(m.segments[0], "top_k", 3), "top_k 3"),
    (lambda m: setattr(m.segments[1].version_spans[1], "policy_version", 4), "3 is the newest that was sent"),
    (lambda m: setattr(m.segments[0], "token_ids", b"\xff" * len(m.segments[0].token_ids)), "token id -1"),
    (lambda m: setattr(m.segments[0], "behavior_logprobs", b""), "behavior_logprobs"),
]


@pytest.mark.parametrize(("break_it", "text"), BAD)
def test_what_cannot_be_trained_on_is_refused(break_it: Callable[[pb.Trajectory], object], text: str) -> None:
    message = trajectory(TASK, version=3, segments=2)
    break_it(message)
    with pytest.raises(InvalidInput, match=text):
        check_trajectory(message, group_id="t", rules=RULES)


def test_a_segment_without_its_engine_is_refused() -> None:
    message = trajectory(TASK, version=3)
    message.segments[0].ClearField("behavior_logprobs")
    message.segments[0].ClearField("version_spans")
    with pytest.raises(InvalidInput, match="no behavior_logprobs and version_spans; send those of the engine"):
        check_trajectory(message, group_id="t", rules=replace(RULES, needs_reward=False))


def test_a_token_that_cannot_have_been_sampled_is_refused() -> None:
    message = trajectory(TASK, version=3)
    values = np.frombuffer(message.segments[0].behavior_logprobs, "<f4").copy()
    values[-1] = -np.inf
    message.segments[0].behavior_logprobs = values.tobytes()
    with pytest.raises(InvalidInput, match="-inf"):
        check_trajectory(message, group_id="t", rules=replace(RULES, needs_reward=False))
