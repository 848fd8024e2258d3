"""Server and clients on loopback: errors, deadlines, cancellation, health, limits and addresses."""

from __future__ import annotations

import asyncio
import importlib
import logging
import re
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fourfold import errors
from fourfold.reward.client import AsyncRewardClient
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.reward.v1 import reward_service_pb2_grpc as reward_grpc
from fourfold.rollout.client import AsyncRolloutClient
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rollout.v1 import rollout_service_pb2_grpc as rollout_grpc
from fourfold.rpc.channel import CLIENT_OPTIONS, PUBLIC_SERVER_OPTIONS, RETRIED_METHODS, SERVER_OPTIONS, open_channel
from fourfold.rpc.server import Server
from fourfold.trainer.client import AsyncTrainerClient
from fourfold.trainer.v1 import trainer_service_pb2 as trainer
from fourfold.trainer.v1 import trainer_service_pb2_grpc as trainer_grpc
from tests.conftest import Serve
from tests.fakes.servicers import REWARD, Reward, Rollout, Trainer, generated, sample, score_item

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
    client = AsyncRewardClient(await serve(Reward(raises=raised).servicer()), peer="reward-0")
    with pytest.raises(errors.FourfoldError) as caught:
        await client.score([score_item("a")], timeout=5)
    assert type(caught.value) is type(raised)
    assert caught.value.message == f"reward-0, Score: {raised.message}"
    assert caught.value.reason == raised.reason
    assert caught.value.retry_after == raised.retry_after


