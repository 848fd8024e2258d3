"""Checks of every call before its servicer (caller, limits, deadline), and errors on the way out.

One interceptor does all of it, because each layer costs time per call. It wraps a handler once, at the first call of
its method. The checks come before the request is read: gRPC keeps an unfinished message in memory, so a caller without
a valid token must not be able to send one. For that every handler is given to gRPC as one that reads a stream, and the
single request of a unary call is read here.

Watches, health and reflection need no deadline. A servicer raises errors of `fourfold.errors`; anything else is our
bug: the traceback goes to the log and the caller sees "internal error".
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, aclosing, contextmanager, suppress
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from fourfold.errors import (
    DeadlinePassed,
    FourfoldError,
    Internal,
    InvalidInput,
    Overloaded,
    PermissionDenied,
    Unauthenticated,
)
from fourfold.rpc.call_slots import CallSlots, is_probe, is_watch
from fourfold.rpc.quota import Quotas
from fourfold.rpc.refusals import RefusalLog
from fourfold.rpc.status import to_status
from fourfold.security.access import Security, check_identity
from fourfold.security.principal import LOCAL, LOCAL_AGENT, Principal, current, set_current
from fourfold.security.tokens import check_token

log = logging.getLogger("fourfold.rpc.server")

_HEALTH: Final = "grpc.health.v1.Health"
_DRAIN_SECONDS: Final = 10.0
# A message of the largest size arrives within this time over 5 Mbit/s.
_REQUEST_SECONDS: Final = 30.0
_PROBE_SECONDS: Final = 5.0
_PROBE_BYTES: Final = 1024

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Authorize = Callable[[str, str, Context], Principal]
"""Takes the full name of a service, a method and a call's context; returns the caller, or raises FourfoldError to
refuse."""
Admit = Callable[[Context], AbstractContextManager[None]]
"""Checks a call, and holds its place while the block runs."""
Read = Callable[[Any, Context], Awaitable[Any]]
"""Takes what gRPC gives a handler that reads a stream; returns what the servicer gets as its request."""


class Guard(grpc.aio.ServerInterceptor):
    """Authorises, limits, requires a deadline, and maps errors, for all four kinds of calls."""

    def __init__(self, authorize: Authorize, slots: CallSlots, quotas: Quotas, refusals: RefusalLog) -> None:
        self._authorize = authorize
        self._slots = slots
        self._quotas = quotas
        self._refusals = refusals
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the wrapped handler of the method; an unknown method is UNIMPLEMENTED."""
        method = handler_call_details.method
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            wrapped = self._wrapped[method] = _wrap(method, handler, self._admission(method), self._refusals)
        return wrapped

    def _admission(self, method: str) -> Admit:
        service, name = _split(method)
        watch, probe = is_watch(name), is_probe(service)

        @contextmanager
        def admit(context: Context) -> Iterator[None]:
            principal = self._authorize(service, name, context)
            set_current(principal)
            if not (watch or probe) and context.time_remaining() is None:
                raise InvalidInput(
                    f"{name} was called without a deadline; pass a timeout with the call", reason="NO_DEADLINE"
                )
            with ExitStack() as held:
                held.enter_context(self._slots.enter(service, name, principal))
                if not probe:  # these are open to callers without a token, who are one principal
                    held.enter_context(self._quotas.call(principal, is_watch=watch))
                yield

        return admit


def authorize_certificate(security: Security) -> Authorize:
    """Policy of the internal port: the principal in the caller's certificate decides."""

    def authorize(service: str, _method: str, context: Context) -> Principal:
        peer = context.auth_context()
        identities = peer.get("peer_spiffe_id", ())
        caller = check_identity(service, [uri.decode(errors="replace") for uri in identities])
        security.check_not_revoked(caller, list(peer.get("x509_pem_cert", ())))
        return caller

    return authorize


def authorize_loopback(principal: Principal) -> Authorize:
    """Policy of a port without TLS, which listens on loopback only: every caller is `principal`."""
    return lambda _service, _method, _context: principal


def authorize_token(security: Security) -> Authorize:
    """Policy of the public port: a bearer token for everything but health."""

    def authorize(service: str, method: str, context: Context) -> Principal:
        if service == _HEALTH:
            return LOCAL_AGENT
        values = [v for k, v in context.invocation_metadata() or () if k == "authorization"]
        if len(values) != 1 or not isinstance(values[0], str):
            raise Unauthenticated("no bearer token; send the metadata `authorization: Bearer TOKEN`", reason="NO_TOKEN")
        return Principal("agent", check_token(values[0], method, security.tokens).name)

    return authorize


def _split(method: str) -> tuple[str, str]:
    service, _, name = method.removeprefix("/").rpartition("/")
    return service, name


