"""What conformance counts as a correct refusal, and responses that are no messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from fourfold.errors import FourfoldError, InvalidInput, Overloaded, PeerFault, Unavailable
from fourfold.reward.v1 import reward_service_pb2 as pb
from fourfold.rpc.status import to_status
from fourfold_tools.conformance.calls import check_retry_delay, refuse, unary, with_unknown_field
from fourfold_tools.conformance.checks import Violation

Answer = Callable[[grpc.aio.ServicerContext[Any, Any]], Any]


def refusing(error: FourfoldError, *, details: bool = True) -> Answer:
    async def answer(context: grpc.aio.ServicerContext[Any, Any]) -> None:
        trailing = (("grpc-status-details-bin", to_status(error).SerializeToString()),) if details else ()
        await context.abort(grpc.StatusCode[error.code], error.message, trailing)

    return answer


async def garbage(context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
    return b"\xff\xff\xff"


async def fine(context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
    return b""


@pytest.fixture
async def call() -> AsyncIterator[Callable[[Answer], Any]]:
    """Return a function that makes a method of a server with the given answer."""
    answers: list[Answer] = []

    async def handle(_request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        return await answers[-1](context)

    handler: Any = grpc.unary_unary_rpc_method_handler(handle)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"GetInfo": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        method: Any = channel.unary_unary(
            "/test.Service/GetInfo",
            request_serializer=pb.GetInfoRequest.SerializeToString,
            response_deserializer=pb.GetInfoResponse.FromString,
        )

        def make(answer: Answer) -> Any:
            answers.append(answer)
            return method

        yield make
    await server.stop(0)


async def test_a_refusal_needs_the_code_details_and_the_reason(call: Any) -> None:
    error = InvalidInput("no", reason="NO_DEADLINE")
    request = pb.GetInfoRequest()
    refusal = await refuse(call(refusing(error))(request, timeout=5), "it", "INVALID_ARGUMENT", reason="NO_DEADLINE")
    assert (refusal.code, refusal.reason) == ("INVALID_ARGUMENT", "NO_DEADLINE")
    for answer, codes, reason, said in (
        (fine, ["INVALID_ARGUMENT"], "", "was accepted"),
        (refusing(error), ["NOT_FOUND"], "", "must be NOT_FOUND"),
        (refusing(error), ["INVALID_ARGUMENT"], "OTHER", "it must be OTHER"),
        (refusing(error, details=False), ["INVALID_ARGUMENT"], "", "without details"),
    ):
        with pytest.raises(Violation, match=said):
            await refuse(call(answer)(request, timeout=5), "it", *codes, reason=reason)


async def test_a_service_that_is_unavailable_is_no_violation(call: Any) -> None:
    with pytest.raises(Unavailable):
        await refuse(call(refusing(Unavailable("no")))(pb.GetInfoRequest(), timeout=5), "it", "INVALID_ARGUMENT")


async def test_back_pressure_needs_a_retry_delay(call: Any) -> None:
    for delay, good in ((0.5, True), (None, False), (0.0, False)):
        work = call(refusing(Overloaded("full", retry_after=delay)))(pb.GetInfoRequest(), timeout=5)
        refusal = await refuse(work, "it", "RESOURCE_EXHAUSTED")
        if good:
            check_retry_delay(refusal, "it")
        else:
            with pytest.raises(Violation, match="without a retry delay"):
                check_retry_delay(refusal, "it")


async def test_bytes_that_are_no_message_are_a_fault_of_the_peer(call: Any) -> None:
    with pytest.raises(PeerFault, match="not the message of this method"):
        await unary(call(garbage), pb.GetInfoRequest(), peer="it", seconds=5)


def test_an_unknown_field_survives_encoding() -> None:
    request = with_unknown_field(pb.GetInfoRequest())
    assert request.SerializeToString() and not request.ListFields()
