"""A gateway whose agents leave at bad moments, and whose run gives its tasks to others."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import pytest

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.coordinator.v1 import experience_service_pb2 as experience
from fourfold.errors import (
    DeadlinePassed,
    InvalidInput,
    NotFound,
    PeerFault,
    StaleEpoch,
    Unavailable,
    WrongState,
)
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.security.principal import LOCAL_AGENT
from fourfold_gateway import coordinator_link, core, sessions
from fourfold_gateway.api import Caller
from fourfold_gateway.store import StoredSession
from tests.contract.test_gateway import USER, Gateway, running_gateway
from tests.fakes.stage import until
from tests.fakes.toy_rollout import FakeRollout


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path) as gateway:
        yield gateway


async def lease(gateway: Gateway) -> pb.Task:
    task: pb.Task = (await gateway.call("NextTask", pb.NextTaskRequest())).task
    return task


# -- agents that leave ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["agent leaves", "disk is late"])
async def test_a_session_whose_opening_was_interrupted_is_found_with_its_key(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    request = pb.OpenSessionRequest(session_id="s", task_id=(await lease(gateway)).task_id)
    began, go_on, real = asyncio.Event(), asyncio.Event(), gateway.store.put_session

    async def put_session(stored: StoredSession) -> None:
        began.set()
        await go_on.wait()
        await real(stored)
        if fault == "disk is late":
            raise DeadlinePassed("the store did not finish")

    with monkeypatch.context() as patch:
        patch.setattr(gateway.store, "put_session", put_session)
        opening = asyncio.create_task(gateway.call("OpenSession", request))
        await asyncio.wait_for(began.wait(), 5)
        if fault == "agent leaves":
            opening.cancel()
        go_on.set()
        await asyncio.gather(opening, return_exceptions=True)
        await until(lambda: gateway.core.sessions.live)
    again = await gateway.call("OpenSession", request)
    assert gateway.core.check_key(again.session_key, "Generate").session_id == "s"
    await gateway.turn([USER])
    await gateway.close(reward=1.0)
    await until(lambda: "t0" in gateway.run.stored)


async def test_an_opening_that_failed_leaves_the_task_to_the_next(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = pb.OpenSessionRequest(session_id="s", task_id=(await lease(gateway)).task_id)

    async def put_session(stored: StoredSession) -> None:
        raise Unavailable("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(gateway.store, "put_session", put_session)
        with pytest.raises(Unavailable, match="full"):
            await gateway.call("OpenSession", request)
    assert gateway.core.sessions.live == []
    assert (await gateway.call("OpenSession", request)).session_key


async def test_one_session_opens_for_a_task(gateway: Gateway) -> None:
    task = await lease(gateway)
    calls = [
        gateway.core.open_session(Caller(LOCAL_AGENT), pb.OpenSessionRequest(session_id=n, task_id=task.task_id))
        for n in "ab"
    ]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(outcome, NotFound) for outcome in outcomes] == [False, True]


async def test_a_repeated_turn_whose_agent_leaves_does_not_end_the_first_one(gateway: Gateway) -> None:
    await gateway.open()
    began, go_on = asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        began.set()
        await go_on.wait()

    gateway.engine.on_generate = hang
    first = asyncio.create_task(gateway.turn([USER], request_id="r"))
    await asyncio.wait_for(began.wait(), 5)
    (session,) = gateway.core.sessions.live
    second = asyncio.create_task(gateway.turn([USER], request_id="r"))
    await until(lambda: session.turns_in_flight == 2)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    await until(lambda: session.turns_in_flight == 1)
    third = asyncio.create_task(gateway.turn([USER], request_id="r"))
    await until(lambda: session.turns_in_flight == 2)
    go_on.set()
    assert await first == await third
    assert len(gateway.engine.requests) == 1 and session.trajectory.turn_count == 1
    assert not session.running


async def test_a_turn_without_a_session_holds_its_quota_until_its_engine_call_has_ended(gateway: Gateway) -> None:
    async def hang() -> None:
        await asyncio.sleep(30)

    gateway.engine.on_partial = hang
    request = pb.GenerateRequest(chat=pb.Chat(messages=[USER]))
    request.flush_interval.FromMilliseconds(1)
    (engine,) = gateway.engines.usable
    async with aclosing(gateway.core.generate(Caller(LOCAL_AGENT), request, timeout=10)) as chunks:
        await anext(chunks)
        assert engine.in_flight == 1
    assert engine.in_flight == 0


@pytest.mark.parametrize("fault", ["agent leaves", "disk is late"])
@pytest.mark.parametrize("outcome", [{"reward": 1.0}, {"abandon_reason": "DONE"}])
async def test_a_session_whose_closing_was_interrupted_is_closed_once(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, outcome: dict[str, Any], fault: str
) -> None:
    await gateway.open()
    await gateway.turn([USER])
    name = "close_session" if "reward" in outcome else "settle"
    began, go_on, real = asyncio.Event(), asyncio.Event(), getattr(gateway.store, name)

    async def change(*arguments: Any) -> None:
        work = asyncio.ensure_future(real(*arguments))  # the store goes on
        began.set()
        await go_on.wait()
        await work
        if fault == "disk is late":
            raise DeadlinePassed("the store did not finish")

    monkeypatch.setattr(gateway.run, "refuses_all", True)
    with monkeypatch.context() as patch:
        patch.setattr(gateway.store, name, change)
        ending = asyncio.create_task(gateway.close(**outcome))
        await asyncio.wait_for(began.wait(), 5)
        if fault == "agent leaves":
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)
        go_on.set()
        await asyncio.gather(ending, return_exceptions=True)
    again = await gateway.close(**outcome)
    gateway.run.refuses_all = False
    assert again.state == (2 if "reward" in outcome else 4)
    if "reward" in outcome:
        await until(lambda: "t0" in gateway.run.stored, 20)
    await until(lambda: not gateway.core.sessions.live, 20)
    assert gateway.core.sessions.open_count("local") == 0


async def test_a_turn_that_begins_while_its_session_closes_is_refused(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be reported as a turn of the session, and be missing in the trajectory."""
    await gateway.open()
    await gateway.turn([USER])
    began, go_on, real = asyncio.Event(), asyncio.Event(), gateway.store.close_session

    async def close_session(stored: StoredSession, trajectory: bytes) -> None:
        began.set()
        await go_on.wait()
        await real(stored, trajectory)

    monkeypatch.setattr(gateway.store, "close_session", close_session)
    closing = asyncio.create_task(gateway.close(reward=1.0))
    await asyncio.wait_for(began.wait(), 5)
    with pytest.raises(WrongState, match="being closed"):
        await gateway.turn([USER])
    go_on.set()
    await closing
    await until(lambda: "t0" in gateway.run.stored)


