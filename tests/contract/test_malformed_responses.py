"""Every method of every client answers a malformed response with an error that names the peer."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc
import numpy as np
import pytest

from fourfold.coordinator.client import AsyncCoordinatorClient, MembershipClient
from fourfold.coordinator.v1 import membership_service_pb2, run_service_pb2
from fourfold.errors import FourfoldError, PeerFault
from fourfold.reference.client import AsyncReferenceClient
from fourfold.reference.v1 import reference_service_pb2
from fourfold.reward.client import AsyncRewardClient
from fourfold.reward.v1 import reward_service_pb2
from fourfold.rollout.client import AsyncRolloutClient, RolloutControlClient
from fourfold.rollout.v1 import rollout_control_service_pb2 as control
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rpc.channel import open_channel
from fourfold.sample.wire import encode
from fourfold.trainer.client import AsyncTrainerClient, TrainerWeightClient
from fourfold.trainer.v1 import trainer_service_pb2, trainer_weight_service_pb2
from tests.fakes.servicers import sample, score_item

GARBAGE = b"\xff" * 7
IDS = [np.arange(4)]

# One call of every method, by service.
CALLS: dict[Any, tuple[Any, dict[str, Callable[[Any], Any]]]] = {
    rollout.DESCRIPTOR.services_by_name["RolloutService"]: (
        AsyncRolloutClient,
        {
            "GetInfo": lambda c: c.get_info(timeout=5),
            "Generate": lambda c: c.complete(rollout.GenerateRequest(request_id="q"), timeout=5),
            "WatchLoad": lambda c: c.watch_load(timeout=5),
            "ScoreTokens": lambda c: c.score_tokens([1, 2], timeout=5),
            "ParseCompletion": lambda c: c.parse_completion("text", timeout=5),
        },
    ),
    control.DESCRIPTOR.services_by_name["RolloutControlService"]: (
        RolloutControlClient,
        {
            "DescribeEngine": lambda c: c.describe(timeout=5),
            "OpenWeights": lambda c: c.open(
                epoch=1, backend="shm", manifest=b"", offers=[], receiver_count=1, first_receiver_index=0, timeout=5
            ),
            "BeginWeights": lambda c: c.begin(epoch=1, policy_version=1, pause_mode=control.PAUSE_MODE_WAIT, timeout=5),
            "ReceiveWeights": lambda c: c.receive(epoch=1, policy_version=1, timeout=5),
            "CommitWeights": lambda c: c.commit(epoch=1, policy_version=1, timeout=5),
            "ReleaseWeights": lambda c: c.release(epoch=1, policy_version=1, timeout=5),
            "AbortWeights": lambda c: c.abort(epoch=1, timeout=5),
            "FeedWeights": lambda c: c.feed(epoch=1, policy_version=1, receiver_count=1, timeout=5),
            "ProbeLogprobs": lambda c: c.probe([1, 2], timeout=5),
            "GetWeightSums": lambda c: c.sums(epoch=1, timeout=5),
            "SleepEngine": lambda c: c.sleep(level=1, timeout=5),
            "WakeEngine": lambda c: c.wake(timeout=5),
        },
    ),
    reward_service_pb2.DESCRIPTOR.services_by_name["RewardService"]: (
        AsyncRewardClient,
        {
            "GetInfo": lambda c: c.get_info(timeout=5),
            "Score": lambda c: c.score([score_item("a")], timeout=5),
        },
    ),
    reference_service_pb2.DESCRIPTOR.services_by_name["ReferenceService"]: (
        AsyncReferenceClient,
        {
            "GetInfo": lambda c: c.get_info(timeout=5),
            "ComputeLogprobs": lambda c: c.compute_logprobs([sample("a")], timeout=5),
        },
    ),
    trainer_service_pb2.DESCRIPTOR.services_by_name["TrainerService"]: (
        AsyncTrainerClient,
        {
            "GetStatus": lambda c: c.get_status(timeout=5),
            "WatchStatus": lambda c: c.watch_status(timeout=5),
            "TrainStep": lambda c: c.train_step(1, [encode(sample("a"))], timeout=5),
            "ForwardBackward": lambda c: c.forward_backward(IDS, IDS, step=1, timeout=5),
            "OptimStep": lambda c: c.optim_step(1, timeout=5),
            "DiscardGradient": lambda c: c.discard_gradient(timeout=5),
            "ComputeLogprobs": lambda c: c.forward(IDS, timeout=5),
            "SaveCheckpoint": lambda c: c.save_checkpoint(timeout=5),
            "LoadCheckpoint": lambda c: c.load_checkpoint(1, timeout=5),
            "ExportModel": lambda c: c.export_model("model", timeout=5),
            "RaisePolicyVersion": lambda c: c.raise_policy_version(1, timeout=5),
        },
    ),
    trainer_weight_service_pb2.DESCRIPTOR.services_by_name["TrainerWeightService"]: (
        TrainerWeightClient,
        {
            "GetManifest": lambda c: c.get_manifest(timeout=5),
            "MakeOffer": lambda c: c.make_offer(epoch=1, backend="shm", receiver_count=1, timeout=5),
            "OpenWeights": lambda c: c.open(epoch=1, timeout=5),
            "SendWeights": lambda c: c.send(epoch=1, policy_version=1, timeout=5),
            "AbortWeights": lambda c: c.abort(epoch=1, timeout=5),
        },
    ),
    membership_service_pb2.DESCRIPTOR.services_by_name["MembershipService"]: (
        MembershipClient,
        {
            "Register": lambda c: c.register(
                member_id="m", incarnation="0" * 32, role=1, target="", tokenizer_sha256=b"", timeout=5
            ),
            "KeepAlive": lambda c: c.keep_alive(b"t", timeout=5),
            "Deregister": lambda c: c.deregister(b"t", timeout=5),
        },
    ),
    run_service_pb2.DESCRIPTOR.services_by_name["RunService"]: (
        AsyncCoordinatorClient,
        {
            "GetRun": lambda c: c.get_run(timeout=5),
            "WatchRun": lambda c: c.watch_run(timeout=5),
            "GetWeightPlane": lambda c: c.get_weight_plane(timeout=5),
        },
    ),
}
METHODS = [(service.full_name, method.name) for service, (_, calls) in CALLS.items() for method in service.methods]


class Answering(grpc.GenericRpcHandler):
    """Answers every method of every service with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        streams = details.method.endswith(("Generate", "WatchLoad", "WatchStatus", "WatchRun"))
        if streams:
            return grpc.unary_stream_rpc_method_handler(self._stream)
        if details.method.endswith("TrainStep"):
            return grpc.stream_unary_rpc_method_handler(self._last)
        return grpc.unary_unary_rpc_method_handler(self._unary)

    async def _unary(self, request: bytes, context: Any) -> bytes:
        return self._answer

    async def _stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield self._answer

    async def _last(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        async for _ in requests:
            pass
        return self._answer


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[bytes], Any]]:
    servers: list[grpc.aio.Server] = []
    channels: list[grpc.aio.Channel] = []

    async def start(answer: bytes) -> grpc.aio.Channel:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers([Answering(answer)])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        servers.append(server)
        channels.append(open_channel(f"127.0.0.1:{port}", None))
        return channels[-1]

    yield start
    for channel in channels:
        await channel.close()
    for server in servers:
        await server.stop(0)


