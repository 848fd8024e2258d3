"""`MembershipService`: the registry on the wire."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration

from fourfold.coordinator.v1 import membership_service_pb2 as pb
from fourfold.coordinator.v1 import membership_service_pb2_grpc as pb_grpc
from fourfold.security import principal

from .certificates import CertificateMonitor
from .registry import Member, Registry

Context = grpc.aio.ServicerContext[Any, Any]


class MembershipServicer(pb_grpc.MembershipServiceServicer):
    """Translates; the rules are in `registry.py`."""

    def __init__(self, registry: Registry, certificates: CertificateMonitor | None = None) -> None:
        """Translate for `registry`; `certificates` is told what the members show."""
        self._registry = registry
        self._certificates = certificates

    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:
        """Grant a lease."""
        token = self._registry.register(
            Member(
                member_id=request.member_id,
                incarnation=request.incarnation,
                role=request.role,
                target=request.target,
                tokenizer_sha256=request.tokenizer_sha256,
            ),
            principal.current(),
        )
        self._note_certificate(context)
        return pb.RegisterResponse(lease_token=token, ttl=self._ttl())

    async def KeepAlive(self, request: pb.KeepAliveRequest, context: Context) -> pb.KeepAliveResponse:
        """Extend a lease."""
        drain = self._registry.keep_alive(request.lease_token, principal.current())
        self._note_certificate(context)  # it may have been renewed
        return pb.KeepAliveResponse(ttl=self._ttl(), drain_requested=drain)

    async def Deregister(self, request: pb.DeregisterRequest, context: Context) -> pb.DeregisterResponse:
        """End a lease."""
        self._registry.deregister(request.lease_token, principal.current())
        return pb.DeregisterResponse()

    def _note_certificate(self, context: Context) -> None:
        if self._certificates is not None:
            for pem in context.auth_context().get("x509_pem_cert", ()):
                self._certificates.record(principal.current(), pem)

    def _ttl(self) -> Duration:
        ttl = Duration()
        ttl.FromNanoseconds(int(self._registry.ttl * 1e9))
        return ttl