@pytest.mark.parametrize("prompt", ["chat", "text"])
async def test_a_repeated_turn_has_its_text_without_the_stop_string(gateway: Gateway, prompt: str) -> None:
    await gateway.open()
    fields: dict[str, Any] = {"chat": pb.Chat(messages=[USER])} if prompt == "chat" else {"text": "3 * 4 =<|start|>"}
    params = pb.SamplingParams(stop=["2"])
    request = pb.GenerateRequest(session_id="s", request_id="r", sampling_params=params, sample_count=2, **fields)
    first = await gateway.generate(request)
    assert await gateway.generate(request) == first and {chunk.text for chunk in first} == {"1"}


# -- leases -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_task_that_was_leased_again_belongs_to_its_newest_session(gateway: Gateway) -> None:
    """The gateway was cut off for longer than a lease, and then got the same task for another agent."""
    gateway.run.leases["t0"] = "old"
    await gateway.open("a")
    gateway.run.tasks.insert(0, "t0")
    gateway.run.leases["t0"] = "new"
    await gateway.open("b")
    await until(lambda: gateway.core.sessions.ended["EXPIRED_TASK_GONE"] == 1, 15)
    assert await gateway.state("a") == 5 and await gateway.state("b") == 1
    await gateway.turn([USER], "b")
    await gateway.close("b", reward=1.0)
    await until(lambda: "t0" in gateway.run.stored)
    assert gateway.run.stored["t0"].lease == "new" and gateway.run.released == []


def test_renewals_have_every_lease_once_and_a_task_once_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_link, "_MAX_RENEWALS", 2)
    link = coordinator_link.CoordinatorLink.__new__(coordinator_link.CoordinatorLink)
    link._tracked = {("a", "1"), ("a", "2"), ("b", "1"), ("c", "1"), ("d", "")}
    calls = list(link._renewals())
    assert sorted(pair for call in calls for pair in call.items()) == sorted(link._tracked)
    assert all(len(call) <= 2 for call in calls)


