"""Clients of the coordinator: membership, for the services, and the state of the run, for people."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

import grpc

from fourfold.channel import call, stream
from fourfold.coordinator.v1 import membership_service_pb2 as pb
from fourfold.coordinator.v1 import membership_service_pb2_grpc as pb_grpc
from fourfold.coordinator.v1 import run_service_pb2 as run
from fourfold.coordinator.v1 import run_service_pb2_grpc as run_grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A member's lease."""

    token: bytes = field(repr=False)
    ttl_seconds: float


class MembershipClient:
    """Calls `MembershipService`. All methods raise FourfoldError; timeouts are seconds."""

    def __init__(self, channel: grpc.aio.Channel, *, peer: str) -> None:
        self._stub = pb_grpc.MembershipServiceStub(channel)
        self.peer = peer

    async def register(
        self,
        *,
        member_id: str,
        incarnation: str,
        role: pb.Role.ValueType,
        target: str,
        tokenizer_sha256: bytes,
        timeout: float,
    ) -> Lease:
        """Announce a member; WrongState when its tokenizer is not the run's."""
        request = pb.RegisterRequest(
            member_id=member_id,
            incarnation=incarnation,
            role=role,
            target=target,
            tokenizer_sha256=tokenizer_sha256,
        )
        response = await call(self._stub.Register, request, timeout=timeout, peer=self.peer, name="Register")
        return Lease(token=response.lease_token, ttl_seconds=response.ttl.ToNanoseconds() / 1e9)

    async def keep_alive(self, lease_token: bytes, *, timeout: float) -> tuple[float, bool]:
        """Extend a lease; returns its time to live in seconds, and whether the member should drain.

        Raises:
            NotFound: the lease is gone; register again.
        """
        request = pb.KeepAliveRequest(lease_token=lease_token)
        response = await call(self._stub.KeepAlive, request, timeout=timeout, peer=self.peer, name="KeepAlive")
        return response.ttl.ToNanoseconds() / 1e9, response.drain_requested

    async def deregister(self, lease_token: bytes, *, timeout: float) -> None:
        """Give a lease back."""
        request = pb.DeregisterRequest(lease_token=lease_token)
        await call(self._stub.Deregister, request, timeout=timeout, peer=self.peer, name="Deregister")


class RunClient:
    """Calls `RunService`. All methods raise FourfoldError; timeouts are seconds."""

    def __init__(self, channel: grpc.aio.Channel, *, peer: str) -> None:
        self._stub = run_grpc.RunServiceStub(channel)
        self.peer = peer

    async def get_run(self, *, timeout: float) -> run.RunStatus:
        """A snapshot of the run."""
        response = await call(self._stub.GetRun, run.GetRunRequest(), timeout=timeout, peer=self.peer, name="GetRun")
        return response.status

    async def get_weight_plane(self, *, timeout: float) -> run.GetWeightPlaneResponse:
        """How weights get to the engines: who waits for whom, since when."""
        request = run.GetWeightPlaneRequest()
        return await call(self._stub.GetWeightPlane, request, timeout=timeout, peer=self.peer, name="GetWeightPlane")

    async def watch_run(self, *, timeout: float | None = None) -> AsyncGenerator[run.RunStatus, None]:
        """The present snapshot at once, then one on every change."""
        request = run.WatchRunRequest()
        watch = stream(self._stub.WatchRun, request, timeout=timeout, peer=self.peer, name="WatchRun")
        async with aclosing(watch) as responses:
            async for response in responses:
                yield response.status
