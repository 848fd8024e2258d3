"""A gateway over gRPC with toy engines and a fake coordinator: sessions from their tasks to the run's store."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fourfold.agent.client import AsyncAgentClient
from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.agent.v1.agent_service_pb2_grpc import AgentServiceStub
from fourfold.contract import CONTRACT_VERSION
from fourfold.errors import (
    AlreadyExists,
    FourfoldError,
    InvalidInput,
    NotFound,
    Overloaded,
    PeerFault,
    PermissionDenied,
    StaleEpoch,
    Unauthenticated,
    Unavailable,
    WrongState,
)
from fourfold.rpc import channel as rpc
from fourfold.rpc.codec import read_ints
from fourfold.sample.wire import decode
from fourfold.tracing import spans
from fourfold_gateway import coordinator_link
from fourfold_gateway.store import StoredTurn, StoreFull
from tests.fakes.real_gateway import FakeRun, real_gateway, serve_run
from tests.fakes.stage import until
from tests.fakes.toy import START, VOCABULARY, make_config
from tests.fakes.toy_rollout import FakeRollout

OPEN, CLOSED, STORED, ABANDONED, EXPIRED, REFUSED = range(1, 7)


class Gateway:
    """One gateway process, in this one."""

    def __init__(self, root: Path, **changes: Any) -> None:
        self.config = make_config(root, **changes)
        self.root, self.run = root, FakeRun()
        self.engine = FakeRollout("rollout-0", self.config)
        self.engine.weights = 10**6
        self.run_target = ""
        self._running = AsyncExitStack()

    async def start_run(self, listen: str = "127.0.0.1:0") -> None:
        self.run_server, self.run_target = await serve_run(self.run, listen)

    async def start(self) -> None:
        folder, members = self.root / "gateway", {"rollout-0": self.engine.target}
        made = await self._running.enter_async_context(
            real_gateway(self.config, folder, run=self.run_target, members=members)
        )
        self.core, self.store, self.engines, self.channel = made.core, made.store, made.engines, made.channel
        self.stub: Any = AgentServiceStub(self.channel)

    async def stop(self) -> None:
        await self._running.aclose()

    async def call(self, name: str, request: Any) -> Any:
        return await rpc.call(getattr(self.stub, name), request, timeout=10, peer="gateway")

    async def open(self, session_id: str = "s", **fields: Any) -> pb.OpenSessionResponse:
        if not fields:
            task = (await self.call("NextTask", pb.NextTaskRequest())).task
            fields = {"task_id": task.task_id}
        response = await self.call("OpenSession", pb.OpenSessionRequest(session_id=session_id, **fields))
        assert isinstance(response, pb.OpenSessionResponse)
        return response

    async def turn(self, messages: list[pb.Message], session_id: str = "s", **fields: Any) -> list[pb.TurnChunk]:
        request = pb.GenerateRequest(session_id=session_id, chat=pb.Chat(messages=messages), **fields)
        return await self.generate(request)

    async def generate(self, request: pb.GenerateRequest) -> list[pb.TurnChunk]:
        stream = rpc.stream(self.stub.Generate, request, timeout=10, peer="gateway")
        return [chunk async for response in stream for chunk in response.chunks]

    async def close(self, session_id: str = "s", **fields: Any) -> pb.Session:
        response = await self.call("CloseSession", pb.CloseSessionRequest(session_id=session_id, **fields))
        assert isinstance(response.session, pb.Session)
        return response.session

    async def state(self, session_id: str = "s") -> int:
        response = await self.call("ExportSession", pb.ExportSessionRequest(session_id=session_id))
        return int(response.session.state)


USER = pb.Message(role="user", content="3 * 4 =")


@asynccontextmanager
async def running_gateway(folder: Path, **changes: Any) -> AsyncIterator[Gateway]:
    """Run a gateway with its run and one engine within the block; `changes` are those of the recipe."""
    gateway = Gateway(folder, **changes)
    await gateway.start_run()
    await gateway.engine.start()
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()
        await gateway.run_server.stop(0)
        await gateway.engine.kill()


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path) as gateway:
        yield gateway


async def test_three_turns_by_messages_are_one_segment_in_the_runs_store(gateway: Gateway) -> None:
    opened = await gateway.open()
    assert (opened.session.state, opened.session.task_id) == (OPEN, "t0")
    messages = [USER]
    for _ in range(3):
        (chunk,) = await gateway.turn(messages)
        assert (chunk.message.content, chunk.text, chunk.finish_reason) == ("12", "12", pb.FINISH_REASON_STOP)
        messages += [chunk.message, USER]
    closed = await gateway.close(reward=1.0, metrics={"calls": 3.0})
    assert closed.state in (CLOSED, STORED)
    await until(lambda: "t0" in gateway.run.stored)
    trajectory = gateway.run.stored["t0"]
    assert (trajectory.reward, trajectory.turn_count, dict(trajectory.metrics)) == (1.0, 3, {"calls": 3.0})
    (segment,) = trajectory.segments
    sample = decode(segment, vocabulary_size=VOCABULARY, max_tokens=64)
    assert (sample.sample_id, sample.group_id, sample.temperature) == ("t0", "g", 0.5)
    assert sample.action_mask.sum() == 9
    prompts = [list(r.prompt_token_ids) for r in gateway.engine.requests]
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(prompts))
    assert sample.token_ids.tolist()[: len(prompts[-1])] == prompts[-1]
    params = gateway.engine.requests[0].sampling_params
    assert (params.temperature, params.max_tokens, [*params.stop_token_ids]) == (0.5, 6, [7]), "those of the run"
    await until(lambda: not gateway.core.sessions.live)
    assert await gateway.state() == STORED


async def test_a_turn_in_the_trace_of_an_agent_goes_on_to_the_engine(gateway: Gateway, ended: list[spans.Span]) -> None:
    await gateway.open()
    with spans.Spans({0: spans.Span("turn", None)}):
        await gateway.turn([USER])
    by_name = {span.name: span for span in ended}
    at_gateway = by_name["fourfold.agent.v1.AgentService/Generate"]
    at_engine = by_name["fourfold.rollout.v1.RolloutService/Generate"]
    assert at_gateway.parent == by_name["turn"].context and at_engine.parent == at_gateway.context


async def test_the_client_attempts_a_task(gateway: Gateway) -> None:
    client = AsyncAgentClient(gateway.channel)
    task = await client.next_task()
    assert task is not None and (await client.get_quota()).open_session_count == 0
    await client.open_session("c", task_id=task.task_id)
    reply = await client.chat("c", task.messages, request_id="1")
    assert reply.content == "12"
    await client.close_session("c", reward=0.5, turn_rewards={0: 0.25}, metrics={"calls": 1.0})
    states = [session.state async for session in client.watch_session("c")]
    assert states[-1] == STORED and gateway.run.stored["t0"].reward == 0.5
    exported = await client.export_session("c")
    assert exported.turns[0].message == reply
    await client.open_session("d", own_group=pb.OwnGroup(key="k"))
    assert (await client.abandon_session("d", "NO_IDEA")).state == ABANDONED


async def test_turns_by_ids_continue_a_segment(gateway: Gateway) -> None:
    await gateway.open()
    ids = [*gateway.core._tokenizer.encode("3 * 4 ="), START]
    for _ in range(2):
        (chunk,) = await gateway.generate(pb.GenerateRequest(session_id="s", token_ids=pb.TokenIds(ids=ids)))
        ids += [*read_ints(chunk.token_ids).tolist(), START]
    exported = await gateway.call("ExportSession", pb.ExportSessionRequest(session_id="s"))
    assert (len(exported.segments), len(exported.turns), exported.session.segment_count) == (1, 2, 1)


async def test_a_repeated_request_gets_the_stored_turn_and_another_one_is_refused(gateway: Gateway) -> None:
    await gateway.open()
    (first,) = await gateway.turn([USER], request_id="r")
    (again,) = await gateway.turn([USER], request_id="r")
    assert again == first and len(gateway.engine.requests) == 1
    with pytest.raises(StaleEpoch, match="another turn"):
        await gateway.turn([USER, USER], request_id="r")


async def test_repeated_open_and_close_calls_are_the_same_and_others_are_refused(gateway: Gateway) -> None:
    opened = await gateway.open()
    again = await gateway.open(task_id="t0")
    assert (again.session_key, again.session.task_id) == (opened.session_key, "t0")
    with pytest.raises(AlreadyExists):
        await gateway.open(task_id="t1")
    with pytest.raises(NotFound, match="NextTask"):
        await gateway.open("other", task_id="t9")
    with pytest.raises(WrongState, match="no finished turn"):
        await gateway.close(reward=1.0)
    await gateway.turn([USER])
    await gateway.close(reward=1.0)
    await until(lambda: not gateway.core.sessions.live)
    assert (await gateway.close(reward=1.0)).state == STORED
    with pytest.raises(AlreadyExists, match="another outcome"):
        await gateway.close(reward=0.0)
    with pytest.raises(WrongState, match="STORED"):
        await gateway.turn([USER])


async def test_a_session_key_is_stored_as_digest_and_allows_its_session_alone(gateway: Gateway) -> None:
    key = (await gateway.open()).session_key
    stored = await gateway.store.load_session("s")
    assert stored is not None and stored.key_digest == hashlib.sha256(key.encode()).digest()
    caller = gateway.core.check_key(key, "Generate")
    assert caller.session_id == "s"
    await gateway.open("other", own_group=pb.OwnGroup(key="k"))
    with pytest.raises(PermissionDenied, match="alone"):
        await gateway.core.export_session(caller, pb.ExportSessionRequest(session_id="other"))
    with pytest.raises(PermissionDenied):
        gateway.core.check_key(key, "NextTask")
    with pytest.raises(Unauthenticated):
        gateway.core.check_key(key + "x", "Generate")


@pytest.mark.parametrize(("reason", "again"), [("TOOL_BROKE", False), ("ENVIRONMENT_DIED", True)])
async def test_an_abandoned_session_releases_its_task(gateway: Gateway, reason: str, again: bool) -> None:
    gateway.run.leases["t0"] = "mine"
    await gateway.open()
    assert (await gateway.close(abandon_reason=reason)).state == ABANDONED
    assert gateway.run.released == [("t0", reason, again)] and gateway.run.released_leases == ["mine"]
    assert gateway.run.stored == {}


async def test_a_gateway_that_begins_names_its_tasks_before_it_takes_others(gateway: Gateway) -> None:
    first = gateway.run.renewed[0]
    assert (first.gateway, first.all, list(first.task_ids)) == ("gateway-0", True, []), "it has none"
    await gateway.open()
    await gateway.turn([pb.Message(role="user", content="3 * 4 =")])
    await gateway.stop()
    gateway.run.renewed.clear()
    gateway.run.agents.clear()
    await gateway.start()
    await gateway.call("NextTask", pb.NextTaskRequest(incarnation="a" * 32))
    first = gateway.run.renewed[0]
    assert (first.gateway, first.all, list(first.task_ids)) == ("gateway-0", True, ["t0"])
    (session,) = first.sessions
    assert (session.session_id, session.turn_count) == ("s", 1)
    assert session.HasField("idle") and 590 < session.expires_in.seconds <= 600
    assert gateway.run.agents == ["a" * 32]


async def test_an_idle_session_expires_and_its_task_is_leased_again(gateway: Gateway) -> None:
    task = (await gateway.call("NextTask", pb.NextTaskRequest())).task
    request = pb.OpenSessionRequest(session_id="s", task_id=task.task_id)
    request.idle_timeout.FromSeconds(1)
    await gateway.call("OpenSession", request)
    watch = rpc.stream(gateway.stub.WatchSession, pb.WatchSessionRequest(session_id="s"), timeout=10, peer="gateway")
    assert [(r.session.state, r.session.reason) async for r in watch] == [(OPEN, ""), (EXPIRED, "IDLE")]
    await until(lambda: gateway.run.released == [("t0", "SESSION_EXPIRED", True)])
    with pytest.raises(WrongState, match="EXPIRED"):
        await gateway.close(reward=1.0)


@pytest.mark.parametrize("messages", ["[", "3", "[3]"])
async def test_a_malformed_task_is_a_fault_of_the_coordinator(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, messages: str
) -> None:
    task = gateway.run._task("t0")
    task.messages_json = messages
    monkeypatch.setattr(gateway.run, "_task", lambda _: task)
    link = gateway.core.link
    assert link is not None
    with pytest.raises(PeerFault, match="messages_json"):
        await link.lease(0.0)


async def test_a_cancelled_turn_does_not_belong_to_the_session(gateway: Gateway) -> None:
    await gateway.open()
    began = asyncio.Event()

    async def hang() -> None:
        began.set()
        await asyncio.sleep(30)

    gateway.engine.on_generate = hang
    task = asyncio.create_task(gateway.turn([USER]))
    await asyncio.wait_for(began.wait(), 5)
    with pytest.raises(WrongState, match="in flight"):
        await gateway.close(reward=1.0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    gateway.engine.on_generate = None
    (session,) = gateway.core.sessions.live
    await until(lambda: session.turns_in_flight == 0)
    assert session.trajectory.turn_count == 0
    await gateway.turn([USER], sample_count=8)  # each may open one of 8 segments, if the cancelled turn counts no more


async def test_a_repeated_turn_has_the_version_of_each_token(gateway: Gateway) -> None:
    await gateway.open()

    async def update() -> None:
        gateway.engine.version += 1

    gateway.engine.on_partial = update
    first = await gateway.turn([USER], request_id="r")
    again = await gateway.turn([USER], request_id="r")
    given = [
        [(token, c.policy_version) for c in chunks for token in read_ints(c.token_ids)] for chunks in (first, again)
    ]
    assert given[0] == given[1] and [version for _, version in given[0]] == [0, 1, 1]
    assert (again[-1].message, again[-1].finish_reason) == (first[-1].message, first[-1].finish_reason)


async def test_a_turn_whose_agent_leaves_while_it_is_stored_is_stored_whole(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    await gateway.open()
    began, go_on, real = asyncio.Event(), asyncio.Event(), gateway.store.add_turns

    async def add_turns(session_id: str, turns: list[StoredTurn]) -> None:
        began.set()
        await go_on.wait()
        await real(session_id, turns)

    monkeypatch.setattr(gateway.store, "add_turns", add_turns)
    task = asyncio.create_task(gateway.turn([USER], request_id="r", sample_count=2))
    await asyncio.wait_for(began.wait(), 5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    with pytest.raises(WrongState, match="in flight"):
        await gateway.close(reward=1.0)
    repeated = asyncio.create_task(gateway.turn([USER], request_id="r", sample_count=2))
    go_on.set()
    assert {chunk.sample_index for chunk in await repeated} == {0, 1} and len(gateway.engine.requests) == 1
    assert len(await gateway.store.load_turns("s")) == 2


async def test_a_turn_that_cannot_be_stored_does_not_belong_to_the_session(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    await gateway.open()
    (first,) = await gateway.turn([USER], request_id="1")
    messages = [USER, first.message, USER]

    async def fail(session_id: str, turns: list[StoredTurn]) -> None:
        raise StoreFull("the disk is full", retry_after=1.0)

    with monkeypatch.context() as patch:
        patch.setattr(gateway.store, "add_turns", fail)
        with pytest.raises(Unavailable, match="full"):
            await gateway.turn(messages, request_id="2")
    (session,) = gateway.core.sessions.live
    assert session.trajectory.turn_count == 1
    (second,) = await gateway.turn(messages, request_id="2")
    await gateway.turn([*messages, second.message, USER], request_id="3")
    await gateway.stop()
    await gateway.start()
    await gateway.close(reward=1.0)
    await until(lambda: "t0" in gateway.run.stored)
    (segment,) = gateway.run.stored["t0"].segments
    assert decode(segment, vocabulary_size=VOCABULARY, max_tokens=64).action_mask.sum() == 9


async def test_a_stop_string_ends_the_turn_with_the_token_that_completes_it(gateway: Gateway) -> None:
    await gateway.open()
    params = pb.SamplingParams(stop=["2"])
    chunks = await gateway.turn([USER], sampling_params=params, sample_count=2)
    assert [(c.text, len(c.token_ids) // 4, c.finish_reason) for c in chunks] == [("1", 2, 1)] * 2
    session = gateway.core.sessions.live[0]
    assert (session.trajectory.turn_count, len(session.trajectory.segments)) == (2, 2)


async def test_trajectories_wait_for_a_coordinator_that_restarts(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_link, "_MAX_RETRY_SECONDS", 0.2)
    await gateway.open()
    await gateway.turn([USER])
    await gateway.run_server.stop(0)
    assert (await gateway.close(reward=1.0)).state == CLOSED
    await gateway.start_run(gateway.run_target)
    await until(lambda: "t0" in gateway.run.stored, 20)
    await gateway.open("u")
    await gateway.turn([USER], "u")
    gateway.run.refusal = "UNKNOWN_TASK"
    await gateway.close("u", reward=1.0)
    await until(lambda: gateway.core.sessions.ended["REFUSED_UNKNOWN_TASK"] == 1)
    assert await gateway.state("u") == REFUSED


async def test_sessions_survive_a_restart_of_the_gateway(gateway: Gateway) -> None:
    gateway.run.leases["t0"] = "mine"
    key = (await gateway.open()).session_key
    (first,) = await gateway.turn([USER], request_id="r")
    await gateway.stop()
    await gateway.start()
    assert gateway.core.check_key(key, "Generate").session_id == "s"
    assert await gateway.turn([USER], request_id="r") == [first]
    (second,) = await gateway.turn([USER, first.message, USER])
    assert second.text == "12"
    await gateway.close(reward=1.0)
    await until(lambda: "t0" in gateway.run.stored)
    stored = gateway.run.stored["t0"]
    assert len(stored.segments) == 1 and stored.lease == "mine"


async def test_a_session_without_a_task_can_be_exported_and_is_not_sent(gateway: Gateway) -> None:
    await gateway.call("OpenSession", pb.OpenSessionRequest(session_id="s"))
    (chunk,) = await gateway.turn([USER], sampling_params=pb.SamplingParams(temperature=0.7))
    assert gateway.engine.requests[0].sampling_params.temperature == pytest.approx(0.7)
    assert (await gateway.close(reward=1.0)).state == CLOSED
    exported = await gateway.call("ExportSession", pb.ExportSessionRequest(session_id="s"))
    assert (len(exported.segments), exported.turns[0].message) == (1, chunk.message)
    assert await gateway.store.read_outbox() == []


async def test_open_sessions_are_limited_and_the_quota_tells(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, gateway={"max_open_sessions_per_agent": 1}) as gateway:
        await gateway.open()
        with pytest.raises(Overloaded) as caught:
            await gateway.open("other", own_group=pb.OwnGroup(key="k"))
        assert caught.value.retry_after
        quota = await gateway.call("GetQuota", pb.GetQuotaRequest())
        assert (quota.max_open_sessions, quota.open_session_count) == (1, 1)
        await gateway.close(abandon_reason="DONE")
        await gateway.open("other", own_group=pb.OwnGroup(key="k"))
        assert gateway.run.joined[0].key == "k"


async def test_sessions_without_a_task_take_no_room_of_the_run(tmp_path: Path) -> None:
    limits = {"max_open_sessions": 2, "max_open_sessions_per_agent": 2}
    async with running_gateway(tmp_path, gateway=limits) as gateway:
        for name in ("a", "b"):
            await gateway.call("OpenSession", pb.OpenSessionRequest(session_id=name))
        with pytest.raises(Overloaded, match="2 sessions without a task"):
            await gateway.call("OpenSession", pb.OpenSessionRequest(session_id="c"))
        await gateway.open()
        await gateway.open("s2")
        with pytest.raises(Overloaded, match="2 sessions of the run's tasks and groups"):
            await gateway.call("NextTask", pb.NextTaskRequest())
        quota = await gateway.call("GetQuota", pb.GetQuotaRequest())
        assert quota.open_session_count == 2


async def test_text_and_templates_need_no_session(gateway: Gateway) -> None:
    info = await gateway.call("GetInfo", pb.GetInfoRequest())
    assert (info.training, info.run_name, info.contract_version) == (True, "toy", CONTRACT_VERSION)
    tokens = await gateway.call("Tokenize", pb.TokenizeRequest(text="3 * 4 ="))
    text = await gateway.call("Detokenize", pb.DetokenizeRequest(token_ids=tokens.token_ids))
    assert text.text == "3 * 4 ="
    rendered = await gateway.call("ApplyChatTemplate", pb.ApplyChatTemplateRequest(chat=pb.Chat(messages=[USER])))
    assert rendered.text.endswith("<|start|>") and rendered.token_ids[-1] == START
    (chunk,) = await gateway.turn([USER], "")
    assert chunk.message.content == "12" and chunk.prompt_token_count == len(rendered.token_ids)
    with pytest.raises(FourfoldError, match="vocabulary"):
        await gateway.call("Detokenize", pb.DetokenizeRequest(token_ids=[VOCABULARY]))
    with pytest.raises(InvalidInput, match=r"token_ids has 64 tokens; it must have 2 to 63"):
        await gateway.call("ScoreTokens", pb.ScoreTokensRequest(token_ids=[1] * 64))
