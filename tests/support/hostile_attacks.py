"""Attacks on the two public ports of a gateway, each with the errors that it must get.

An outcome is the status and the reason of the error, such as "413 request_error" or "PERMISSION_DENIED TOKEN_SCOPE",
and "retry" if the error tells when to come back.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import grpc

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.agent.v1.agent_service_pb2_grpc import AgentServiceStub
from fourfold.rpc.channel import open_channel
from fourfold.rpc.status import from_rpc
from tests.security.raw_http2 import RawConnection, leave_unfinished

_CHAT: Final = "POST /v1/chat/completions HTTP/1.1"
_SERVICE: Final = "/fourfold.agent.v1.AgentService"
_LONG_SECONDS: Final = 60.0
_CALL_SECONDS: Final = 20.0
_IDLE_SECONDS: Final = 3600
_DRIP_SECONDS: Final = 0.5
_UNFINISHED_CALLS: Final = 64
_UNFINISHED_BYTES: Final = 1 << 18
_WATCHES: Final = 40
_BURST: Final = 200  # a connection of the public port has 256 streams
_BUSY: Final = "503 unavailable retry"
CLOSED: Final = "closed without an answer"
_INVALID: Final = "400 request_error"
_RATE: Final = "TOO_MANY_CALLS_PER_SECOND retry"
_COUNT: Final = "TOO_MANY_CALLS retry"
LIMITS: Final = frozenset({_BUSY, *(f"RESOURCE_EXHAUSTED {each}" for each in (_RATE, _COUNT))}) | {
    f"429 {each.lower()}" for each in (_RATE, _COUNT)
}
"""Outcomes that every attack may have, because another one uses up the connections or the calls of the client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostilePlan:
    """What the hostile client attacks. All fields are JSON values."""

    http: str
    """host:port of the HTTP API."""
    public: str
    """host:port of AgentService for agents."""
    max_body_bytes: int
    """Of the gateway."""
    flood: int
    """Connections that are opened at once; more than the gateway takes."""
    sessions: int
    """Sessions that are opened in all."""
    sessions_per_second: float
    pause: float
    """Seconds between two attacks of one kind."""


