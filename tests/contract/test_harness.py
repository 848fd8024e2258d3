"""The server and the clients against each other on loopback: errors, deadlines, cancellation, health, limits."""

from __future__ import annotations

import asyncio
import importlib
import logging
import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fourfold import errors
from fourfold.channel import CLIENT_OPTIONS, RETRIED_METHODS, SERVER_OPTIONS, open_channel
from fourfold.reference.client import ReferenceClient
from fourfold.reference.v1 import reference_service_pb2 as reference
from fourfold.reference.v1 import reference_service_pb2_grpc as reference_grpc
from fourfold.reward.client import RewardClient
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.reward.v1 import reward_service_pb2_grpc as reward_grpc
from fourfold.rollout.client import RolloutClient
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rollout.v1 import rollout_service_pb2_grpc as rollout_grpc
from fourfold.server import Server
from fourfold.trainer.client import TrainerClient
from fourfold.trainer.v1 import trainer_service_pb2 as trainer
from fourfold.trainer.v1 import trainer_service_pb2_grpc as trainer_grpc
from fourfold.types.v1 import experience_pb2 as types
from fourfold.wire import Sample, VersionSpan, encode, pack_floats, pack_ints
from tests.conftest import Serve, Servicer

REWARD = reward.DESCRIPTOR.services_by_name["RewardService"]
ROLLOUT = rollout.DESCRIPTOR.services_by_name["RolloutService"]
TRAINER = trainer.DESCRIPTOR.services_by_name["TrainerService"]
REFERENCE = reference.DESCRIPTOR.services_by_name["ReferenceService"]
Context = grpc.aio.ServicerContext[Any, Any]


class Reward(reward_grpc.RewardServiceServicer):
    """Raises what it is given, or answers what it is given."""

    def __init__(self, *, raises: BaseException | None = None, answer: reward.ScoreResponse | None = None) -> None:
        self.raises, self.answer = raises, answer
        self.calls: list[reward.ScoreRequest] = []
        self.failures_left = 0

    async def GetInfo(self, request: reward.GetInfoRequest, context: Context) -> reward.GetInfoResponse:
        self.calls.append(reward.ScoreRequest())
        if self.failures_left:
            self.failures_left -= 1
            raise errors.Unavailable("not yet")
        return reward.GetInfoResponse(name="x@1")

    async def Score(self, request: reward.ScoreRequest, context: Context) -> reward.ScoreResponse:
        self.calls.append(request)
        if self.raises is not None:
            raise self.raises
        if self.answer is not None:
            return self.answer
        ids = [item.experience.sample_id for item in request.items]
        return reward.ScoreResponse(scores=[reward.SampleScore(sample_id=i, score=1.0) for i in ids])

    def servicer(self) -> Servicer:
        return REWARD, reward_grpc.add_RewardServiceServicer_to_server, self


class Rollout(rollout_grpc.RolloutServiceServicer):
    """Streams what it is given; remembers how its generator ended."""

    def __init__(self, *responses: rollout.GenerateResponse | Exception, hang: bool = False) -> None:
        self.responses, self.hang = responses, hang
        self.closed = asyncio.Event()
        self.how = ""

    async def GetInfo(self, request: rollout.GetInfoRequest, context: Context) -> rollout.GetInfoResponse:
        return rollout.GetInfoResponse()

    async def Generate(
        self, request: rollout.GenerateRequest, context: Context
    ) -> AsyncIterator[rollout.GenerateResponse]:
        try:
            for response in self.responses:
                if isinstance(response, Exception):
                    raise response
                yield response
            if self.hang:
                await asyncio.sleep(30)
        except BaseException as error:
            self.how = type(error).__name__
            raise
        finally:
            self.closed.set()

    async def WatchLoad(
        self, request: rollout.WatchLoadRequest, context: Context
    ) -> AsyncIterator[rollout.WatchLoadResponse]:
        yield rollout.WatchLoadResponse(policy_version=7)

    def servicer(self) -> Servicer:
        return ROLLOUT, rollout_grpc.add_RolloutServiceServicer_to_server, self


