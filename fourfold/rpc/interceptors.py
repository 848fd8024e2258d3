"""Checks every call before its servicer runs (caller, limits, deadline), and maps errors to gRPC statuses.

One interceptor does all of it, because each layer costs time per call. It wraps a handler once, at the first call of
its method. A servicer raises errors of `fourfold.errors`. Any other exception is a bug: the traceback goes to the log,
and the caller receives "internal error".
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    ExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
    suppress,
)
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
from fourfold.host.clock import SYSTEM_CLOCK, Clock
from fourfold.rpc.call_stats import CallRecord, CallStats
from fourfold.rpc.limits import CallSlots, Quotas, is_probe, is_watch
from fourfold.rpc.status import to_status
from fourfold.security.access import Security, check_identity
from fourfold.security.principal import LOCAL, LOCAL_AGENT, Principal, current, set_current
from fourfold.security.tokens import check_token
from fourfold.text import clean
from fourfold.tracing import propagation, spans

log = logging.getLogger("fourfold.rpc.server")

REFUSAL_INTERVAL_SECONDS: Final = 60.0
_MAX_REFUSAL_KINDS: Final = 1000
_MAX_REFUSAL_TEXT: Final = 300
_HEALTH: Final = "grpc.health.v1.Health"
_DRAIN_SECONDS: Final = 10.0
# Enough for a message of the largest size over 5 Mbit/s.
_REQUEST_SECONDS: Final = 30.0
# When a deadline passes, the client's cancellation may arrive some milliseconds before the server's own timer fires.
_DEADLINE_SLACK_SECONDS: Final = 0.1
_PROBE_SECONDS: Final = 5.0
_PROBE_BYTES: Final = 1024

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
# Takes a service's full name, a method's name and a call's context; returns the caller or raises FourfoldError.
Authorize = Callable[[str, str, Context], Principal]
# Admits a call, holds its slots while the block runs, and turns an exception of the block into a status.
Guard = Callable[[Context], AbstractAsyncContextManager[None]]
# Takes the request iterator and the context of a call; returns the servicer's first argument.
ReadRequest = Callable[[Any, Context], Awaitable[Any]]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Authorizes, limits and times out calls, and maps errors, for unary and streaming methods."""

    def __init__(
        self, authorize: Authorize, slots: CallSlots, quotas: Quotas, refusals: RefusalLog, stats: CallStats
    ) -> None:
        self._authorize = authorize
        self._slots = slots
        self._quotas = quotas
        self._refusals = refusals
        self._stats = stats
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the wrapped handler of the method; None makes gRPC answer UNIMPLEMENTED."""
        method = handler_call_details.method
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            wrapped = self._wrapped[method] = self._wrap(method, handler)
        return wrapped

    def _wrap(self, method: str, handler: Handler) -> Handler:
        """Return a guarded handler that gRPC treats as one with a request stream.

        gRPC reads the request of a unary handler before it calls the handler, and keeps an unfinished message in
        memory. With a stream handler the checks come first, so a caller without a valid token cannot send a request.
        """
        # Exactly one of these is set.
        behavior: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        streams = handler.request_streaming
        read = _read_all if streams else _read_one(method, handler.request_deserializer)
        guard = self._guard(method, drain=streams and not handler.response_streaming)
        if handler.response_streaming:
            wrapped: Any = _streaming(behavior, read, guard)
            make: Any = grpc.stream_stream_rpc_method_handler
        else:
            wrapped = _unary(behavior, read, guard)
            make = grpc.stream_unary_rpc_method_handler
        # `_read_one` deserializes by itself: gRPC would answer malformed bytes with UNKNOWN and the exception's text.
        deserialize = handler.request_deserializer if streams else None
        result: Handler = make(
            wrapped, request_deserializer=deserialize, response_serializer=handler.response_serializer
        )
        return result

    def _guard(self, method: str, *, drain: bool) -> Guard:
        service, name = _split(method)
        watch, probe, label = is_watch(name), is_probe(service), f"{service}/{name}"

        def admit(context: Context, held: ExitStack) -> None:
            principal = self._authorize(service, name, context)
            set_current(principal)
            if not (watch or probe) and context.time_remaining() is None:
                raise InvalidInput(
                    f"{name} was called without a deadline; pass a timeout with the call", reason="NO_DEADLINE"
                )
            held.enter_context(self._slots.enter(service, name, principal))
            if not probe:  # probes are open to callers without a token, and all of those share one principal
                held.enter_context(self._quotas.call(principal, is_watch=watch))

        @asynccontextmanager
        async def guard(context: Context) -> AsyncIterator[None]:
            with ExitStack() as held:
                record = held.enter_context(self._stats.call(label))
                admitted = False
                try:
                    admit(context, held)
                    admitted = True
                    if spans.enabled():
                        held.enter_context(_traced(context, label, record))
                    yield
                except grpc.aio.AbortError:
                    record.code = _code_name(context)
                    raise
                except asyncio.CancelledError:  # the client has left, or the deadline has passed
                    left = context.time_remaining()
                    cancelled = left is None or left > _DEADLINE_SLACK_SECONDS
                    record.code = "CANCELLED" if cancelled else "DEADLINE_EXCEEDED"
                    raise
                except Exception as error:  # the request boundary; CancelledError is a BaseException and passes
                    # The slot is still held, so that a slow sender counts towards the limits.
                    if drain and admitted:
                        await _read_to_the_end(context)
                    await self._abort(method, context, error, record)

        return guard

    async def _abort(self, method: str, context: Context, error: Exception, record: CallRecord) -> None:
        """End the call with the status of `error`."""
        # A generated base class (e.g. of Health.List) sets this code before its NotImplementedError. PyTorch uses the
        # same exception for unsupported operations; that is a bug of ours.
        if isinstance(error, NotImplementedError) and context.code() is grpc.StatusCode.UNIMPLEMENTED:
            record.code = "UNIMPLEMENTED"
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not implemented here")
        known = _caller_facing(error)
        if known is None or isinstance(known, Internal):
            log.error("%s failed", method, exc_info=error)
            known = Internal("internal error")
        elif isinstance(known, Unauthenticated | PermissionDenied | Overloaded):
            peer = context.peer()
            # Before authentication only the address is known. Its port is cut off because it differs between calls.
            caller = peer.rpartition(":")[0] if current() == LOCAL else str(current())
            self._refusals.add(method, known, caller=caller, peer=peer)
            self._stats.refuse(known.reason)
        record.code = known.code
        status = to_status(known)
        await context.abort(
            grpc.StatusCode[known.code], status.message, (("grpc-status-details-bin", status.SerializeToString()),)
        )


def authorize_certificate(security: Security) -> Authorize:
    """Return the check of an internal port: the caller's certificate names the principal."""

    def authorize(service: str, _method: str, context: Context) -> Principal:
        peer = context.auth_context()
        identities = peer.get("peer_spiffe_id", ())
        caller = check_identity(service, [uri.decode(errors="replace") for uri in identities])
        security.check_not_revoked(caller, list(peer.get("x509_pem_cert", ())))
        return caller

    return authorize