async def test_an_unexpected_exception_is_logged_and_hidden_from_the_caller(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    unsupported = NotImplementedError("a kernel of a library, which is not the generated base class")
    for raised in (ValueError("secret path /etc/x"), errors.Internal("secret state"), unsupported):
        caplog.clear()
        client = AsyncRewardClient(await serve(Reward(raises=raised).servicer()), peer="reward-0")
        with caplog.at_level(logging.ERROR), pytest.raises(errors.Internal) as caught:
            await client.score([score_item("a")], timeout=5)
        assert caught.value.message == "reward-0, Score: internal error"
        assert "RewardService/Score failed" in caplog.text
        assert str(raised) in caplog.text


async def test_a_method_that_a_servicer_lacks_is_unimplemented(serve: Serve) -> None:
    stub = health_pb2_grpc.HealthStub(await serve(Reward().servicer()))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.List(health_pb2.HealthListRequest(), timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_group_of_caller_facing_errors_becomes_the_first_of_them(serve: Serve) -> None:
    raised = ExceptionGroup("tasks", [errors.NotFound("one"), ExceptionGroup("more", [errors.NotFound("two")])])
    client = AsyncRewardClient(await serve(Reward(raises=raised).servicer()), peer="r")
    with pytest.raises(errors.NotFound, match="one"):
        await client.score([score_item("a")], timeout=5)
    mixed = Reward(raises=ExceptionGroup("tasks", [errors.NotFound("one"), ValueError("bug")]))
    client = AsyncRewardClient(await serve(mixed.servicer()), peer="r")
    with pytest.raises(errors.Internal):
        await client.score([score_item("a")], timeout=5)


@pytest.mark.parametrize("letter", ["a", "\u00e9", "\n", "%"])
async def test_a_long_error_text_fits_the_trailers(serve: Serve, letter: str) -> None:
    raised = errors.Overloaded(letter * 20_000, retry_after=2.0, reason="R" * 60)
    client = AsyncRewardClient(await serve(Reward(raises=raised).servicer()), peer="r")
    for _ in range(20):  # between its soft and hard limit gRPC drops the status at random
        with pytest.raises(errors.Overloaded) as caught:
            await client.score([score_item("a")], timeout=5)
        assert caught.value.retry_after == 2.0
        assert caught.value.message.startswith(f"r, Score: {letter.replace(chr(10), ' ') * 100}")


async def test_an_error_carries_exactly_one_error_info(serve: Serve) -> None:
    channel = await serve(Reward(raises=errors.NotFound("x", reason="LEASE_GONE")).servicer())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reward_grpc.RewardServiceStub(channel).Score(reward.ScoreRequest(), timeout=5)
    metadata: Any = caught.value.trailing_metadata()
    status = Status.FromString(next(value for key, value in metadata if key == "grpc-status-details-bin"))
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
    loads = [load async for load in AsyncRolloutClient(channel, peer="r").watch_load()]
    assert [load.policy_version for load in loads] == [7]
    assert [s.step async for s in AsyncTrainerClient(channel, peer="t").watch_status()] == [3, 4]
    response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert response.status == health_pb2.HealthCheckResponse.SERVING


async def test_malformed_bytes_are_invalid_input(serve: Serve) -> None:
    channel = await serve(Reward().servicer(), Trainer().servicer())
    unary: Any = channel.unary_unary("/fourfold.reward.v1.RewardService/Score")
    stream: Any = channel.stream_unary("/fourfold.trainer.v1.TrainerService/TrainStep")
    for call in (unary(b"\xff\xff\xff", timeout=5), stream(iter([b"\xff\xff\xff"]), timeout=5)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_cancelling_complete_closes_the_servicer_and_is_not_swallowed(serve: Serve) -> None:
    servicer = Rollout(generated(0, 1), hang=True)
    client = AsyncRolloutClient(await serve(servicer.servicer()), peer="r")
    task = asyncio.create_task(client.complete(rollout.GenerateRequest(request_id="a"), timeout=20))
    await asyncio.wait_for(servicer.hanging.wait(), 10)  # in a write it would get a GeneratorExit
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(servicer.closed.wait(), 10)
    assert servicer.how == "CancelledError"


async def test_a_servicer_that_writes_faster_than_its_client_reads_is_closed_when_the_client_leaves(
    serve: Serve,
) -> None:
    big = rollout.SampleChunk(token_ids=b"\0" * (1 << 20), logprobs=b"\0" * (1 << 20))
    servicer = Rollout(*[big] * 200)
    client = AsyncRolloutClient(await serve(servicer.servicer()), peer="r")
    async with aclosing(client.generate(rollout.GenerateRequest(), timeout=20)) as chunks:
        async for _ in chunks:
            await asyncio.sleep(0.1)  # the server is now blocked in a write
            break
    await asyncio.wait_for(servicer.closed.wait(), 10)
    assert servicer.how == "GeneratorExit"


async def test_the_deadline_ends_a_call_on_both_sides(serve: Serve) -> None:
    servicer = Rollout(hang=True)
    client = AsyncRolloutClient(await serve(servicer.servicer()), peer="rollout-0")
    with pytest.raises(errors.DeadlinePassed, match=r"rollout-0: Generate took longer than 1 s"):
        await client.complete(rollout.GenerateRequest(), timeout=1)
    await asyncio.wait_for(servicer.closed.wait(), 10)


async def test_closing_the_channel_of_a_running_call_is_an_error_and_no_cancellation(serve: Serve) -> None:
    channel = await serve(Rollout(hang=True).servicer())
    task = asyncio.create_task(AsyncRolloutClient(channel, peer="r").complete(rollout.GenerateRequest(), timeout=20))
    await asyncio.sleep(0.1)
    await channel.close()
    with pytest.raises(errors.Unavailable, match="channel was closed"):
        await task


async def test_an_error_in_the_middle_of_a_stream_arrives_after_what_came_before(serve: Serve) -> None:
    servicer = Rollout(generated(0, 1), errors.Unavailable("engine died"))
    client = AsyncRolloutClient(await serve(servicer.servicer()), peer="r")
    seen = []
    with pytest.raises(errors.Unavailable, match="engine died"):
        async for chunk in client.generate(rollout.GenerateRequest(), timeout=5):
            seen.append(chunk.sample_index)
    assert seen == [0]


async def test_only_unavailable_is_retried_and_only_where_the_contract_says_idempotent(serve: Serve) -> None:
    servicer = Reward()
    client = AsyncRewardClient(await serve(servicer.servicer()), peer="r")
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
        await AsyncTrainerClient(await serve(training.servicer()), peer="t").train_step(1, [], timeout=5)


async def test_an_unreachable_server_is_unavailable_and_named(unused_port: int) -> None:
    channel = open_channel(f"127.0.0.1:{unused_port}", None)
    with pytest.raises(errors.Unavailable, match=r"reward-0, GetInfo: .*refused"):
        await AsyncRewardClient(channel, peer="reward-0").get_info(timeout=10)
    await channel.close()


async def test_a_server_is_live_at_once_and_ready_on_demand() -> None:
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
    client = AsyncRolloutClient(channel, peer="r")
    tasks = [asyncio.create_task(client.complete(rollout.GenerateRequest(), timeout=2)) for _ in range(5)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(type(r).__name__ for r in results) == ["DeadlinePassed"] * 2 + ["Overloaded"] * 3


async def test_a_port_in_use_is_one_clear_error() -> None:
    first = Server(listen="127.0.0.1:0", security=None)
    target = await first.start()
    with pytest.raises(errors.ConfigError, match=rf"listen = '{target}': port \d+ is in use by another process"):
        await Server(listen=target, security=None).start()
    with pytest.raises(errors.ConfigError, match=rf"^view\.public_listen = '{target}': port \d+ is in use"):
        await Server(listen=target, security=None, public=True, key="view.public_listen").start()
    await first.stop(0)


async def test_a_new_channel_reaches_a_service_that_is_back_on_its_port(unused_port: int) -> None:
    target = f"127.0.0.1:{unused_port}"
    async with open_channel(target, None) as older:
        with pytest.raises(errors.Unavailable, match="nothing listens there"):
            await AsyncTrainerClient(older, peer="trainer-0").train_step(1, [], timeout=5)
        server = Server(listen=target, security=None)
        server.add(*Trainer().servicer())
        await server.start()
        server.set_ready(True)
        async with open_channel(target, None) as newer:  # while the older one waits for its next attempt
            assert await AsyncTrainerClient(newer, peer="trainer-0").train_step(1, [sample("a")], timeout=5)
        await server.stop(0)


async def test_several_acceptors_are_one_server() -> None:
    server = Server(listen="127.0.0.1:0", security=None, acceptors=4)
    server.add(*Reward().servicer())
    target = await server.start()
    server.set_ready(True)
    channels = [open_channel(target, None) for _ in range(16)]
    calls = [AsyncRewardClient(channel, peer="reward-0").score([score_item("a")], timeout=5) for channel in channels]
    assert len(await asyncio.gather(*calls)) == 16
    for acceptors in (1, 4):
        with pytest.raises(errors.ConfigError, match="is in use by another process"):
            await Server(listen=target, security=None, acceptors=acceptors).start()
    await server.stop(0)
    with pytest.raises(errors.Unavailable):
        await AsyncRewardClient(channels[0], peer="reward-0").score([score_item("a")], timeout=1)
    for channel in channels:
        await channel.close()
    again = Server(listen=target, security=None)
    assert await again.start() == target, "every acceptor has left the port"
    await again.stop(0)


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
    with pytest.raises(errors.ConfigError, match="token without TLS could be read"):
        open_channel("127.0.0.1:5000", None, token="x")


def test_every_channel_argument_is_known_to_the_compiled_library() -> None:
    library = importlib.import_module("grpc._cython.cygrpc").__file__
    assert library
    binary = Path(library).read_bytes()
    for key, _ in (*SERVER_OPTIONS, *PUBLIC_SERVER_OPTIONS, *CLIENT_OPTIONS):
        assert key.encode() in binary, f"{key} is not a channel argument of this grpcio"
    assert b"grpc.http2.min_recv_ping_interval_without_data_ms" not in binary  # proves that the search can fail


def test_the_retried_methods_exist_and_are_idempotent_in_the_contract() -> None:
    proto = Path(__file__).parents[2] / "proto"
    for service, methods in RETRIED_METHODS.items():
        package, _, name = service.rpartition(".")
        text = "\n".join(p.read_text() for p in (proto / package.replace(".", "/")).glob("*.proto"))
        body = text[text.index(f"service {name} {{") :]
        for method in methods:
            comment = re.search(rf"((?:\s*//[^\n]*\n)+)\s*rpc {method}\(", body)
            assert comment, f"{service}/{method} is not in the protos"
            if method != "KeepAlive":  # repeating it is harmless
                assert "Idempotent" in comment[1], f"{service}/{method} is not said to be idempotent"