class Trainer(trainer_grpc.TrainerServiceServicer):
    """Collects a batch."""

    def __init__(self, *, raises: Exception | None = None) -> None:
        self.raises = raises
        self.messages: list[trainer.TrainStepRequest] = []

    async def GetStatus(self, request: trainer.GetStatusRequest, context: Context) -> trainer.GetStatusResponse:
        return trainer.GetStatusResponse(status=trainer.TrainerStatus(step=3))

    async def WatchStatus(
        self, request: trainer.WatchStatusRequest, context: Context
    ) -> AsyncIterator[trainer.WatchStatusResponse]:
        for step in (3, 4):
            yield trainer.WatchStatusResponse(status=trainer.TrainerStatus(step=step))

    async def TrainStep(
        self, request_iterator: AsyncIterator[trainer.TrainStepRequest], context: Context
    ) -> trainer.TrainStepResponse:
        async for message in request_iterator:
            if self.raises is not None:
                raise self.raises
            self.messages.append(message)
        count = sum(len(m.experiences) for m in self.messages)
        return trainer.TrainStepResponse(step=self.messages[-1].step, metrics={"train/trained_samples": count})

    async def _never(self, request: Any, context: Context) -> Any:
        raise AssertionError("not called here")

    ComputeLogprobs = SaveCheckpoint = LoadCheckpoint = ExportModel = RaisePolicyVersion = _never

    def servicer(self) -> Servicer:
        return TRAINER, trainer_grpc.add_TrainerServiceServicer_to_server, self


def score_item(sample_id: str, text: str = "") -> reward.ScoreItem:
    return reward.ScoreItem(experience=types.Experience(sample_id=sample_id), prompt_text=text)


def generated(index: int, *ids: int, version: int = 0, done: bool = False) -> rollout.GenerateResponse:
    return rollout.GenerateResponse(
        sample_index=index,
        token_ids=pack_ints(ids),
        logprobs=pack_floats(np.full(len(ids), -0.5, np.float32)),
        policy_version=version,
        finish_reason=rollout.FINISH_REASON_STOP if done else rollout.FINISH_REASON_UNSPECIFIED,
    )


def sample(sample_id: str, tokens: int = 4) -> Sample:
    mask = np.arange(tokens) > 0
    return Sample(
        sample_id=sample_id,
        group_id="g",
        token_ids=np.arange(tokens, dtype=np.int32),
        behavior_logprobs=np.where(mask, np.float32(-1), np.float32("nan")).astype(np.float32),
        action_mask=mask,
        loss_mask=mask,
        version_spans=(
            VersionSpan(policy_version=-1, token_count=1),
            VersionSpan(policy_version=0, token_count=tokens - 1),
        ),
        temperature=1.0,
    )


RAISED = [
    errors.InvalidInput("x is 1; it must be 2"),
    errors.Unauthenticated("who?"),
    errors.PermissionDenied("not you"),
    errors.NotFound("lease gone", reason="LEASE_GONE"),
    errors.StaleEpoch("epoch 3 is gone"),
    errors.AlreadyExists("other bytes"),
    errors.WrongState("busy"),
    errors.Overloaded("full", retry_after=1.5),
    errors.DeadlinePassed("too slow"),
]


@pytest.mark.parametrize("raised", RAISED, ids=lambda e: type(e).__name__)
async def test_an_error_arrives_as_the_class_that_was_raised(serve: Serve, raised: errors.FourfoldError) -> None:
    client = RewardClient(await serve(Reward(raises=raised).servicer()), peer="reward-0")
    with pytest.raises(errors.FourfoldError) as caught:
        await client.score([score_item("a")], timeout=5)
    assert type(caught.value) is type(raised)
    assert caught.value.message == f"reward-0, Score: {raised.message}"
    assert caught.value.reason == raised.reason
    assert caught.value.retry_after == raised.retry_after


