"""Calls in the checks of several services, and the rules of refused calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fourfold.errors import PeerFault
from fourfold.rpc.channel import translate_errors
from fourfold.rpc.status import DOMAIN, from_rpc
from fourfold.text import clean, is_reason
from fourfold_tools.conformance.checks import Violation

AnyMessage = TypeVar("AnyMessage", bound=Message)
# Field 1000, which no message has, with the text "new".
_UNKNOWN_FIELD: Final = b"\xc2\x3e\x03new"
# None of these errors shows that the service examined the request.
_NOT_LOOKED_AT: Final = frozenset({"UNAVAILABLE", "UNAUTHENTICATED", "PERMISSION_DENIED", "DEADLINE_EXCEEDED"})
# Reason of a call above the caller's rate limit; it is repeated after the retry delay.
_TOO_FAST: Final = "TOO_MANY_CALLS_PER_SECOND"
MOST_PAUSES: Final = 20
LONGEST_PAUSE: Final = 10.0  # seconds


@dataclass(frozen=True, slots=True)
class Refusal:
    """How a service refused a call."""

    code: str
    """Name of the gRPC status code."""
    reason: str
    retry_after: float | None
    """Seconds of the RetryInfo; None: there is none."""
    text: str


def with_unknown_field(message: AnyMessage) -> AnyMessage:
    """Return a copy of a message with a field that the contract does not have yet."""
    return type(message).FromString(message.SerializeToString() + _UNKNOWN_FIELD)


async def refuse(work: Awaitable[object], what: str, *codes: str, reason: str = "") -> Refusal:
    """Await a call that the service must refuse.

    Args:
        work: the call.
        what: the call in words, for the text of a violation.
        codes: names of the status codes that the contract allows.
        reason: the reason that the contract wants; empty: any.

    Raises:
        Violation: the call succeeded, or its error has another code, no details, or another reason.
        FourfoldError: the service cannot be reached, or refuses every call of this caller.
    """
    wanted = " or ".join(codes)
    try:
        await work
    except grpc.aio.AioRpcError as error:
        refusal, domain = _read(error)
        if refusal.code not in codes:
            if refusal.code in _NOT_LOOKED_AT:
                raise from_rpc(error, peer=what) from None
            raise Violation(f"{what} was refused with {refusal.code} ({refusal.text}); it must be {wanted}") from None
        if domain != DOMAIN or not is_reason(refusal.reason):
            raise Violation(
                f"{what} was refused with {refusal.code} without details; the status needs a google.rpc.ErrorInfo with "
                f"the domain {DOMAIN!r} and a reason in UPPER_SNAKE_CASE"
            ) from None
        if reason and refusal.reason != reason:
            raise Violation(f"{what} was refused with the reason {refusal.reason}; it must be {reason}") from None
        return refusal
    raise Violation(f"{what} was accepted; it must be refused with {wanted}")


def _read(error: grpc.aio.AioRpcError) -> tuple[Refusal, str]:
    """Return a refusal and the domain of its reason."""
    reason, domain, delay = "", "", None
    for key, value in error.trailing_metadata() or ():
        if key != "grpc-status-details-bin" or not isinstance(value, bytes):
            continue
        with suppress(DecodeError):
            for detail in Status.FromString(value).details:
                info, retry = ErrorInfo(), RetryInfo()
                if detail.Unpack(info):
                    reason, domain = info.reason, info.domain
                elif detail.Unpack(retry):
                    delay = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    text = clean(error.details() or "", 200)
    return Refusal(error.code().name, reason, delay, text), domain


class PatientStub:
    """The calls of a stub. One above the caller's limit of calls per second is made again after its retry delay."""

    def __init__(self, stub: Any, *, streams: Collection[str]) -> None:
        """Wrap a stub; `streams` are the names of its methods that stream responses."""
        self._stub, self._streams = stub, streams

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._stub, name)
        return partial(_PatientStream if name in self._streams else _call_patiently, method)


async def _call_patiently(method: Any, request: Message, **options: Any) -> Any:
    for _ in range(MOST_PAUSES):
        try:
            return await method(request, **options)
        except grpc.aio.AioRpcError as error:
            await _pause(error)
    return await method(request, **options)