Attack = Callable[["Attacker"], Awaitable[list[str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackKind:
    """One attack, the outcomes that it may have, and its pause relative to that of the plan."""

    run: Attack
    outcomes: frozenset[str]
    pause: float = 1.0
    seconds: float = 0.0
    """The gateway ends it after this time."""


class Attacker:
    """The connections of one hostile client."""

    def __init__(self, plan: HostilePlan) -> None:
        self.plan = plan
        self._channel: grpc.aio.Channel | None = None
        self._numbers = itertools.count()

    def name(self) -> str:
        """Return a new session id."""
        return f"hostile-{os.getpid()}-{next(self._numbers)}"

    # -- gRPC ---------------------------------------------------------------------------------------------------------

    def channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = open_channel(self.plan.public, None)
        return self._channel

    def stub(self) -> Any:
        return AgentServiceStub(self.channel())

    async def open_session(self) -> pb.OpenSessionResponse:
        """Open a session without a task, that expires in an hour."""
        request = pb.OpenSessionRequest(session_id=self.name())
        request.idle_timeout.FromSeconds(_IDLE_SECONDS)
        response: pb.OpenSessionResponse = await self.stub().OpenSession(request, timeout=_CALL_SECONDS)
        return response

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
        self._channel = None

    # -- HTTP ---------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Open a connection to the HTTP port, and cut it at the end."""
        host, _, port = self.plan.http.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def exchange(self, *pieces: bytes, every: float = 0.0) -> list[str]:
        """Send pieces on a new connection, `every` so many seconds; return the outcome."""

        async def send(writer: asyncio.StreamWriter) -> None:
            with suppress(OSError):  # the answer tells why
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(every)

        try:
            async with self.connection() as (reader, writer), asyncio.timeout(_LONG_SECONDS):
                sending = asyncio.create_task(send(writer))
                try:
                    return [await read_outcome(reader)]
                finally:
                    sending.cancel()
        except OSError:
            return [CLOSED]

    def post(
        self,
        body: bytes,
        *headers: str,
        line: str = _CHAT,
        length: int | None = None,
        key: str = "",
    ) -> bytes:
        """Return a request, with a key or without one."""
        lines = [line, "host: 127.0.0.1", f"content-length: {len(body) if length is None else length}", *headers]
        lines += [f"authorization: Bearer {key}"] if key else []
        if not any(header.startswith("content-type") for header in headers):
            lines.append("content-type: application/json")
        return "\r\n".join([*lines, "", ""]).encode() + body


async def read_outcome(reader: asyncio.StreamReader) -> str:
    """Read one response; return its outcome, without a reason for a response that is no error."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
    except (asyncio.IncompleteReadError, OSError):
        return CLOSED
    status = head.split(" ", 2)[1]
    if status == "200":
        return status
    error = body["error"]
    assert error["message"], "an error without a message"
    return f"{status} {error.get('code')}" + " retry" * ("retry-after" in headers)


def code_of(error: grpc.aio.AioRpcError) -> str:
    """Return the outcome of a failed call."""
    known = from_rpc(error, peer="gateway")
    assert known.message, "an error without a message"
    reason = known.reason if known.reason != known.code else ""
    return f"{known.code} {reason}".rstrip() + " retry" * (known.retry_after is not None)


async def outcome(call: Awaitable[Any]) -> str:
    """Wait for a call; return its outcome."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return code_of(error)
    return "OK"


# -- bodies and headers ------------------------------------------------------------------------------------------------


def _http(make: Callable[[Attacker], tuple[bytes, ...]], *, every: float = 0.0) -> Attack:
    async def attack(attacker: Attacker) -> list[str]:
        return await attacker.exchange(*make(attacker), every=every)

    return attack


def _body(body: bytes) -> Attack:
    return _http(lambda attacker: (attacker.post(body),))


def _temperature(value: bytes) -> Attack:
    return _body(b'{"messages": [{"role": "user", "content": "x"}], "temperature": ' + value + b"}")


async def _flood(attacker: Attacker) -> list[str]:
    """Open more connections than the gateway takes, and say nothing on them."""
    outcomes = await asyncio.gather(*(attacker.exchange() for _ in range(attacker.plan.flood)))
    return [each for (each,) in outcomes]


async def _foreign_session(attacker: Attacker) -> list[str]:
    """Use the key of a session for another one, and for more than it allows."""
    try:
        opened = await attacker.open_session()
    except grpc.aio.AioRpcError as error:
        return [code_of(error)]
    key = opened.session_key
    other = attacker.post(b"{}", key=key, line="POST /sessions/s-1/v1/chat/completions HTTP/1.1")
    tasks = attacker.post(b"{}", key=key, line="POST /v1/tasks/next HTTP/1.1")
    outcomes = [*await attacker.exchange(other), *await attacker.exchange(tasks)]
    close = pb.CloseSessionRequest(session_id=opened.session.session_id, abandon_reason="DONE")
    await outcome(attacker.stub().CloseSession(close, timeout=_CALL_SECONDS))
    return outcomes


# -- gRPC --------------------------------------------------------------------------------------------------------------


def _call(method: str, request: Any, *, timeout: float | None = _CALL_SECONDS) -> Attack:
    async def attack(attacker: Attacker) -> list[str]:
        return [await outcome(getattr(attacker.stub(), method)(request, timeout=timeout))]

    return attack


async def _garbage(attacker: Attacker) -> list[str]:
    method: Any = attacker.channel().unary_unary(f"{_SERVICE}/OpenSession")
    return [await outcome(method(b"\xff" * 1000, timeout=_CALL_SECONDS))]


async def _metadata(attacker: Attacker) -> list[str]:
    metadata = tuple((f"x-{number}", "y" * 1000) for number in range(100))
    return [await outcome(attacker.stub().GetInfo(pb.GetInfoRequest(), timeout=_CALL_SECONDS, metadata=metadata))]


async def _burst(attacker: Attacker) -> list[str]:
    calls = [attacker.stub().GetQuota(pb.GetQuotaRequest(), timeout=_CALL_SECONDS) for _ in range(_BURST)]
    return list(await asyncio.gather(*map(outcome, calls)))


async def _watches(attacker: Attacker) -> list[str]:
    """Watch one session on very many streams."""
    try:
        opened = await attacker.open_session()
    except grpc.aio.AioRpcError as error:
        return [code_of(error)]
    name = opened.session.session_id
    calls = [attacker.stub().WatchSession(pb.WatchSessionRequest(session_id=name)) for _ in range(_WATCHES)]
    try:
        return list(await asyncio.gather(*(outcome(call.read()) for call in calls)))
    finally:
        for call in calls:
            call.cancel()
        close = pb.CloseSessionRequest(session_id=name, abandon_reason="DONE")
        await outcome(attacker.stub().CloseSession(close, timeout=_CALL_SECONDS))


async def _unfinished(attacker: Attacker) -> list[str]:
    """Begin calls whose messages lack the last byte; wait until the gateway ends them."""
    plan = attacker.plan
    raw = await asyncio.to_thread(RawConnection, plan.public)
    headers = {"grpc-timeout": "100S"}
    count, size = _UNFINISHED_CALLS, _UNFINISHED_BYTES
    try:
        await asyncio.to_thread(
            leave_unfinished, raw, f"{_SERVICE}/Generate", calls=count, size=size, headers=headers, seconds=5
        )
        async with asyncio.timeout(_LONG_SECONDS):
            while len(raw.ended) < count and not raw.closed:
                await asyncio.sleep(0.2)
                raw.receive()
    except TimeoutError:
        return ["held"]
    finally:
        raw.close()
    return ["ended"]


async def _silent(attacker: Attacker) -> list[str]:
    """Open connections without a handshake; wait until the gateway closes them."""
    host, _, port = attacker.plan.public.rpartition(":")
    loop = asyncio.get_running_loop()
    sockets = [socket.create_connection((host, int(port)), 5) for _ in range(20)]

    async def closed(connection: socket.socket) -> str:
        with suppress(ConnectionError):
            while await loop.sock_recv(connection, 1 << 12):
                pass
        return "closed"

    try:
        for connection in sockets:
            connection.setblocking(False)
        async with asyncio.timeout(_LONG_SECONDS):
            return list(await asyncio.gather(*map(closed, sockets)))
    except TimeoutError:
        return ["held"]
    finally:
        for connection in sockets:
            connection.close()


# -- sessions ----------------------------------------------------------------------------------------------------------


async def open_sessions(attacker: Attacker, report: Callable[[str, str], None], *, count: int) -> None:
    """Open sessions at a steady rate, in turns over HTTP and gRPC, and report each outcome."""
    loop = asyncio.get_running_loop()
    due, opened = loop.time(), 0
    while opened < count:
        try:
            async with attacker.connection() as (reader, writer):
                while opened < count:
                    due = max(due + 1 / attacker.plan.sessions_per_second, loop.time())
                    await asyncio.sleep(due - loop.time())
                    opened += 1
                    if opened % 2:
                        report("sessions over gRPC", await outcome(attacker.open_session()))
                        continue
                    body = {"session_id": attacker.name(), "idle_timeout": f"{_IDLE_SECONDS}s"}
                    writer.write(attacker.post(json.dumps(body).encode(), line="POST /v1/sessions HTTP/1.1"))
                    found = await read_outcome(reader)
                    report("sessions over HTTP", found)
                    if found == CLOSED or found in LIMITS:  # the gateway closes the connection
                        break
        except OSError:
            report("sessions over HTTP", CLOSED)


_FULL: Final = "TOO_MANY_SESSIONS retry"

SESSION_KINDS: Final = {
    "sessions over gRPC": frozenset({"OK", f"RESOURCE_EXHAUSTED {_FULL}"}),
    "sessions over HTTP": frozenset({"200", f"429 {_FULL.lower()}"}),
}


def _kind(run: Attack, *outcomes: str, pause: float = 1.0, seconds: float = 0.0) -> AttackKind:
    return AttackKind(run=run, outcomes=frozenset(outcomes), pause=pause, seconds=seconds)


def _too_large(attacker: Attacker) -> tuple[bytes, ...]:
    return (attacker.post(b" " * (attacker.plan.max_body_bytes + (1 << 20))),)


def _chunked(attacker: Attacker) -> tuple[bytes, ...]:
    head = attacker.post(b"", "transfer-encoding: chunked").replace(b"content-length: 0\r\n", b"")
    return (head + b"1\r\n \r\n" * 1000,)


_SLOW: Final = "408 request_error"
_TOO_LARGE: Final = "413 request_error"
_DENIED: Final = ("403 permission_denied", "403 session_key")
_LINE: Final = f"{_CHAT}\r\n".encode()
_DRIP: Final = [b" "] * 999
_HEADER: Final = b"x-a: b\r\n"
KINDS: Final[dict[str, AttackKind]] = {
    "giant body, announced": _kind(_http(lambda a: (a.post(b"", length=1 << 40),)), _TOO_LARGE),
    "giant body, sent": _kind(_http(_too_large), _TOO_LARGE, pause=4),
    "slow body": _kind(_http(lambda a: (a.post(b"{", length=1000), *_DRIP), every=_DRIP_SECONDS), _SLOW),
    "half-open body": _kind(_http(lambda a: (a.post(b"{", length=1000),)), _SLOW),
    "slow headers": _kind(_http(lambda a: (_LINE, *[_HEADER] * 999), every=_DRIP_SECONDS), _SLOW),
    "half-open headers": _kind(_http(lambda a: (b"GET /v1/mod",)), _SLOW),
    "chunked body": _kind(_http(_chunked), "411 request_error"),
    "compressed body": _kind(_http(lambda a: (a.post(b"{}", "content-encoding: gzip"),)), "415 request_error"),
    "JSON of deep arrays": _kind(_body(b'{"messages": ' + b"[" * 100_000), _INVALID),
    "JSON of deep objects": _kind(_body(b'{"messages": ' + b'{"a":' * 100_000), _INVALID),
    "JSON of many values": _kind(_body(b'{"a":[' + b"1," * 510_000 + b"1]}"), _TOO_LARGE, pause=4),
    "JSON with a huge number": _kind(_temperature(b"9" * 5000), _INVALID),
    "JSON with infinity": _kind(_temperature(b"1e999"), _INVALID),
    "noise": _kind(_http(lambda a: (b"\x00\x01" * 500 + b"\r\n\r\n",)), _INVALID),
    "many headers": _kind(_http(lambda a: (_LINE + _HEADER * 20_000,)), _INVALID),
    "large header": _kind(_http(lambda a: (_LINE + b"x: " + b"b" * 200_000,)), _INVALID),
    "unknown path": _kind(_http(lambda a: (a.post(b"{}", line="POST /v2/x HTTP/1.1"),)), "404 request_error"),
    "unknown session key": _kind(_http(lambda a: (a.post(b"{}", key="ffs_guessed"),)), "401 unknown_session_key"),
    "key of another session": _kind(_foreign_session, *_DENIED, f"RESOURCE_EXHAUSTED {_FULL}"),
    "flood of connections": _kind(_flood, _BUSY, _SLOW, pause=20),
    "gRPC: giant message": _kind(
        _call("Tokenize", pb.TokenizeRequest(text="x" * (2 << 20))), "RESOURCE_EXHAUSTED", pause=2
    ),
    "gRPC: garbage": _kind(_garbage, "INVALID_ARGUMENT INVALID_INPUT"),
    "gRPC: flood of metadata": _kind(_metadata, "RESOURCE_EXHAUSTED"),
    "gRPC: no deadline": _kind(_call("GetInfo", pb.GetInfoRequest(), timeout=None), "INVALID_ARGUMENT NO_DEADLINE"),
    "gRPC: unknown session": _kind(
        _call("CloseSession", pb.CloseSessionRequest(session_id="s-1", reward=1.0)), "NOT_FOUND"
    ),
    "gRPC: burst of calls": _kind(_burst, "OK", f"RESOURCE_EXHAUSTED {_RATE}", pause=10),
    "gRPC: many watches": _kind(
        _watches, "OK", "RESOURCE_EXHAUSTED TOO_MANY_WATCHES retry", f"RESOURCE_EXHAUSTED {_FULL}", pause=5
    ),
    "gRPC: unfinished messages": _kind(_unfinished, "ended", pause=5, seconds=30),
    "gRPC: silent connections": _kind(_silent, "closed", pause=5, seconds=10),
}