async def test_an_unexpected_exception_says_nothing_to_the_caller_and_everything_to_the_log(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    for raised in (ValueError("secret path /etc/x"), errors.Internal("secret state")):
        caplog.clear()
        client = RewardClient(await serve(Reward(raises=raised).servicer()), peer="reward-0")
        with caplog.at_level(logging.ERROR), pytest.raises(errors.Internal) as caught:
            await client.score([score_item("a")], timeout=5)
        assert caught.value.message == "reward-0, Score: internal error"
        assert "RewardService/Score failed" in caplog.text
        assert str(raised) in caplog.text


async def test_a_group_of_user_errors_is_the_first_of_them(serve: Serve) -> None:
    raised = ExceptionGroup("tasks", [errors.NotFound("one"), ExceptionGroup("more", [errors.NotFound("two")])])
    client = RewardClient(await serve(Reward(raises=raised).servicer()), peer="r")
    with pytest.raises(errors.NotFound, match="one"):
        await client.score([score_item("a")], timeout=5)
    mixed = Reward(raises=ExceptionGroup("tasks", [errors.NotFound("one"), ValueError("bug")]))
    client = RewardClient(await serve(mixed.servicer()), peer="r")
    with pytest.raises(errors.Internal):
        await client.score([score_item("a")], timeout=5)


@pytest.mark.parametrize("letter", ["a", "\u00e9", "\n", "%"])
async def test_a_long_error_text_fits_the_trailers(serve: Serve, letter: str) -> None:
    raised = errors.Overloaded(letter * 20_000, retry_after=2.0, reason="R" * 60)
    client = RewardClient(await serve(Reward(raises=raised).servicer()), peer="r")
    for _ in range(20):  # between the soft and the hard limit gRPC drops the status at random
        with pytest.raises(errors.Overloaded) as caught:
            await client.score([score_item("a")], timeout=5)
        assert caught.value.retry_after == 2.0
        assert caught.value.message.startswith(f"r, Score: {letter * 100}")


async def test_an_error_carries_exactly_one_error_info(serve: Serve) -> None:
    channel = await serve(Reward(raises=errors.NotFound("x", reason="LEASE_GONE")).servicer())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reward_grpc.RewardServiceStub(channel).Score(reward.ScoreRequest(), timeout=5)
    metadata: Any = caught.value.trailing_metadata()
    status = Status.FromString(dict(metadata)["grpc-status-details-bin"])
    assert len(status.details) == 1
    info = ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("LEASE_GONE", "fourfold")


async def test_a_call_without_a_deadline_is_refused_on_every_kind_of_call(serve: Serve) -> None:
    channel = await serve(Reward().servicer(), Rollout().servicer(), Trainer().servicer())
    calls: list[Any] = [
        reward_grpc.RewardServiceStub(channel).GetInfo(reward.GetInfoRequest()),
        rollout_grpc.RolloutServiceStub(channel).Generate(rollout.GenerateRequest()).read(),
        trainer_grpc.TrainerServiceStub(channel).TrainStep(iter([trainer.TrainStepRequest(step=1)])),
    ]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "without a deadline" in (caught.value.details() or "")


async def test_watches_and_health_need_no_deadline(serve: Serve) -> None:
    channel = await serve(Rollout().servicer(), Trainer().servicer())
    loads = [load async for load in RolloutClient(channel, peer="r").watch_load()]
    assert [load.policy_version for load in loads] == [7]
    assert [s.step async for s in TrainerClient(channel, peer="t").watch_status()] == [3, 4]
    response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert response.status == health_pb2.HealthCheckResponse.SERVING


async def test_bytes_that_are_no_message_are_invalid(serve: Serve) -> None:
    channel = await serve(Reward().servicer(), Trainer().servicer())
    unary: Any = channel.unary_unary("/fourfold.reward.v1.RewardService/Score")
    stream: Any = channel.stream_unary("/fourfold.trainer.v1.TrainerService/TrainStep")
    for call in (unary(b"\xff\xff\xff", timeout=5), stream(iter([b"\xff\xff\xff"]), timeout=5)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_leaving_a_stream_early_closes_the_servicer_at_once(serve: Serve) -> None:
    servicer = Rollout(generated(0, 1), hang=True)
    client = RolloutClient(await serve(servicer.servicer()), peer="r")
    async with aclosing(client.generate(rollout.GenerateRequest(request_id="a"), timeout=20)) as responses:
        async for _ in responses:
            break
    await asyncio.wait_for(servicer.closed.wait(), 1)
    assert servicer.how == "CancelledError"


async def test_cancelling_complete_closes_the_servicer_and_is_not_swallowed(serve: Serve) -> None:
    servicer = Rollout(generated(0, 1), hang=True)
    client = RolloutClient(await serve(servicer.servicer()), peer="r")
    task = asyncio.create_task(client.complete(rollout.GenerateRequest(request_id="a"), timeout=20))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(servicer.closed.wait(), 1)
    assert servicer.how == "CancelledError"


async def test_a_servicer_that_writes_faster_than_its_client_reads_is_closed_when_the_client_leaves(
    serve: Serve,
) -> None:
    big = rollout.GenerateResponse(token_ids=b"\0" * (1 << 20))
    servicer = Rollout(*[big] * 200)
    client = RolloutClient(await serve(servicer.servicer()), peer="r")
    async with aclosing(client.generate(rollout.GenerateRequest(), timeout=20)) as responses:
        async for _ in responses:
            await asyncio.sleep(0.1)  # the server is now blocked in a write
            break
    await asyncio.wait_for(servicer.closed.wait(), 1)
    assert servicer.how == "GeneratorExit"


async def test_the_deadline_ends_a_call_on_both_sides_and_names_itself(serve: Serve) -> None:
    servicer = Rollout(hang=True)
    client = RolloutClient(await serve(servicer.servicer()), peer="rollout-0")
    with pytest.raises(errors.DeadlinePassed, match=r"rollout-0: Generate took longer than 0\.2 s"):
        await client.complete(rollout.GenerateRequest(), timeout=0.2)
    await asyncio.wait_for(servicer.closed.wait(), 1)


async def test_closing_the_channel_under_a_call_is_an_error_and_no_cancellation(serve: Serve) -> None:
    channel = await serve(Rollout(hang=True).servicer())
    task = asyncio.create_task(RolloutClient(channel, peer="r").complete(rollout.GenerateRequest(), timeout=20))
    await asyncio.sleep(0.1)
    await channel.close()
    with pytest.raises(errors.Unavailable, match="channel was closed"):
        await task


async def test_an_error_in_the_middle_of_a_stream_arrives_after_what_came_before(serve: Serve) -> None:
    servicer = Rollout(generated(0, 1), errors.Unavailable("engine died"))
    client = RolloutClient(await serve(servicer.servicer()), peer="r")
    seen = []
    with pytest.raises(errors.Unavailable, match="engine died"):
        async for response in client.generate(rollout.GenerateRequest(), timeout=5):
            seen.append(response.sample_index)
    assert seen == [0]


async def test_only_unavailable_is_retried_and_only_where_the_contract_says_idempotent(serve: Serve) -> None:
    servicer = Reward()
    client = RewardClient(await serve(servicer.servicer()), peer="r")
    servicer.failures_left = 2
    assert (await client.get_info(timeout=5)).name == "x@1"
    assert len(servicer.calls) == 3
    servicer.raises = errors.Overloaded("full")
    servicer.calls.clear()
    with pytest.raises(errors.Overloaded):
        await client.score([score_item("a")], timeout=5)
    assert len(servicer.calls) == 1
    training = Trainer(raises=errors.Unavailable("draining"))
    with pytest.raises(errors.Unavailable):
        await TrainerClient(await serve(training.servicer()), peer="t").train_step(1, [], timeout=5)


async def test_nobody_there_is_unavailable_and_names_who(unused_port: int) -> None:
    channel = open_channel(f"127.0.0.1:{unused_port}", None)
    with pytest.raises(errors.Unavailable, match=r"reward-0, GetInfo: .*refused"):
        await RewardClient(channel, peer="reward-0").get_info(timeout=10)
    await channel.close()


async def test_health_is_live_at_once_and_ready_when_told() -> None:
    server = Server(listen="127.0.0.1:0", security=None)
    server.add(*Reward().servicer())
    channel = open_channel(await server.start(), None)
    stub = health_pb2_grpc.HealthStub(channel)

    async def ask(service: str) -> int:
        return int((await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)).status)

    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert await ask("") == serving
    assert await ask(REWARD.full_name) == not_serving
    server.set_ready(True)
    assert await ask(REWARD.full_name) == serving
    server.set_ready(False)
    assert await ask(REWARD.full_name) == not_serving
    await channel.close()
    await server.stop(0)


async def test_reflection_is_on_the_internal_server_only(serve: Serve) -> None:
    public = Server(listen="127.0.0.1:0", security=None, public=True)
    public.add(*Rollout().servicer())
    with pytest.raises(RuntimeError, match="must not be on a public port"):
        public.add(*Reward().servicer())
    outside = open_channel(await public.start(), None)
    inside = await serve(Reward().servicer())
    request = reflection_pb2.ServerReflectionRequest(list_services="")

    async def services(channel: grpc.aio.Channel) -> list[str]:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]), timeout=5)
        return [s.name for r in [m async for m in call] for s in r.list_services_response.service]

    assert "fourfold.reward.v1.RewardService" in await services(inside)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await services(outside)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await outside.close()
    await public.stop(0)


