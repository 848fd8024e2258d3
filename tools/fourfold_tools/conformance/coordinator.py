"""Plays the coordinator for a service that registers: grants leases, notes each call, and fails on request."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import grpc

from fourfold.coordinator.v1 import membership_service_pb2 as pb
from fourfold.coordinator.v1.membership_service_pb2_grpc import (
    MembershipServiceServicer,
    add_MembershipServiceServicer_to_server,
)
from fourfold.errors import ConfigError, FourfoldError, NotFound, Unavailable
from fourfold.rpc.channel import SERVER_OPTIONS, is_loopback, join_target, split_target
from fourfold.rpc.status import to_status
from fourfold.security.access import Security, check_identity

SERVICE: Final = "fourfold.coordinator.v1.MembershipService"
MAX_CALLS: Final = 100_000
_BIND_SECONDS: Final = 5.0
_BIND_PAUSE: Final = 0.1
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """A call that came."""

    method: str
    at: float
    """Time by the clock of the event loop."""
    token: bytes
    """Lease of the request, or the granted one."""
    has_deadline: bool
    failed: str
    """Name of the status code of the response; empty: OK."""


@dataclass(slots=True)
class LeaseRecord:
    """A lease that was granted."""

    token: bytes
    request: pb.RegisterRequest
    granted: float
    expires: float
    peer_fault: str
    """Why the caller's certificate does not allow the call; empty: it does, or there is no TLS."""


@dataclass(slots=True, kw_only=True)
class FakeCoordinator(MembershipServiceServicer):
    """Keeps the leases of one service. Use it from one event loop."""

    ttl: float
    """Time to live of leases, in seconds."""
    security: Security | None = None
    unavailable: bool = False
    """Answer every call with UNAVAILABLE."""
    refusal: FourfoldError | None = None
    """Answer Register with this error; None: grant a lease."""
    drain: bool = False
    """Request a drain with each KeepAlive."""
    calls: list[Call] = field(default_factory=list)
    leases: list[LeaseRecord] = field(default_factory=list)
    lease: LeaseRecord | None = None
    """The valid one."""
    forgotten: set[bytes] = field(default_factory=set)
    """Tokens that were answered with NOT_FOUND."""
    _server: grpc.aio.Server | None = None

    async def start(self, listen: str) -> str:
        """Listen, and return the bound HOST:PORT; raise ConfigError if this machine cannot listen there."""
        host, port = split_target(listen)
        if self.security is None and not is_loopback(host):
            raise ConfigError(f"--coordinator-listen {listen}: without --certs it listens on loopback only")
        server = grpc.aio.server(options=SERVER_OPTIONS)
        add_MembershipServiceServicer_to_server(self, server)
        end = asyncio.get_running_loop().time() + _BIND_SECONDS
        while True:
            try:
                if self.security is None:
                    port = server.add_insecure_port(join_target(host, port))
                else:
                    port = server.add_secure_port(
                        join_target(host, port), self.security.server_credentials(public=False)
                    )
                break
            except RuntimeError:
                if asyncio.get_running_loop().time() > end:
                    raise ConfigError(
                        f"--coordinator-listen {listen}: this machine cannot listen there; is the port in use?"
                    ) from None
                await asyncio.sleep(_BIND_PAUSE)
        await server.start()
        self._server = server
        return join_target(host, port)

    async def stop(self) -> None:
        """Close the port and all connections. Leases are lost."""
        server, self._server, self.lease = self._server, None, None
        if server is not None:
            await server.stop(0)

    def forget(self) -> None:
        """Lose the valid lease, as a coordinator that was restarted."""
        self.lease = None

    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:
        fault = self._peer_fault(request, context)
        if self.unavailable:
            await self._fail("Register", b"", context, Unavailable("the coordinator is starting"))
        if self.refusal is not None:
            await self._fail("Register", b"", context, self.refusal)
        now = _now()
        lease = LeaseRecord(secrets.token_bytes(16), request, now, now + self.ttl, fault)
        if len(self.leases) < MAX_CALLS:
            self.leases.append(lease)
        self.lease = lease
        self._note("Register", lease.token, context)
        response = pb.RegisterResponse(lease_token=lease.token)
        response.ttl.FromNanoseconds(int(self.ttl * 1e9))
        return response

    async def KeepAlive(self, request: pb.KeepAliveRequest, context: Context) -> pb.KeepAliveResponse:
        token = request.lease_token
        if self.unavailable:
            await self._fail("KeepAlive", token, context, Unavailable("the coordinator is busy"))
        lease = self.lease
        if lease is None or token != lease.token or lease.expires < _now():
            self.lease = None if lease is not None and token == lease.token else lease
            await self._fail("KeepAlive", token, context, NotFound("unknown lease; register again"))
        self._note("KeepAlive", token, context)
        lease.expires = _now() + self.ttl
        response = pb.KeepAliveResponse(drain_requested=self.drain)
        response.ttl.FromNanoseconds(int(self.ttl * 1e9))
        return response

    async def Deregister(self, request: pb.DeregisterRequest, context: Context) -> pb.DeregisterResponse:
        if self.lease is not None and request.lease_token == self.lease.token:
            self.lease = None
        self._note("Deregister", request.lease_token, context)
        return pb.DeregisterResponse()

    def since(self, begin: float, method: str = "") -> list[Call]:
        """Return the calls of a method, or of all methods, from a time on."""
        return [call for call in self.calls if call.at >= begin and method in ("", call.method)]

    async def _fail(self, method: str, token: bytes, context: Context, error: FourfoldError) -> NoReturn:
        self._note(method, token, context, error.code)
        if error.code == "NOT_FOUND":
            self.forgotten.add(token)
        details = to_status(error).SerializeToString()
        await context.abort(grpc.StatusCode[error.code], error.message, (("grpc-status-details-bin", details),))
        raise AssertionError("abort always raises")

    def _note(self, method: str, token: bytes, context: Context, failed: str = "") -> None:
        if len(self.calls) < MAX_CALLS:  # a service that calls without a pause must not fill the memory
            self.calls.append(Call(method, _now(), token, context.time_remaining() is not None, failed))

    def _peer_fault(self, request: pb.RegisterRequest, context: Context) -> str:
        if self.security is None:
            return ""
        names = context.auth_context().get("x509_subject_alternative_name", ())
        try:
            owner = check_identity(SERVICE, [name.decode("latin-1") for name in names])
        except FourfoldError as error:
            return error.message
        if owner.name == request.member_id:
            return ""
        return f"it is that of {owner.name!r}, and member_id is {request.member_id[:140]!r}; both must be equal"


def _now() -> float:
    return asyncio.get_running_loop().time()