async def result(call: Any) -> Any:
    if inspect.isasyncgen(call):
        async with aclosing(call) as responses:
            return [response async for response in responses]
    return await call


def client_of(service: str, channel: grpc.aio.Channel) -> tuple[Any, dict[str, Callable[[Any], Any]]]:
    make, calls = next(found for descriptor, found in CALLS.items() if descriptor.full_name == service)
    return make(channel, peer="peer-7"), calls


def test_every_method_of_every_service_is_tried() -> None:
    for service, (_, calls) in CALLS.items():
        assert {method.name for method in service.methods} == set(calls), service.full_name


@pytest.mark.parametrize(("service", "method"), METHODS)
async def test_bytes_that_are_no_message_are_a_fault_of_the_peer(
    connect: Callable[[bytes], Any], service: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "grpc")  # it logs a traceback for each
    client, calls = client_of(service, await connect(GARBAGE))
    with pytest.raises(PeerFault, match=f"peer-7: .*{method}.*: the response is not the message") as fault:
        await result(calls[method](client))
    assert fault.value.reason == "MALFORMED_RESPONSE"


@pytest.mark.parametrize(("service", "method"), METHODS)
async def test_an_empty_message_is_an_answer_or_a_fault_and_nothing_else(
    connect: Callable[[bytes], Any], service: str, method: str
) -> None:
    client, calls = client_of(service, await connect(b""))
    try:
        async with asyncio.timeout(10):
            await result(calls[method](client))
    except FourfoldError as error:
        assert isinstance(error, PeerFault) and "peer-7: " in error.message


async def test_a_response_above_the_limit_is_a_fault_of_the_peer(connect: Callable[[bytes], Any]) -> None:
    client = AsyncRewardClient(await connect(bytes(17 << 20)), peer="reward-0")
    with pytest.raises(PeerFault, match="reward-0: Score: a response is larger than 16777216 bytes") as fault:
        await client.score([score_item("a")], timeout=5)
    assert fault.value.reason == "RESPONSE_TOO_LARGE"


@pytest.mark.parametrize(
    ("client", "call", "message"),
    [
        (AsyncRolloutClient, "get_info", rollout.GetInfoResponse),
        (AsyncRewardClient, "get_info", reward_service_pb2.GetInfoResponse),
        (AsyncReferenceClient, "get_info", reference_service_pb2.GetInfoResponse),
        (AsyncTrainerClient, "get_status", trainer_service_pb2.GetStatusResponse),
        (AsyncCoordinatorClient, "get_run", run_service_pb2.GetRunResponse),
    ],
)
async def test_another_major_version_of_the_contract_is_refused(
    connect: Callable[[bytes], Any], client: Any, call: str, message: Any
) -> None:
    answer = message(contract_version="999.0").SerializeToString()
    with pytest.raises(PeerFault, match=r"peer-7: .*the service has contract 999.0, .*: upgrade this client") as fault:
        await getattr(client(await connect(answer), peer="peer-7"), call)(timeout=5)
    assert fault.value.reason == "OTHER_CONTRACT"


async def test_strings_of_every_response_are_made_safe(connect: Callable[[bytes], Any]) -> None:
    info = rollout.GetInfoResponse(model="\x1b[2Jtiny\x07\u202e")
    client = AsyncRolloutClient(await connect(info.SerializeToString()), peer="peer-7")
    assert (await client.get_info(timeout=5)).model == "tiny"
    status = run_service_pb2.RunStatus(failure="\x1b[31mred", waiting_for="a\nb")
    watched = run_service_pb2.WatchRunResponse(status=status)
    watching = AsyncCoordinatorClient(await connect(watched.SerializeToString()), peer="peer-7").watch_run(timeout=5)
    (only,) = await result(watching)
    assert (only.failure, only.waiting_for) == ("red", "a b")
    trained = trainer_service_pb2.TrainStepResponse(step=1, skipped_reason="NO_\x1b[0mADVANTAGE")
    trainer = AsyncTrainerClient(await connect(trained.SerializeToString()), peer="peer-7")
    assert (await trainer.train_step(1, [encode(sample("a"))], timeout=5)).skipped_reason == "NO_ADVANTAGE"
