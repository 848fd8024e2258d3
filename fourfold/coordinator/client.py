"""Clients of a coordinator: the state of the run for any caller, and membership for the services of the run."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from fourfold.coordinator.v1 import membership_service_pb2 as pb
from fourfold.coordinator.v1 import membership_service_pb2_grpc as pb_grpc
from fourfold.coordinator.v1 import run_service_pb2 as run
from fourfold.coordinator.v1 import run_service_pb2_grpc as run_grpc
from fourfold.rpc.client import AsyncClient, SyncClient, blocking, blocking_stream

_MAX_TOKEN_BYTES: Final = 64
# A member renews its lease three times per time to live; a shorter one would keep the member busy with renewals.
_MIN_TTL_SECONDS: Final = 0.01
_MAX_TTL_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The lease of a member at the coordinator; it expires unless it is renewed."""

    token: bytes = field(repr=False)
    ttl_seconds: float


class MembershipClient(AsyncClient):
    """Registers a service at the coordinator. All methods raise FourfoldError; timeouts are seconds."""

    _role = "coordinator"

    @cached_property
    def _stub(self) -> pb_grpc.MembershipServiceAsyncStub:
        return pb_grpc.MembershipServiceStub(self._open())

    async def register(
        self,
        *,
        member_id: str,
        incarnation: str,
        role: pb.Role.ValueType,
        target: str,
        tokenizer_sha256: bytes,
        timeout: float,
        scorer: str = "",
    ) -> Lease:
        """Register a member; raise WrongState when its tokenizer differs from that of the run.

        `scorer` is the name of the table [[reward]] that a reward service serves; empty: the first.
        """
        request = pb.RegisterRequest(
            member_id=member_id,
            incarnation=incarnation,
            role=role,
            target=target,
            tokenizer_sha256=tokenizer_sha256,
            scorer=scorer,
        )
        response = await self._call(self._stub.Register, request, timeout)
        token = response.lease_token
        rule = f"the lease token has {len(token)} bytes; it must have 1 to {_MAX_TOKEN_BYTES}"
        self._check(response).require(1 <= len(token) <= _MAX_TOKEN_BYTES, rule)
        return Lease(token=token, ttl_seconds=self._ttl(response))

    def _ttl(self, response: pb.RegisterResponse | pb.KeepAliveResponse) -> float:
        seconds = response.ttl.seconds + response.ttl.nanos / 1e9
        rule = f"the lease lasts {seconds:g} s; it must last {_MIN_TTL_SECONDS:g} to {_MAX_TTL_SECONDS:g} s"
        self._check(response).require(_MIN_TTL_SECONDS <= seconds <= _MAX_TTL_SECONDS, rule)
        return seconds

    async def keep_alive(self, lease_token: bytes, *, timeout: float) -> tuple[float, bool]:
        """Renew a lease.

        Returns:
            Its time to live in seconds, and whether the member should drain.

        Raises:
            NotFound: The lease expired or was replaced; register again.
        """
        response = await self._call(self._stub.KeepAlive, pb.KeepAliveRequest(lease_token=lease_token), timeout)
        return self._ttl(response), response.drain_requested

    async def deregister(self, lease_token: bytes, *, timeout: float) -> None:
        """End a lease before it expires."""
        await self._call(self._stub.Deregister, pb.DeregisterRequest(lease_token=lease_token), timeout)


class AsyncCoordinatorClient(AsyncClient):
    """Reads the state of a run from its coordinator, with asyncio.

    All methods raise FourfoldError. Timeouts are seconds; the default is the client's.
    """

    _role = "coordinator"
    _caller_role = "viewer"

    @cached_property
    def _stub(self) -> run_grpc.RunServiceAsyncStub:
        return run_grpc.RunServiceStub(self._open())

    async def get_run(self, *, timeout: float | None = None) -> run.RunStatus:
        """Return a snapshot of the run."""
        response = await self._call(self._stub.GetRun, run.GetRunRequest(), timeout)
        self._check(response).contract(response.contract_version)
        return self._status(response)

    def _status(self, response: run.GetRunResponse | run.WatchRunResponse) -> run.RunStatus:
        """Return the status of a response. Its numbers are finite, so that a display can draw them."""
        status, check = response.status, self._check(response)
        check.require(response.HasField("status"), "the response has no status")
        shares = (status.phase_progress, status.evaluation_progress)
        finite = all(map(math.isfinite, shares)) and all(math.isfinite(row.mean_score) for row in status.evals)
        finite = finite and all(math.isfinite(value) for row in status.steps for value in row.metrics.values())
        check.require(finite, "a number in the status is not finite", "NOT_FINITE")
        return status

    async def get_weight_plane(self, *, timeout: float | None = None) -> run.GetWeightPlaneResponse:
        """Return the state of the weight transfer: phase, engines, and which member waits for which."""
        plane = await self._call(self._stub.GetWeightPlane, run.GetWeightPlaneRequest(), timeout)
        seconds = [plane.phase_seconds, plane.last_update_seconds, plane.last_pause_seconds]
        seconds += [party.state_seconds for party in plane.parties]
        finite = all(math.isfinite(value) for value in seconds)
        self._check(plane).require(finite, "a time is not finite", "NOT_FINITE")
        return plane

    async def watch_run(self, *, timeout: float | None = None) -> AsyncGenerator[run.RunStatus, None]:
        """Yield the present snapshot at once, then one on every change. Default timeout: none."""
        async with aclosing(self._stream(self._stub.WatchRun, run.WatchRunRequest(), timeout)) as responses:
            async for response in responses:
                yield self._status(response)


class CoordinatorClient(SyncClient[AsyncCoordinatorClient]):
    """Reads the state of a run from its coordinator; each method blocks. For asyncio, use AsyncCoordinatorClient."""

    _async_type = AsyncCoordinatorClient
    get_run = blocking(AsyncCoordinatorClient.get_run)
    get_weight_plane = blocking(AsyncCoordinatorClient.get_weight_plane)
    watch_run = blocking_stream(AsyncCoordinatorClient.watch_run)
