"""Serves `MembershipService`, and watches when the certificates of the members expire."""

from __future__ import annotations

from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fourfold import metrics as m
from fourfold.coordinator.v1 import membership_service_pb2 as pb
from fourfold.coordinator.v1 import membership_service_pb2_grpc as pb_grpc
from fourfold.errors import DeadlinePassed, FourfoldError, Unavailable
from fourfold.host.clock import SYSTEM_CLOCK, Clock
from fourfold.rpc.channel import call, open_channel
from fourfold.rpc.codec import duration
from fourfold.security import principal
from fourfold.security.access import Security, expiry_warning
from fourfold.security.principal import Principal

from ..state.run_board import RunBoard
from .registry import Member, Registry

Context = grpc.aio.ServicerContext[Any, Any]

_CHECK_SECONDS: Final = 60.0
_PROBE_SECONDS: Final = 2.0


class CertificateMonitor:
    """Shows certificates that expire soon as conditions of the run. Does nothing without TLS. Not thread-safe."""

    def __init__(
        self, security: Security | None, registry: Registry, board: RunBoard, *, own: str, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """Start with the certificate of the coordinator, whose member id is `own`; `security` is None without TLS."""
        self._security, self._registry, self._board = security, registry, board
        self._own, self._clock = own, clock
        self._known: dict[str, tuple[bytes, float]] = {}  # certificate and its expiry, by member id
        self._reported: set[str] = set()

    def record(self, owner: Principal, pem: bytes) -> None:
        """Note the certificate that a member presented."""
        known = self._known.get(owner.name)
        if known is None or known[0] != pem:
            from cryptography import x509  # only a run with TLS loads it

            expires = x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()
            self._known[owner.name] = (pem, expires)

    def seconds_left(self) -> dict[str, float]:
        """Return the seconds until each certificate expires, by member id; departed members are left out."""
        if self._security is None:
            return {}
        live = {member.member_id for member in self._registry.members()}
        expiries = {name: expires for name, (_, expires) in self._known.items() if name in live}
        expiries[self._own] = self._security.material.expires
        return {name: expires - self._clock.now() for name, expires in expiries.items()}

    def metrics(self) -> dict[str, float]:
        """Return the metric of a step: the seconds until the first certificate expires."""
        left = self.seconds_left().values()
        return {m.CERTIFICATE_SECONDS: min(left)} if left else {}

    def check(self) -> None:
        """Report certificates that expire soon to the board, and resolve those that were renewed."""
        live = {member.member_id for member in self._registry.members()}
        self._known = {name: known for name, known in self._known.items() if name in live}
        warnings = {name: expiry_warning(name, seconds / 86_400) for name, seconds in self.seconds_left().items()}
        found = {f"certificate of {name}": text for name, text in warnings.items() if text}
        for subject, text in found.items():
            self._board.report_condition(subject, text)
        for subject in self._reported - found.keys():
            self._board.resolve_condition(subject)
        self._reported = set(found)

    async def run(self) -> None:
        while True:
            self.check()
            await self._clock.sleep(_CHECK_SECONDS)


class MembershipServicer(pb_grpc.MembershipServiceServicer):
    """Translates between messages and `registry.py`, which has the rules."""

    def __init__(self, registry: Registry, certificates: CertificateMonitor | None = None) -> None:
        self._registry = registry
        self._certificates = certificates

    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:
        """Grant a lease to the member that the request describes."""
        member = Member(
            member_id=request.member_id,
            incarnation=request.incarnation,
            role=request.role,
            target=request.target,
            tokenizer_sha256=request.tokenizer_sha256,
            pool=request.scorer,
        )
        await self._ask_rivals(member)
        token = self._registry.register(member, principal.current())
        self._record_certificate(context)
        return pb.RegisterResponse(lease_token=token, ttl=duration(self._registry.ttl))

    async def _ask_rivals(self, member: Member) -> None:
        """Raise Unavailable if the process that a new member would replace still answers."""
        silent: Member | None = None
        while (rival := self._registry.rival(member, principal.current())) not in (None, silent):
            if await self._answers(rival):
                raise Unavailable(
                    f"{rival.peer} is another process of this name, and still answers; stop it, or give this one "
                    f"another --member-id",
                    reason="MEMBER_ID_IN_USE",
                )
            silent = rival

    async def _answers(self, member: Member) -> bool:
        """Return whether a process answers. One that has ended, hangs or drains does not."""
        server = Principal(member.role_name, member.member_id)
        async with open_channel(member.target, self._registry.security, server=server) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            try:
                response = await call(stub.Check, request, timeout=_PROBE_SECONDS, peer=member.peer)
            except (Unavailable, DeadlinePassed):
                return False
            except FourfoldError:  # a server without health
                return True
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    async def KeepAlive(self, request: pb.KeepAliveRequest, context: Context) -> pb.KeepAliveResponse:
        """Renew a lease."""
        self._registry.keep_alive(request.lease_token, principal.current())
        self._record_certificate(context)  # the certificate may have been renewed since `Register`
        return pb.KeepAliveResponse(ttl=duration(self._registry.ttl))

    async def Deregister(self, request: pb.DeregisterRequest, context: Context) -> pb.DeregisterResponse:
        """End a lease; a repeat of the call changes nothing."""
        self._registry.deregister(request.lease_token, principal.current())
        return pb.DeregisterResponse()

    def _record_certificate(self, context: Context) -> None:
        if self._certificates is not None:
            for pem in context.auth_context().get("x509_pem_cert", ()):
                self._certificates.record(principal.current(), pem)