def authorize_loopback(principal: Principal) -> Authorize:
    """Return the check of a port without TLS. Such a port listens on loopback, and every caller is `principal`."""
    return lambda _service, _method, _context: principal


def authorize_token(security: Security) -> Authorize:
    """Return the check of a public port: health is open, every other service needs a bearer token."""

    def authorize(service: str, method: str, context: Context) -> Principal:
        if service == _HEALTH:
            return LOCAL_AGENT
        values = [v for k, v in context.invocation_metadata() or () if k == "authorization"]
        header = values[0] if len(values) == 1 and isinstance(values[0], str) else ""
        return Principal("agent", check_token(header, method, security.tokens).name)

    return authorize


@contextmanager
def _traced(context: Context, method: str, record: CallRecord) -> Iterator[None]:
    """Make the spans of a call, in the traces that its caller records."""
    attributes = {"rpc.system.name": "grpc", "rpc.method": method}
    with propagation.incoming(context.invocation_metadata(), method, attributes) as work:
        try:
            yield
        finally:
            work.set({"rpc.response.status_code": record.code})
            work.end_all(error=None if record.code == "OK" else record.code)


def _code_name(context: Context) -> str:
    """Return the name of the status with which a servicer has aborted a call."""
    code: Any = context.code()
    known = next((status for status in grpc.StatusCode if code in (status, status.value[0])), grpc.StatusCode.UNKNOWN)
    return known.name