async def test_agents_that_wait_for_tasks_leave_room_for_renewals(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator limits the calls of a gateway."""
    link = gateway.core.link
    assert link is not None
    await gateway.open()
    monkeypatch.setattr(link, "_lease_calls", asyncio.Semaphore(2))
    waiting, most, give = 0, 0, asyncio.Event()

    async def wait(seconds: float) -> bool:
        nonlocal waiting, most
        waiting, most = waiting + 1, max(most, waiting + 1)
        try:
            async with asyncio.timeout(seconds):
                return await give.wait()
        except TimeoutError:
            return False
        finally:
            waiting -= 1

    gateway.run.on_lease = wait
    began = asyncio.get_running_loop().time()
    assert await asyncio.gather(*(link.lease(0.3) for _ in range(20))) == [None] * 20
    assert asyncio.get_running_loop().time() - began < 2 and most == 2
    leasing = [asyncio.create_task(link.lease(5.0)) for _ in range(4)]
    await until(lambda: waiting == 2)
    give.set()
    tasks = await asyncio.gather(*leasing)
    assert {task.task_id for task in tasks if task} == {"t1", "t2", "t3", "t4"} and most == 2


# -- what the run would refuse ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"metrics": {"a b": 1.0}}, "metric 'a b': a name has"),
        ({"metrics": {"": 1.0}}, "metric '': a name has"),
        ({"metrics": {"a": float("nan")}}, "metric 'a' is nan; it must be a finite number"),
        ({"reward": float("inf")}, "reward is inf; it must be a finite number"),
        ({"reward": 1e300}, "reward is 1e.300; it must be a float32, at most 3.403e.38"),
        ({"turn_rewards": [pb.TurnReward(turn_index=3, reward=float("nan"))]}, "the reward of turn 3 is nan"),
    ],
)
async def test_an_outcome_that_the_run_would_refuse_is_refused_at_once(
    gateway: Gateway, fields: dict[str, Any], text: str
) -> None:
    """Otherwise the whole trajectory would be lost, as a fault of the gateway."""
    await gateway.open()
    await gateway.turn([USER])
    with pytest.raises(InvalidInput, match=text):
        await gateway.close(**{"reward": 1.0} | fields)
    await gateway.close(reward=1.0, metrics={"tools/calls_1.2": 1.0})


async def test_a_trajectory_that_is_too_large_is_refused_and_holds_nothing_up(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    await gateway.open("a")
    await gateway.turn([USER], "a")
    with monkeypatch.context() as patch:
        patch.setattr(core, "MAX_TRAJECTORY_BYTES", 100)
        with pytest.raises(WrongState, match="abandon the session"):
            await gateway.close("a", reward=1.0)
    await gateway.close("a", reward=1.0)
    await until(lambda: "t0" in gateway.run.stored)
    await gateway.open("b")
    await gateway.turn([USER], "b")
    monkeypatch.setattr(coordinator_link, "MAX_TRAJECTORY_BYTES", 400)  # it is in the outbox already
    await gateway.close("b", reward=1.0, metrics={f"m{i}": 1.0 for i in range(60)})
    await gateway.open("c")
    await gateway.turn([USER], "c")
    await gateway.close("c", reward=1.0)
    await until(lambda: "t2" in gateway.run.stored)
    assert gateway.core.sessions.ended["REFUSED_TRAJECTORY_TOO_LARGE"] == 1 and "t1" not in gateway.run.stored


# -- peers ------------------------------------------------------------------------------------------------------------


async def test_an_odd_error_of_an_engine_is_none_of_the_session(gateway: Gateway) -> None:
    await gateway.open()

    async def fail() -> None:
        raise StaleEpoch("what?")

    gateway.engine.on_generate = fail
    with pytest.raises(Unavailable, match="no engine finished the call"):
        await gateway.turn([USER], request_id="r")


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": float("nan")},
        {"temperature": 0.0},
        {"max_new_tokens": -5},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": range(65)},
    ],
)
async def test_a_wrong_description_of_the_run_is_a_fault_of_the_coordinator(
    gateway: Gateway, fields: dict[str, Any]
) -> None:
    link = gateway.core.link
    assert link is not None
    good: dict[str, Any] = {"run_name": "toy", "temperature": 0.5, "max_new_tokens": 6}
    with pytest.raises(PeerFault, match="coordinator"):
        link._checked_info(experience.GetRunInfoResponse(**good | fields))


async def test_a_description_that_is_refused_again_and_again_is_one_warning(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    link, tries = gateway.core.link, 0
    assert link is not None

    async def wrong(*_arguments: Any) -> experience.GetRunInfoResponse:
        nonlocal tries
        tries += 1
        return experience.GetRunInfoResponse(temperature=0.5, max_new_tokens=6, stop_token_ids=range(65))

    monkeypatch.setattr(link, "_call", wrong)
    monkeypatch.setattr(coordinator_link, "_RETRY_SECONDS", 0.01)
    refreshing = asyncio.create_task(link._refresh_info())
    await until(lambda: tries > 2)
    refreshing.cancel()
    found = [record for record in caplog.records if "no task can begin" in record.message]
    assert [record.levelname for record in found] == ["WARNING"]
    assert "65 stop_token_ids" in found[0].message


# -- state ------------------------------------------------------------------------------------------------------------


async def test_a_session_whose_turns_are_damaged_ends_alone(gateway: Gateway) -> None:
    for name in "ab":
        await gateway.open(name)
        (first,) = await gateway.turn([USER], name)
        await gateway.turn([USER, first.message, USER], name)
    await gateway.stop()
    with closing(sqlite3.connect(gateway.root / "gateway" / "sessions.sqlite")) as db:
        db.execute("DELETE FROM turns WHERE session_id = 'a' AND number = 0")
        db.commit()
    await gateway.start()
    assert [session.session_id for session in gateway.core.sessions.live] == ["b"]
    assert gateway.core.sessions.ended == {"EXPIRED_DAMAGED": 1}
    await gateway.close("b", reward=1.0)
    await until(lambda: "t1" in gateway.run.stored)


async def test_reasons_that_agents_invent_are_counted_together(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_MAX_ENDINGS", 2)
    for number in range(4):
        await gateway.call("OpenSession", pb.OpenSessionRequest(session_id=f"s{number}"))
        await gateway.close(f"s{number}", abandon_reason=f"REASON_{number}")
    assert gateway.core.sessions.ended == {"ABANDONED_REASON_0": 1, "ABANDONED_REASON_1": 1, "ABANDONED_OTHER": 2}


async def test_all_old_sessions_are_pruned_at_once(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_PRUNE_COUNT", 2)
    monkeypatch.setattr(sessions, "_KEEP_SECONDS", -1.0)
    for number in range(5):
        await gateway.call("OpenSession", pb.OpenSessionRequest(session_id=f"s{number}"))
        await gateway.close(f"s{number}", abandon_reason="DONE")
    await gateway.core.sessions.prune()
    assert [await gateway.store.load_session(f"s{number}") for number in range(5)] == [None] * 5


@pytest.mark.parametrize("hostile", ["", "../s", "a/b", "a b", "s\n", "s\x00", "\u00e9", "x" * 129, "s;drop"])
async def test_ids_of_agents_that_are_no_ids_are_refused(gateway: Gateway, hostile: str) -> None:
    """They are in URLs, in the names of samples, and in log lines."""
    for request in (
        pb.OpenSessionRequest(session_id=hostile),
        pb.OpenSessionRequest(session_id="s", own_group=pb.OwnGroup(key=hostile)),
    ):
        with pytest.raises(InvalidInput, match="must be 1 to 128 characters"):
            await gateway.call("OpenSession", request)
    assert not gateway.core.sessions.live and not gateway.run.joined
    await gateway.open("s", own_group=pb.OwnGroup(key="k"))
    if hostile:
        with pytest.raises(InvalidInput, match="request_id is"):
            await gateway.turn([USER], request_id=hostile)
        with pytest.raises(NotFound):
            await gateway.turn([USER], hostile)
    assert not gateway.engine.requests


async def test_reasoning_is_parsed_without_tools_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[tuple[str, str]] = []

    async def parse(_: Any, request: Any, context: Any) -> rollout.ParseCompletionResponse:
        parsed.append((request.text, request.tools_json))
        return rollout.ParseCompletionResponse(content="2", reasoning="1")

    monkeypatch.setattr(FakeRollout, "ParseCompletion", parse)
    async with running_gateway(tmp_path) as gateway:
        await gateway.open()
        (info,) = (engine.info for engine in gateway.engines.usable)
        assert info is not None
        (plain,) = await gateway.turn([USER])
        info.reasoning_parser = "deepseek_r1"
        (chunk,) = await gateway.turn([USER])
    assert (plain.message.content, plain.message.reasoning) == ("12", "")
    assert (chunk.message.content, chunk.message.reasoning) == ("2", "1")
    assert [text for text, _ in parsed] == ["12"]