async def test_more_calls_than_allowed_are_refused_at_once(serve: Serve) -> None:
    channel = await serve(Rollout(hang=True).servicer(), max_concurrent_rpcs=2)
    client = RolloutClient(channel, peer="r")
    tasks = [asyncio.create_task(client.complete(rollout.GenerateRequest(), timeout=0.5)) for _ in range(5)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(type(r).__name__ for r in results) == ["DeadlinePassed"] * 2 + ["Overloaded"] * 3


async def test_a_port_in_use_is_one_clear_error() -> None:
    first = Server(listen="127.0.0.1:0", security=None)
    target = await first.start()
    with pytest.raises(errors.ConfigError, match=rf"listen = '{target}': port \d+ is in use by another process"):
        await Server(listen=target, security=None).start()
    await first.stop(0)


def test_addresses_that_may_not_be_used_are_refused_before_anything_listens() -> None:
    for listen in ("0.0.0.0:0", "10.0.0.1:5000", "example.com:1", "[::]:0"):
        with pytest.raises(errors.ConfigError, match="without TLS a service listens on loopback only"):
            Server(listen=listen, security=None)
    for listen in ("127.0.0.1", "127.0.0.1:x", ":50", "::1:50", "127.0.0.1:70000", ""):
        with pytest.raises(errors.ConfigError):
            Server(listen=listen, security=None)
    for target in ("10.0.0.1:5000", "example.com:1"):
        with pytest.raises(errors.ConfigError, match="without TLS a service is only called on this machine"):
            open_channel(target, None)
    with pytest.raises(errors.ConfigError, match="token would travel in the clear"):
        open_channel("127.0.0.1:5000", None, token="x")


async def test_an_address_of_another_machine_is_one_clear_error() -> None:
    with pytest.raises(errors.ConfigError, match=r"listen = '127\.0\.0\.1:1'.*"):
        # Port 1 needs privileges; where the test has them, it is free and nothing is to be shown.
        server = Server(listen="127.0.0.1:1", security=None)
        await server.start()
        await server.stop(0)
        raise errors.ConfigError("listen = '127.0.0.1:1' was free")


def test_every_channel_argument_is_known_to_the_compiled_library() -> None:
    library = importlib.import_module("grpc._cython.cygrpc").__file__
    assert library
    binary = Path(library).read_bytes()
    for key, _ in (*SERVER_OPTIONS, *CLIENT_OPTIONS):
        assert key.encode() in binary, f"{key} is not a channel argument of this grpcio"
    assert b"grpc.http2.min_recv_ping_interval_without_data_ms" not in binary  # so the search can fail


def test_the_retried_methods_exist_and_are_idempotent_in_the_contract() -> None:
    proto = Path(__file__).parents[2] / "proto"
    for service, methods in RETRIED_METHODS.items():
        package, _, name = service.rpartition(".")
        text = "\n".join(p.read_text() for p in (proto / package.replace(".", "/")).glob("*.proto"))
        body = text[text.index(f"service {name} {{") :]
        for method in methods:
            comment = re.search(rf"((?:\s*//[^\n]*\n)+)\s*rpc {method}\(", body)
            assert comment, f"{service}/{method} is not in the protos"
            if method != "KeepAlive":  # extending twice is extending once
                assert "Idempotent" in comment[1], f"{service}/{method} is not said to be idempotent"


class TestRolloutClient:
    """`complete` joins responses and trusts none of them."""

    async def complete(self, serve: Serve, *responses: rollout.GenerateResponse, count: int = 1) -> Any:
        client = RolloutClient(await serve(Rollout(*responses).servicer()), peer="rollout-0")
        request = rollout.GenerateRequest(request_id="q", sample_count=count)
        return await client.complete(request, timeout=5)

    async def test_responses_of_all_samples_are_joined_in_order(self, serve: Serve) -> None:
        first, second = await self.complete(
            serve,
            generated(1, 5, 6, version=2),
            generated(0, 1, 2, 3, version=2, done=True),
            generated(1, 7, version=2),
            generated(1, 8, version=3),
            generated(1, version=3, done=True),
            count=2,
        )
        assert first.token_ids.tolist() == [1, 2, 3]
        assert first.token_ids.dtype == np.int32
        assert second.token_ids.tolist() == [5, 6, 7, 8]
        assert second.logprobs.tolist() == [-0.5] * 4
        assert second.logprobs.dtype == np.float32
        assert [(s.policy_version, s.token_count) for s in second.version_spans] == [(2, 3), (3, 1)]
        assert second.finish_reason == rollout.FINISH_REASON_STOP

    async def test_a_sample_may_be_empty(self, serve: Serve) -> None:
        (only,) = await self.complete(serve, generated(0, done=True))
        assert len(only.token_ids) == len(only.logprobs) == 0
        assert only.version_spans == ()

    async def test_answers_that_do_not_add_up_are_refused(self, serve: Serve) -> None:
        odd = generated(0, 1, done=True)
        odd.token_ids += b"\0"
        short = generated(0, 1, 2, done=True)
        short.logprobs = short.logprobs[:4]
        for message, responses in {
            "sample_index is 1; 1 samples": [generated(1, 1, done=True)],
            "has 5 bytes": [odd],
            "8 bytes of token_ids and 4 of logprobs": [short],
            "ended before sample 0": [generated(0, 1)],
            "goes on after": [generated(0, 1, done=True), generated(0, 2)],
            "policy_version -1": [generated(0, 1, version=-1, done=True)],
        }.items():
            with pytest.raises(errors.InvalidInput, match=message):
                await self.complete(serve, *responses)


class TestRewardClient:
    """Third parties implement this service: what they answer is checked."""

    async def test_large_requests_travel_in_parts(self, serve: Serve) -> None:
        servicer = Reward()
        client = RewardClient(await serve(servicer.servicer()), peer="r")
        items = [score_item(f"s{i}", "x" * (1 << 20)) for i in range(9)]
        assert [s.sample_id for s in await client.score(items, timeout=10)] == [f"s{i}" for i in range(9)]
        assert [len(c.items) for c in servicer.calls] == [3, 3, 3]
        servicer.calls.clear()
        await client.score(items[:5], timeout=10, max_sample_count=2)
        assert [len(c.items) for c in servicer.calls] == [2, 2, 1]

    async def test_a_wrong_number_or_order_of_scores_is_refused(self, serve: Serve) -> None:
        for ids in ([], ["b", "a"], ["a"], ["a", "b", "c"]):
            answer = reward.ScoreResponse(scores=[reward.SampleScore(sample_id=i, score=1) for i in ids])
            client = RewardClient(await serve(Reward(answer=answer).servicer()), peer="r")
            with pytest.raises(errors.InvalidInput, match="in the order of the request"):
                await client.score([score_item("a"), score_item("b")], timeout=5)

    async def test_a_missing_outcome_and_a_score_that_is_not_finite_become_errors_of_the_sample(
        self, serve: Serve
    ) -> None:
        answer = reward.ScoreResponse(
            scores=[
                reward.SampleScore(sample_id="a"),
                reward.SampleScore(sample_id="b", score=float("nan")),
                reward.SampleScore(sample_id="c", score=float("inf")),
                reward.SampleScore(sample_id="d", abstain_reason="NO_ANSWER"),
                reward.SampleScore(sample_id="e", score=0.0),
            ]
        )
        client = RewardClient(await serve(Reward(answer=answer).servicer()), peer="r")
        scores = await client.score([score_item(i) for i in "abcde"], timeout=5)
        outcomes = [s.WhichOneof("outcome") for s in scores]
        assert outcomes == ["error", "error", "error", "abstain_reason", "score"]
        assert [s.error.reason for s in scores[:3]] == ["NO_OUTCOME", "NOT_FINITE", "NOT_FINITE"]


class TestTrainerClient:
    """A batch travels in chunks; whatever goes wrong is named."""

    async def test_a_batch_travels_in_chunks_with_its_step(self, serve: Serve) -> None:
        servicer = Trainer()
        client = TrainerClient(await serve(servicer.servicer()), peer="t")
        experiences = (encode(sample(f"s{i}", 20_000)) for i in range(30))  # 30 * 180 kB
        response = await client.train_step(4, experiences, timeout=10)
        assert response.metrics["train/trained_samples"] == 30
        assert {m.step for m in servicer.messages} == {4}
        assert 4 < len(servicer.messages) < 10
        assert max(m.ByteSize() for m in servicer.messages) < 1.3 * (1 << 20)

    async def test_an_empty_batch_still_reaches_the_trainer(self, serve: Serve) -> None:
        response = await TrainerClient(await serve(Trainer().servicer()), peer="t").train_step(4, [], timeout=5)
        assert response.step == 4

    async def test_a_trainer_that_refuses_before_it_has_read_everything_is_heard(self, serve: Serve) -> None:
        servicer = Trainer(raises=errors.WrongState("the next step is 7"))
        client = TrainerClient(await serve(servicer.servicer()), peer="trainer-0")
        experiences = (encode(sample(f"s{i}", 20_000)) for i in range(500))
        with pytest.raises(errors.WrongState, match="trainer-0, TrainStep: the next step is 7"):
            await client.train_step(4, experiences, timeout=10)

    async def test_an_error_while_the_batch_is_made_is_that_error(self, serve: Serve) -> None:
        def experiences() -> Any:
            yield encode(sample("a"))
            raise errors.NotFound("row is gone")

        client = TrainerClient(await serve(Trainer().servicer()), peer="t")
        with pytest.raises(errors.NotFound, match="row is gone"):
            await client.train_step(4, experiences(), timeout=5)


class Reference(reference_grpc.ReferenceServiceServicer):
    """Answers minus the token id; `broken` changes the rows."""

    def __init__(self, broken: Any = None) -> None:
        self.broken = broken
        self.calls = 0

    async def GetInfo(self, request: reference.GetInfoRequest, context: Context) -> reference.GetInfoResponse:
        return reference.GetInfoResponse(model="m")

    async def ComputeLogprobs(
        self, request: reference.ComputeLogprobsRequest, context: Context
    ) -> reference.ComputeLogprobsResponse:
        self.calls += 1
        rows = []
        for experience in request.experiences:
            row = -np.frombuffer(experience.token_ids, "<i4").astype(np.float32) * experience.temperature
            row[0] = np.nan
            rows.append(pack_floats(row))
        return reference.ComputeLogprobsResponse(logprobs=self.broken(rows) if self.broken else rows)

    def servicer(self) -> Servicer:
        return REFERENCE, reference_grpc.add_ReferenceServiceServicer_to_server, self


class TestReferenceClient:
    """Rows come back in order and are checked."""

    async def test_rows_come_back_in_order_over_several_calls(self, serve: Serve) -> None:
        servicer = Reference()
        client = ReferenceClient(await serve(servicer.servicer()), peer="ref")
        samples = [sample(f"s{i}", 50_000 + i) for i in range(50)]  # 10 MB of ids
        rows = await client.compute_logprobs(samples, timeout=10)
        assert [len(r) for r in rows] == [50_000 + i for i in range(50)]
        assert np.isnan(rows[0][0])
        assert rows[0][1:4].tolist() == [-1, -2, -3]
        assert servicer.calls == 3

    async def test_rows_that_do_not_fit_are_refused(self, serve: Serve) -> None:
        nan = pack_floats(np.full(4, np.nan, np.float32))
        for message, broken in {
            "answered 1 rows for 2": lambda rows: rows[:1],
            "has 12 bytes": lambda rows: [rows[0][:12], rows[1]],
            "sample b are not finite": lambda rows: [rows[0], nan],
        }.items():
            client = ReferenceClient(await serve(Reference(broken).servicer()), peer="ref")
            with pytest.raises(errors.InvalidInput, match=message):
                await client.compute_logprobs([sample("a"), sample("b")], timeout=5)
