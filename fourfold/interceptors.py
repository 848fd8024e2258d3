"""What every call passes on its way into a servicer: who calls, is there a deadline, and errors on the way out.

One interceptor does all three, because each layer costs time per call. It wraps a handler
once, at the first call of its method. `Watch...` methods, health and reflection need no
deadline. A servicer raises errors of `fourfold.errors`; anything else is our bug: the
traceback goes to the log and the caller sees "internal error". Who is refused is logged, too.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from fourfold.errors import FourfoldError, Internal, InvalidInput, PermissionDenied, Unauthenticated
from fourfold.principal import LOCAL_AGENT, Principal, set_current
from fourfold.security import check_identity, check_token
from fourfold.status import to_status

log = logging.getLogger("fourfold.server")

_HEALTH: Final = "grpc.health.v1.Health"
_REFLECTION: Final = "grpc.reflection.v1alpha.ServerReflection"
_DRAIN_SECONDS: Final = 10.0

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Authorize = Callable[[str, Context], Principal]
"""Takes the full name of a service and a call's context; returns the caller, or raises FourfoldError to refuse."""


class Guard(grpc.aio.ServerInterceptor):
    """Authorises, requires a deadline, and maps errors, for all four kinds of calls."""

    def __init__(self, authorize: Authorize) -> None:
        self._authorize = authorize
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
            wrapped = self._wrapped[method] = _wrap(method, handler, self._checks(method))
        return wrapped

    def _checks(self, method: str) -> Callable[[Context], None]:
        service, name = _split(method)
        authorize = self._authorize
        needs_deadline = not (name.startswith("Watch") or service in (_HEALTH, _REFLECTION))

        def check(context: Context) -> None:
            set_current(authorize(service, context))
            if needs_deadline and context.time_remaining() is None:
                raise InvalidInput(
                    f"{name} was called without a deadline; pass a timeout with the call", reason="NO_DEADLINE"
                )

        return check


def authorize_certificate(service: str, context: Context) -> Principal:
    """Policy of the internal port: the identity in the caller's certificate decides."""
    identities = context.auth_context().get("peer_spiffe_id", ())
    return check_identity(service, [uri.decode(errors="replace") for uri in identities])


def authorize_loopback(principal: Principal) -> Authorize:
    """Policy of a port without TLS, which listens on loopback only: every caller is `principal`."""
    return lambda _service, _context: principal


def authorize_token(tokens: Any) -> Authorize:
    """Policy of the public port: a bearer token for everything but health."""

    def authorize(service: str, context: Context) -> Principal:
        if service == _HEALTH:
            return LOCAL_AGENT
        values = [v for k, v in context.invocation_metadata() or () if k == "authorization"]
        if len(values) != 1 or not isinstance(values[0], str):
            raise Unauthenticated("no bearer token; send the metadata `authorization: Bearer TOKEN`")
        return Principal("agent", check_token(values[0], tokens))

    return authorize


def _split(method: str) -> tuple[str, str]:
    service, _, name = method.removeprefix("/").rpartition("/")
    return service, name


def _wrap(method: str, handler: Handler, check: Callable[[Context], None]) -> Handler:
    """Return a handler of the same kind with the checks before it and the error table after it."""
    behavior: Any = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream  # one is set
    )
    deserialize: Any = handler.request_deserializer
    if not handler.request_streaming:
        # gRPC would answer bytes that are no message with UNKNOWN and the text of the exception.
        behavior, deserialize = _decoding(behavior, handler.request_deserializer), None
    if handler.response_streaming:
        wrapped: Any = _streaming(method, behavior, check)
    else:
        wrapped = _unary(method, behavior, check, drain=handler.request_streaming)
    kinds: dict[tuple[bool, bool], Any] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make = kinds[handler.request_streaming, handler.response_streaming]
    result: Handler = make(wrapped, request_deserializer=deserialize, response_serializer=handler.response_serializer)
    return result


def _decoding(behavior: Any, deserialize: Any) -> Any:
    def decoding(data: bytes, context: Context) -> Any:
        return behavior(deserialize(data), context)

    return decoding


def _unary(method: str, behavior: Any, check: Callable[[Context], None], *, drain: bool) -> Any:
    async def unary(request: Any, context: Context) -> Any:
        checked = False
        try:
            check(context)
            checked = True
            return await behavior(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # the boundary of a call; CancelledError is no Exception and passes
            if drain and checked:
                await _read_to_the_end(context)
            await _abort(method, context, error)

    return unary


def _streaming(method: str, behavior: Any, check: Callable[[Context], None]) -> Any:
    # Writing here, and not yielding, means that a cancelled call is cancelled inside this
    # function: the servicer's generator is closed at once, not when the collector finds it.
    async def streaming(request: Any, context: Context) -> None:
        try:
            check(context)
            responses = behavior(request, context)
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
            await _abort(method, context, error)

    return streaming


async def _read_to_the_end(context: Context) -> None:
    """Take what the client still sends: a Python client whose write fails never sees the status (grpc#36066)."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            while True:
                with suppress(DecodeError):
                    if await context.read() is grpc.aio.EOF:
                        return


async def _abort(method: str, context: Context, error: Exception) -> None:
    """End the call with the status of `error`."""
    if isinstance(error, NotImplementedError):  # of a generated base class, such as Health.List
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not implemented here")
    known = _known(error)
    if known is None or isinstance(known, Internal):
        log.error("%s failed", method, exc_info=error)
        known = Internal("internal error")
    elif isinstance(known, Unauthenticated | PermissionDenied):
        log.warning("%s refused to %s: %s", method, context.peer(), known)
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