def _wrap(method: str, handler: Handler, admit: Admit, refusals: RefusalLog) -> Handler:
    """Return a handler that reads requests by itself, with the checks before it and the error table after it."""
    behavior: Any = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream  # one is set
    )
    streams = handler.request_streaming
    read = _read_all if streams else _read_one(method, handler.request_deserializer)
    if handler.response_streaming:
        wrapped: Any = _streaming(method, behavior, read, admit, refusals)
        make: Any = grpc.stream_stream_rpc_method_handler
    else:
        wrapped = _unary(method, behavior, read, admit, refusals, drain=streams)
        make = grpc.stream_unary_rpc_method_handler
    # gRPC would answer bytes that are no message with UNKNOWN and the text of the exception.
    deserialize = handler.request_deserializer if streams else None
    result: Handler = make(wrapped, request_deserializer=deserialize, response_serializer=handler.response_serializer)
    return result


async def _read_all(requests: Any, _context: Context) -> Any:
    return requests


def _read_one(method: str, deserialize: Any) -> Read:
    probe = is_probe(_split(method)[0])
    seconds = _PROBE_SECONDS if probe else _REQUEST_SECONDS

    async def read_one(_requests: Any, context: Context) -> Any:
        try:
            async with asyncio.timeout(seconds):
                data: Any = await context.read()
        except TimeoutError:
            raise DeadlinePassed(f"the request did not arrive within {seconds:g} s; send it at once") from None
        if data is grpc.aio.EOF:
            raise InvalidInput("the call ended before a whole request; send one message")
        if probe and len(data) > _PROBE_BYTES:
            raise InvalidInput(f"the request has {len(data)} bytes; it may have {_PROBE_BYTES}")
        return deserialize(data)

    return read_one


def _unary(method: str, behavior: Any, read: Read, admit: Admit, refusals: RefusalLog, *, drain: bool) -> Any:
    async def unary(requests: Any, context: Context) -> Any:
        admitted = False
        try:
            with admit(context):
                admitted = True
                return await behavior(await read(requests, context), context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # the boundary of a call; CancelledError is no Exception and passes
            if drain and admitted:
                await _read_to_the_end(context)
            await _abort(method, context, error, refusals)

    return unary


def _streaming(method: str, behavior: Any, read: Read, admit: Admit, refusals: RefusalLog) -> Any:
    # Writing here, and not yielding, means that a cancelled call is cancelled inside this
    # function: the servicer's generator is closed at once, not when the collector finds it.
    async def streaming(requests: Any, context: Context) -> None:
        try:
            with admit(context):
                responses = behavior(await read(requests, context), context)
                if inspect.isawaitable(responses):
                    await responses
                    return
                generator: AsyncIterator[Any]
                async with aclosing(responses) as generator:
                    async for response in generator:
                        await context.write(response)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # the boundary of a call; CancelledError is no Exception and passes
            await _abort(method, context, error, refusals)

    return streaming


async def _read_to_the_end(context: Context) -> None:
    """Take what the client still sends: a Python client whose write fails never sees the status (grpc#36066)."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            while True:
                with suppress(DecodeError):
                    if await context.read() is grpc.aio.EOF:
                        return


async def _abort(method: str, context: Context, error: Exception, refusals: RefusalLog) -> None:
    """End the call with the status of `error`."""
    # A generated base class, such as that of Health.List, sets this code and raises; PyTorch raises the same class.
    if isinstance(error, NotImplementedError) and context.code() is grpc.StatusCode.UNIMPLEMENTED:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not implemented here")
    known = _known(error)
    if known is None or isinstance(known, Internal):
        log.error("%s failed", method, exc_info=error)
        known = Internal("internal error")
    elif isinstance(known, Unauthenticated | PermissionDenied | Overloaded):
        peer = context.peer()
        # Before authentication only the caller's address is known; its port differs from call to call.
        caller = peer.rpartition(":")[0] if current() == LOCAL else str(current())
        refusals.add(method, known, caller=caller, peer=peer)
    status = to_status(known)
    await context.abort(
        grpc.StatusCode[known.code],
        status.message,
        (("grpc-status-details-bin", status.SerializeToString()),),
    )


def _known(error: BaseException) -> FourfoldError | None:
    """Return the error that is meant for the caller, also out of a group in which all are, or None."""
    if isinstance(error, FourfoldError):
        return error
    if isinstance(error, DecodeError):
        return InvalidInput("the request is not a valid message of this method; use the protos of this version")
    if isinstance(error, BaseExceptionGroup):
        known = [_known(e) for e in error.exceptions]
        if None not in known:
            return known[0]
    return None
