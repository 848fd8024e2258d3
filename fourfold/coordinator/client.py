"""Clients of a coordinator: the state of the run for any caller, and membership for the services of the run."""

from __future__ import annotations

import hashlib
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property
from typing import BinaryIO, Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from fourfold.coordinator.v1 import experience_service_pb2 as experience
from fourfold.coordinator.v1 import experience_service_pb2_grpc as experience_grpc
from fourfold.coordinator.v1 import membership_service_pb2 as pb
from fourfold.coordinator.v1 import membership_service_pb2_grpc as pb_grpc
from fourfold.coordinator.v1 import rendezvous_service_pb2 as rendezvous
from fourfold.coordinator.v1 import rendezvous_service_pb2_grpc as rendezvous_grpc
from fourfold.coordinator.v1 import run_file_service_pb2 as run_file
from fourfold.coordinator.v1 import run_file_service_pb2_grpc as run_file_grpc
from fourfold.coordinator.v1 import run_service_pb2 as run
from fourfold.coordinator.v1 import run_service_pb2_grpc as run_grpc
from fourfold.coordinator.v1 import scorer_service_pb2 as scorers
from fourfold.coordinator.v1 import scorer_service_pb2_grpc as scorers_grpc
from fourfold.errors import ConfigError, InvalidInput
from fourfold.rpc.channel import split_target
from fourfold.rpc.client import AsyncClient, SyncClient, blocking, blocking_stream
from fourfold.rpc.responses import ResponseCheck

_MAX_TOKEN_BYTES: Final = 64
# A member renews its lease three times per time to live; a shorter one would keep the member busy with renewals.
_MIN_TTL_SECONDS: Final = 0.01
_MAX_TTL_SECONDS: Final = 3600.0

_MAX_STEP_ROWS: Final = 1000  # of a status
TAIL_BYTES: Final = 1 << 16
"""Bytes before `ReadFileRequest.offset` whose SHA-256 the request has, unless the reader has fewer."""


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
        return _ttl_seconds(self._check(response), response.ttl, "lease")

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


class RendezvousClient(AsyncClient):
    """Lets the machines of one trainer find each other. All methods raise FourfoldError; timeouts are seconds."""

    _role = "coordinator"
    _caller_role = "trainer"

    @cached_property
    def _stub(self) -> rendezvous_grpc.RendezvousServiceAsyncStub:
        return rendezvous_grpc.RendezvousServiceStub(self._open())

    async def offer(self, *, member_id: str, target: str, secret: bytes, timeout: float) -> float:
        """Offer the address of a rank 0; return the seconds for which the offer is kept."""
        request = rendezvous.OfferRendezvousRequest(member_id=member_id, target=target, secret=secret)
        response = await self._call(self._stub.OfferRendezvous, request, timeout)
        return _ttl_seconds(self._check(response), response.ttl, "offer")

    async def find(self, member_id: str, *, timeout: float) -> tuple[str, bytes]:
        """Return address and secret of a trainer's rank 0; raise NotFound when it has made no offer."""
        response = await self._call(
            self._stub.FindRendezvous, rendezvous.FindRendezvousRequest(member_id=member_id), timeout
        )
        check = self._check(response)
        try:
            split_target(response.target)
        except ConfigError as error:
            check.require(False, error.message)
        return response.target, response.secret


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
        scores = [row.mean_score for row in status.evals]
        scores += [each.mean_score for row in status.evals for each in row.sets]
        finite = all(map(math.isfinite, (*shares, *scores)))
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
        request, before = run.WatchRunRequest(changes_only=True), run.RunStatus()
        async with aclosing(self._stream(self._stub.WatchRun, request, timeout)) as responses:
            async for response in responses:
                status = self._status(response)
                if response.steps_appended:
                    steps = [*before.steps, *status.steps][-_MAX_STEP_ROWS:]
                    del status.steps[:]
                    status.steps.extend(steps)
                if response.members_unchanged:
                    status.members.extend(before.members)
                before = status
                yield status


class CoordinatorClient(SyncClient[AsyncCoordinatorClient]):
    """Reads the state of a run from its coordinator; each method blocks. For asyncio, use AsyncCoordinatorClient."""

    _async_type = AsyncCoordinatorClient
    get_run = blocking(AsyncCoordinatorClient.get_run)
    get_weight_plane = blocking(AsyncCoordinatorClient.get_weight_plane)
    watch_run = blocking_stream(AsyncCoordinatorClient.watch_run)