def _split(method: str) -> tuple[str, str]:
    service, _, name = method.removeprefix("/").rpartition("/")
    return service, name


async def _read_all(requests: Any, _context: Context) -> Any:
    return requests


def _read_one(method: str, deserialize: Any) -> ReadRequest:
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


def _unary(behavior: Any, read: ReadRequest, guard: Guard) -> Any:
    async def unary(requests: Any, context: Context) -> Any:
        async with guard(context):
            return await behavior(await read(requests, context), context)

    return unary


def _streaming(behavior: Any, read: ReadRequest, guard: Guard) -> Any:
    # This handler writes to the context and does not yield, so that the cancellation of a call arrives inside this
    # function. It closes the servicer's generator at once; otherwise the garbage collector would close it later.
    async def streaming(requests: Any, context: Context) -> None:
        async with guard(context):
            responses = behavior(await read(requests, context), context)
            if inspect.isawaitable(responses):
                await responses
                return
            generator: AsyncIterator[Any]
            async with aclosing(responses) as generator:
                async for response in generator:
                    await context.write(response)

    return streaming


async def _read_to_the_end(context: Context) -> None:
    """Discard the rest of the request stream: a Python client whose write fails never sees the status (grpc#36066)."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            while True:
                with suppress(DecodeError):
                    if await context.read() is grpc.aio.EOF:
                        return


def _caller_facing(error: BaseException) -> FourfoldError | None:
    """Return the caller-facing error; unwrap an ExceptionGroup if all its members are caller-facing errors."""
    if isinstance(error, FourfoldError):
        return error
    if isinstance(error, DecodeError):
        return InvalidInput("the request is not a valid message of this method; use the protos of this version")
    if isinstance(error, BaseExceptionGroup):
        known = [_caller_facing(e) for e in error.exceptions]
        if None not in known:
            return known[0]
    return None


class RefusalLog:
    """Logs refused calls at a bounded rate and with bounded memory.

    A refusal's kind is its method, reason and caller. The first refusal of a kind is logged at once, the others as a
    count per interval: a client that is refused a thousand times a second must not fill the disk.
    """

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._logged: dict[tuple[str, str, str], float] = {}  # monotonic time of the logged refusal of each kind
        self._counts: Counter[tuple[str, str, str]] = Counter()  # refusals since then

    def add(self, method: str, error: FourfoldError, *, caller: str, peer: str) -> None:
        """Log or count a refusal of `method` (full name) to `peer` (address and port).

        `caller` is a principal, or the address without port of a caller without a valid token.
        """
        self.flush(ended_only=True)
        kind = (method, error.reason, caller)
        if kind not in self._logged and len(self._logged) >= _MAX_REFUSAL_KINDS:
            kind = ("other methods", "other reasons", "other callers")
        if kind in self._logged:
            self._counts[kind] += 1
            return
        self._logged[kind] = self._clock.monotonic()
        texts = (clean(text, _MAX_REFUSAL_TEXT) for text in (caller, peer, error.message))
        log.warning("%s refused to %s at %r: %s", method, *texts)

    def flush(self, *, ended_only: bool = False) -> None:
        """Log and forget the counts of all kinds, or only of those whose interval is over."""
        now = self._clock.monotonic()
        for kind, start in list(self._logged.items()):
            if ended_only and now - start < REFUSAL_INTERVAL_SECONDS:
                break  # the dict is ordered by start
            del self._logged[kind]
            if count := self._counts.pop(kind, 0):
                method, reason, caller = kind
                text = "%s refused %d more times to %s in %.0f s: %s"
                log.warning(text, method, count, clean(caller, _MAX_REFUSAL_TEXT), now - start, reason)
