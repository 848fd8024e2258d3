"""Clients of the coordinator: membership, for the services, and the state of the run, for people."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

import grpc
from google.protobuf.duration_pb2 import Duration

from fourfold.coordinator.v1 import membership_service_pb2 as pb
from fourfold.coordinator.v1 import membership_service_pb2_grpc as pb_grpc
from fourfold.coordinator.v1 import run_service_pb2 as run
from fourfold.coordinator.v1 import run_service_pb2_grpc as run_grpc
from fourfold.rpc.channel import call, stream
from fourfold.rpc.responses import require

_MAX_TOKEN_BYTES: Final = 64
# A member renews its lease three times in this: a shorter one would keep it busy with that.
_MIN_TTL_SECONDS: Final = 0.01
_MAX_TTL_SECONDS: Final = 3600.0


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
        token = response.lease_token
        rule = f"the lease token has {len(token)} bytes; it must have 1 to {_MAX_TOKEN_BYTES}"
        require(1 <= len(token) <= _MAX_TOKEN_BYTES, rule, peer=self.peer, name="Register")
        return Lease(token=token, ttl_seconds=self._ttl(response.ttl, "Register"))

    def _ttl(self, ttl: Duration, name: str) -> float:
        seconds = ttl.seconds + ttl.nanos / 1e9
        rule = f"the lease lasts {seconds:g} s; it must last {_MIN_TTL_SECONDS:g} to {_MAX_TTL_SECONDS:g} s"
        require(_MIN_TTL_SECONDS <= seconds <= _MAX_TTL_SECONDS, rule, peer=self.peer, name=name)
        return seconds

    async def keep_alive(self, lease_token: bytes, *, timeout: float) -> tuple[float, bool]:
        """Extend a lease; returns its time to live in seconds, and whether the member should drain.

        Raises:
            NotFound: the lease is gone; register again.
        """
        request = pb.KeepAliveRequest(lease_token=lease_token)
        response = await call(self._stub.KeepAlive, request, timeout=timeout, peer=self.peer, name="KeepAlive")
        return self._ttl(response.ttl, "KeepAlive"), response.drain_requested

    async def deregister(self, lease_token: bytes, *, timeout: float) -> None:
        """Give a lease back."""
        request = pb.DeregisterRequest(lease_token=lease_token)
        await call(self._stub.Deregister, request, timeout=timeout, peer=self.peer, name="Deregister")


class AsyncCoordinatorClient:
    """Calls `RunService`. All methods raise FourfoldError; timeouts are seconds."""

    def __init__(self, channel: grpc.aio.Channel, *, peer: str) -> None:
        self._stub = run_grpc.RunServiceStub(channel)
        self.peer = peer

    async def get_run(self, *, timeout: float) -> run.RunStatus:
        """A snapshot of the run."""
        response = await call(self._stub.GetRun, run.GetRunRequest(), timeout=timeout, peer=self.peer, name="GetRun")
        return self._status(response, "GetRun")

    def _status(self, response: run.GetRunResponse | run.WatchRunResponse, name: str) -> run.RunStatus:
        """Return the status in a response; numbers that a display would have to draw are finite."""
        status = response.status
        require(response.HasField("status"), "the response has no status", peer=self.peer, name=name)
        finite = math.isfinite(status.phase_progress) and all(math.isfinite(row.mean_score) for row in status.evals)
        finite = finite and all(math.isfinite(value) for row in status.steps for value in row.metrics.values())
        require(finite, "a number in the status is not finite", peer=self.peer, name=name, kind="NOT_FINITE")
        return status

    async def get_weight_plane(self, *, timeout: float) -> run.GetWeightPlaneResponse:
        """How weights get to the engines: who waits for whom, since when."""
        request = run.GetWeightPlaneRequest()
        plane = await call(self._stub.GetWeightPlane, request, timeout=timeout, peer=self.peer, name="GetWeightPlane")
        seconds = [plane.phase_seconds, plane.last_update_seconds, plane.last_pause_seconds]
        seconds += [party.state_seconds for party in plane.parties]
        finite = all(math.isfinite(value) for value in seconds)
        require(finite, "a time is not finite", peer=self.peer, name="GetWeightPlane", kind="NOT_FINITE")
        return plane

    async def watch_run(self, *, timeout: float | None = None) -> AsyncGenerator[run.RunStatus, None]:
        """The present snapshot at once, then one on every change."""
        request = run.WatchRunRequest()
        watch = stream(self._stub.WatchRun, request, timeout=timeout, peer=self.peer, name="WatchRun")
        async with aclosing(watch) as responses:
            async for response in responses:
                yield self._status(response, "WatchRun")