class AsyncTaskClient(AsyncClient):
    """Lists the tasks that agents have, and takes them back. All methods raise FourfoldError; timeouts are seconds."""

    _role = "coordinator"
    _caller_role = "operator"

    @cached_property
    def _stub(self) -> experience_grpc.ExperienceServiceAsyncStub:
        return experience_grpc.ExperienceServiceStub(self._open())

    async def list_tasks(self, *, timeout: float | None = None) -> list[experience.TaskState]:
        """Return the leased tasks with their sessions, in order of admission."""
        return list((await self._call(self._stub.ListTasks, experience.ListTasksRequest(), timeout)).tasks)

    async def return_tasks(self, task_ids: Sequence[str], *, timeout: float | None = None) -> None:
        """Let other agents attempt tasks; their sessions end."""
        released = [experience.ReleasedTask(task_id=name, reason="DROPPED", again=True) for name in task_ids]
        await self._call(self._stub.ReleaseTasks, experience.ReleaseTasksRequest(tasks=released), timeout)


class AsyncScorerClient(AsyncClient):
    """Lists and replaces the scorers of a run, with asyncio. With TLS it needs a certificate of the role `operator`.

    All methods raise FourfoldError. Timeouts are seconds; the default is the client's. Targets are "HOST:PORT".
    """

    _role = "coordinator"
    _caller_role = "operator"

    @cached_property
    def _stub(self) -> scorers_grpc.ScorerServiceAsyncStub:
        return scorers_grpc.ScorerServiceStub(self._open())

    async def list_scorers(self, *, timeout: float | None = None) -> list[scorers.Scorer]:
        """Return the scorers, in the order of the recipe."""
        response = await self._call(self._stub.ListScorers, scorers.ListScorersRequest(), timeout)
        for scorer in response.scorers:
            self._check_finite(response, scorer)
        return list(response.scorers)

    async def add(
        self, name: str, targets: Sequence[str], *, weight: float = 1.0, timeout: float | None = None
    ) -> scorers.Scorer:
        """Add a term to the score."""
        deployment = _deployment(targets)
        return await self._change(
            scorers.ChangeScorerRequest(name=name, add=scorers.AddScorer(deployment=deployment, weight=weight)), timeout
        )

    async def swap(self, name: str, targets: Sequence[str], *, timeout: float | None = None) -> scorers.Scorer:
        """Make other services live."""
        deployment = _deployment(targets)
        return await self._change(scorers.ChangeScorerRequest(name=name, swap=deployment), timeout)

    async def canary(
        self, name: str, targets: Sequence[str], *, share: float, timeout: float | None = None
    ) -> scorers.Scorer:
        """Let other services score a share of the groups, in (0, 1)."""
        canary = scorers.CanaryDeployment(deployment=_deployment(targets), share=share)
        return await self._change(scorers.ChangeScorerRequest(name=name, canary=canary), timeout)

    async def shadow(
        self, name: str, targets: Sequence[str], *, compare_gradients: bool = False, timeout: float | None = None
    ) -> scorers.Scorer:
        """Let other services score next to the live ones, without effect."""
        deployment = _deployment(targets)
        shadow = scorers.ShadowDeployment(deployment=deployment, compare_gradients=compare_gradients)
        return await self._change(scorers.ChangeScorerRequest(name=name, shadow=shadow), timeout)

    async def promote(
        self,
        name: str,
        *,
        min_rank_correlation: float | None = None,
        min_samples: int = 0,
        timeout: float | None = None,
    ) -> scorers.Scorer:
        """Make the canary, or else the shadow, live; WrongState if its agreement is below the conditions."""
        conditions = scorers.Promote(min_rank_correlation=min_rank_correlation, min_samples=min_samples)
        return await self._change(scorers.ChangeScorerRequest(name=name, promote=conditions), timeout)

    async def rollback(self, name: str, *, timeout: float | None = None) -> scorers.Scorer:
        """Remove canary and shadow, or else make the previous services live again."""
        return await self._change(scorers.ChangeScorerRequest(name=name, rollback=scorers.Rollback()), timeout)

    async def rescore(self, name: str, *, timeout: float | None = None) -> scorers.Scorer:
        """Have all samples that no step has yet scored again."""
        return await self._change(scorers.ChangeScorerRequest(name=name, rescore=scorers.Rescore()), timeout)

    async def remove(self, name: str, *, timeout: float | None = None) -> None:
        """Remove a term of the score."""
        await self._call(
            self._stub.ChangeScorer, scorers.ChangeScorerRequest(name=name, remove=scorers.Remove()), timeout
        )

    async def _change(self, request: scorers.ChangeScorerRequest, timeout: float | None) -> scorers.Scorer:
        response = await self._call(self._stub.ChangeScorer, request, timeout)
        self._check(response).require(response.HasField("scorer"), "the response has no scorer")
        self._check_finite(response, response.scorer)
        return response.scorer

    def _check_finite(self, response: Message, scorer: scorers.Scorer) -> None:
        agreement = scorer.agreement
        numbers = (scorer.weight, scorer.canary_share, agreement.flip_share, agreement.mean_shift)
        finite = all(map(math.isfinite, (*numbers, agreement.rank_correlation, agreement.gradient_cosine)))
        self._check(response).require(finite, "a number of a scorer is not finite", "NOT_FINITE")