class _PatientStream:
    """A streaming call. The limit refuses it before its first message."""

    def __init__(self, method: Any, request: Message, **options: Any) -> None:
        self._start = partial(method, request, **options)
        self._call: Any = None

    async def __aiter__(self) -> AsyncIterator[Any]:
        for number in range(MOST_PAUSES + 1):
            self._call = self._start()
            try:
                async for message in self._call:
                    yield message
                return
            except grpc.aio.AioRpcError as error:
                if number == MOST_PAUSES:
                    raise
                await _pause(error)

    def cancel(self) -> None:
        """Cancel the call."""
        if self._call is not None:
            self._call.cancel()


async def _pause(error: grpc.aio.AioRpcError) -> None:
    """Wait for the retry delay of a call that came too fast; raise any other error."""
    refusal, domain = _read(error)
    if (domain, refusal.reason) != (DOMAIN, _TOO_FAST) or not 0 < (refusal.retry_after or 0) <= LONGEST_PAUSE:
        raise error
    await asyncio.sleep(refusal.retry_after or 0)


def check_retry_delay(refusal: Refusal, what: str) -> None:
    """Raise Violation unless a RESOURCE_EXHAUSTED has a retry delay."""
    if refusal.retry_after is None or refusal.retry_after <= 0:
        raise Violation(
            f"{what} was refused with {refusal.code} without a retry delay; the status needs a google.rpc.RetryInfo "
            f"above 0, because without one the call counts as one that never succeeds"
        )


async def check_no_deadline(work: Awaitable[object], what: str, *, seconds: float) -> None:
    """Raise Violation unless a call without a deadline is refused. `seconds` limits the wait for that."""
    try:
        async with asyncio.timeout(seconds):
            await refuse(work, f"{what} without a deadline", "INVALID_ARGUMENT", reason="NO_DEADLINE")
    except TimeoutError:
        raise Violation(
            f"{what} without a deadline had no answer in {seconds:g} s; it must be INVALID_ARGUMENT"
        ) from None


async def check_health_of(channel: grpc.aio.Channel, service: str, *, seconds: float) -> None:
    """Raise Violation unless the health service answers SERVING for "" and for the full name of a service."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    for name in ("", service):
        try:
            response = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=seconds)
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            raise Violation(f"grpc.health.v1.Health/Check of {name!r} failed with {code}; it must be SERVING") from None
        if response.status != health_pb2.HealthCheckResponse.SERVING:
            status = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
            raise Violation(f"grpc.health.v1.Health/Check of {name!r} is {status}; it must be SERVING")


async def unary(method: Any, request: Message, *, peer: str, seconds: float) -> Any:
    """Make a call; raise its error as a FourfoldError. Texts of the response are not cleaned."""
    name = request.DESCRIPTOR.name.removesuffix("Request")
    with translate_errors(peer=peer, name=name, timeout=seconds):
        response = await method(request, timeout=seconds)
    if response is None:  # grpc.aio returns None for bytes that it cannot parse
        raise PeerFault(peer, "MALFORMED_RESPONSE", f"{name}: the response is not the message of this method")
    return response


async def collect(call: Any) -> list[Any]:
    """Return all messages of a streaming call; raise AioRpcError."""
    return [message async for message in call]


def check_model(info: Any) -> None:
    """Raise Violation unless the fields that every GetInfo with a model has are valid."""
    if not info.model:
        raise Violation("model is empty; it must be the name of the model as configured")
    if len(info.tokenizer_sha256) != 32:
        raise Violation(f"tokenizer_sha256 has {len(info.tokenizer_sha256)} bytes; it must have 32")
    for name in ("max_context_tokens", "vocabulary_size"):
        if getattr(info, name) < 2:
            raise Violation(f"{name} is {getattr(info, name)}; it must be at least 2")


def check_tokenizer_is(ours: bytes, theirs: bytes) -> None:
    """Raise Violation when the hashes of two tokenizers differ."""
    if theirs != ours:
        raise Violation(
            f"tokenizer_sha256 is {theirs.hex()[:12]}..., and that of the model is {ours.hex()[:12]}...: SHA-256 over "
            f"the SHA-256 of tokenizer.json and of the chat template"
        )