class ScorerClient(SyncClient[AsyncScorerClient]):
    """Lists and replaces the scorers of a run; each method blocks. For asyncio, use AsyncScorerClient."""

    _async_type = AsyncScorerClient
    list_scorers = blocking(AsyncScorerClient.list_scorers)
    add = blocking(AsyncScorerClient.add)
    swap = blocking(AsyncScorerClient.swap)
    canary = blocking(AsyncScorerClient.canary)
    shadow = blocking(AsyncScorerClient.shadow)
    promote = blocking(AsyncScorerClient.promote)
    rollback = blocking(AsyncScorerClient.rollback)
    rescore = blocking(AsyncScorerClient.rescore)
    remove = blocking(AsyncScorerClient.remove)


def _ttl_seconds(check: ResponseCheck, ttl: Duration, what: str) -> float:
    seconds = ttl.seconds + ttl.nanos / 1e9
    rule = f"the {what} lasts {seconds:g} s; it must last {_MIN_TTL_SECONDS:g} to {_MAX_TTL_SECONDS:g} s"
    check.require(_MIN_TTL_SECONDS <= seconds <= _MAX_TTL_SECONDS, rule)
    return seconds


def _deployment(targets: Sequence[str]) -> scorers.NewDeployment:
    """Return services by address. Raises InvalidInput: `targets` is one text, which would become its letters."""
    if isinstance(targets, str):
        raise InvalidInput(f"targets = {targets!r:.200} is a text; give a list of addresses, [{targets!r:.200}]")
    return scorers.NewDeployment(targets=targets)


def tail_sha256(file: BinaryIO, offset: int) -> bytes:
    """Return `ReadFileRequest.tail_sha256` for a reader that has the first `offset` bytes of a file."""
    begin = max(offset - TAIL_BYTES, 0)
    file.seek(begin)
    return hashlib.sha256(file.read(offset - begin)).digest() if offset else b""


class AsyncRunFileClient(AsyncClient):
    """Reads the files of a run from its coordinator, with asyncio. All methods raise FourfoldError."""

    _role = "coordinator"
    _caller_role = "viewer"

    @cached_property
    def _stub(self) -> run_file_grpc.RunFileServiceAsyncStub:
        return run_file_grpc.RunFileServiceStub(self._open())

    async def read_file(
        self, file: run_file.RunFile.ValueType, *, offset: int = 0, tail: bytes = b"", timeout: float | None = None
    ) -> AsyncGenerator[tuple[int, bytes], None]:
        """Yield parts of a file with their offsets, from `offset` to its present end.

        The first part begins at 0 instead if the bytes before `offset` do not have the `tail_sha256` that is given as
        `tail`: then the file was replaced, or is missing. `timeout` is in seconds; the default is the client's.
        """
        request = run_file.ReadFileRequest(file=file, offset=offset, tail_sha256=tail)
        expected = {0, offset}
        async with aclosing(self._stream(self._stub.ReadFile, request, self._seconds(timeout))) as responses:
            async for response in responses:
                rule = f"offset is {response.offset}; the next byte is at {' or '.join(map(str, sorted(expected)))}"
                self._check(response).require(response.offset in expected, rule)
                yield response.offset, response.data
                expected = {response.offset + len(response.data)}


class RunFileClient(SyncClient[AsyncRunFileClient]):
    """Reads the files of a run from its coordinator; each method blocks."""

    _async_type = AsyncRunFileClient
    read_file = blocking_stream(AsyncRunFileClient.read_file)
