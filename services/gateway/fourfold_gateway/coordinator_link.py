"""Connects a gateway with the coordinator of its run: leases tasks and delivers finished trajectories.

    agent --NextTask--> LeaseTasks --> task --OpenSession--> tracked --RenewTasks--> ... --> close --> outbox
                                                                                                       |
                                              settled  <--STORED, or REFUSED with the run's reason-- PutTrajectories

The outbox is in the session store: a trajectory stays there until the run has it or refuses it, also while the
coordinator or this gateway restarts.

Each call names the lease of the task. The id of a task is not enough: another run has equal ids, and the coordinator
leases a task again when this gateway was cut off for too long.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

import grpc
from google.rpc import code_pb2

from fourfold.bounds import MAX_TRAJECTORY_BYTES
from fourfold.coordinator.v1 import experience_service_pb2 as pb
from fourfold.coordinator.v1.experience_service_pb2_grpc import ExperienceServiceStub
from fourfold.errors import FourfoldError, InvalidInput, NotFound, PeerFault, Unavailable, WrongState
from fourfold.host.clock import SYSTEM_CLOCK, Clock
from fourfold.rpc import channel as rpc
from fourfold.rpc.responses import ResponseCheck
from fourfold_gateway.store import OutboxEntry, SessionStore
from fourfold_gateway.trajectory import TOO_LARGE

_log = logging.getLogger("fourfold.gateway.coordinator")

_TIMEOUT_SECONDS: Final = 15.0
_INFO_SECONDS: Final = 10.0
_RETRY_SECONDS: Final = 0.5
_MAX_RETRY_SECONDS: Final = 10.0
FIRST_RENEWAL_SECONDS: Final = 5.0
"""Longest time between two renewals."""
_PUT_COUNT: Final = 32
# Largest sum of encoded trajectories in one Put, which may have 8 MiB. A single trajectory may be larger than this.
_PUT_BYTES: Final = 4 << 20
_MAX_RENEWALS: Final = 10_000  # leases in one call
_MAX_STOP_IDS: Final = 64
# Most calls that wait at the coordinator; further agents wait here. Otherwise waiting agents could use up the calls
# that the coordinator allows, and it would refuse renewals of leases.
_MAX_LEASE_CALLS: Final = 256
# Codes after which the run refuses the trajectory in every later call, too.
_FINAL: Final = frozenset(
    {code_pb2.NOT_FOUND, code_pb2.INVALID_ARGUMENT, code_pb2.ALREADY_EXISTS, code_pb2.FAILED_PRECONDITION}
)

OnDelivered = Callable[[str, str], Awaitable[None]]
"""Receives a session id and the reason of a refusal; an empty reason: the run has stored the trajectory."""


class CoordinatorLink:
    """The connection of one gateway. Call `run` in a task."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        store: SessionStore,
        *,
        peer: str,
        on_delivered: OnDelivered,
        on_gone: Callable[[str, str], Awaitable[None]],
        gateway: str = "",
        sessions: Callable[[], Mapping[tuple[str, str], pb.TaskSession]] = dict,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Prepare; nothing is called yet.

        `on_gone` takes the id and the lease of a task that the run has given up. `gateway` is our member id, and
        `sessions` returns the open sessions by task and lease.
        """
        self._stub: Any = ExperienceServiceStub(channel)
        self._store, self._peer, self._clock = store, peer, clock
        self._on_delivered, self._on_gone = on_delivered, on_gone
        self._gateway, self._sessions = gateway, sessions
        # Set after the first RenewTasks call. It names all tasks that this gateway had before its restart; the run
        # would treat a task that is leased before this call as one that the gateway lost.
        self._named = asyncio.Event()
        self._tracked: set[tuple[str, str]] = set()  # (task, lease) of open sessions and of the outbox
        self._ttl = 3 * FIRST_RENEWAL_SECONDS
        self._wake = asyncio.Event()
        self._lease_calls = asyncio.Semaphore(_MAX_LEASE_CALLS)
        self.info: pb.GetRunInfoResponse | None = None  # None: the coordinator has not answered yet

    async def run(self) -> None:
        """Keep the run's description, the leases and the outbox up to date, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._refresh_info())
            group.create_task(self._renew())
            group.create_task(self._deliver())

    def run_info(self) -> pb.GetRunInfoResponse:
        """Return the description of the run; raise Unavailable while it is unknown."""
        if self.info is None:
            raise Unavailable("the coordinator of the run did not answer yet; try again", retry_after=1.0)
        return self.info

    def track(self, task: pb.LeasedTask) -> None:
        """Renew the lease of a task from now on."""
        self._tracked.add((task.task_id, task.lease))

    def untrack(self, task: pb.LeasedTask | pb.Trajectory) -> None:
        self._tracked.discard((task.task_id, task.lease))

    def wake(self) -> None:
        """Start the delivery of the outbox now."""
        self._wake.set()

    async def lease(self, wait: float, *, agent: str = "") -> pb.LeasedTask | None:
        """Lease one task for an agent, a member with this incarnation; wait for it up to `wait` seconds."""
        end = self._clock.monotonic() + wait
        try:
            async with asyncio.timeout(max(wait, _RETRY_SECONDS)):
                await self._named.wait()
                await self._lease_calls.acquire()
        except TimeoutError:
            return None
        try:
            left = max(end - self._clock.monotonic(), 0.0)
            request = pb.LeaseTasksRequest(max_task_count=1, gateway=self._gateway, agent_incarnation=agent)
            request.wait.FromNanoseconds(int(left * 1e9))
            response: pb.LeaseTasksResponse = await self._call(self._stub.LeaseTasks, request, left + _TIMEOUT_SECONDS)
        finally:
            self._lease_calls.release()
        if not response.tasks:
            return None
        self._check_count(response, len(response.tasks), 1)
        return self._leased(response.tasks[0])

    async def join_group(self, request: pb.JoinGroupRequest) -> pb.LeasedTask:
        """Take a place in a group of the agents."""
        try:  # the run would give a task to another agent if the first renewal does not name it
            async with asyncio.timeout(_RETRY_SECONDS):
                await self._named.wait()
        except TimeoutError:
            raise Unavailable("the run does not know this gateway's tasks yet; try again", retry_after=1.0) from None
        request.gateway = self._gateway
        response: pb.JoinGroupResponse = await self._call(self._stub.JoinGroup, request, _TIMEOUT_SECONDS)
        return self._leased(response.task)

    async def release(self, task: pb.LeasedTask, reason: str, *, again: bool) -> None:
        """End a task without a trajectory. A failure is only logged, because the lease ends anyway."""
        self.untrack(task)
        released = pb.ReleasedTask(task_id=task.task_id, reason=reason, again=again, lease=task.lease)
        request = pb.ReleaseTasksRequest(tasks=[released])
        try:
            await self._call(self._stub.ReleaseTasks, request, _TIMEOUT_SECONDS)
        except FourfoldError as error:
            _log.info("task could not be released, its lease will end: task=%s error=%s", task.task_id, error)

    def _leased(self, task: pb.LeasedTask) -> pb.LeasedTask:
        check = ResponseCheck(self._peer, "LeaseTasks")
        check.require(bool(task.task_id) and bool(task.group_id), "a task has no id or no group")
        ttl = task.ttl.ToNanoseconds() / 1e9
        check.require(ttl > 0, f"the lease of {task.task_id} lasts {ttl} s; it must be above 0")
        try:
            messages = json.loads(task.messages_json or "[]")
        except (ValueError, RecursionError):
            messages = None
        listed = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
        check.require(listed, f"messages_json of {task.task_id} is not a JSON array of objects")
        self._ttl = min(self._ttl, ttl)
        return task

    def _check_count(self, response: Any, count: int, expected: int) -> None:
        rule = f"{count} results; {expected} were asked for"
        ResponseCheck(self._peer, response.DESCRIPTOR.name).require(count == expected, rule, "WRONG_COUNT")

    async def _call(self, method: Any, request: Any, timeout: float) -> Any:
        return await rpc.call(method, request, timeout=timeout, peer=self._peer)

    async def _refresh_info(self) -> None:
        reported = ""
        while True:
            try:
                info = await self._call(self._stub.GetRunInfo, pb.GetRunInfoRequest(), _TIMEOUT_SECONDS)
                self.info, wait = self._checked_info(info), _INFO_SECONDS
            except PeerFault as error:  # this fault persists, and agents get no task meanwhile
                if error.message != reported:
                    reported = error.message
                    _log.warning("the description of the run is refused, no task can begin: %s", error)
                wait = _RETRY_SECONDS
            except FourfoldError as error:
                if self.info is None:
                    _log.info("the run is not known yet: %s", error)
                wait = _RETRY_SECONDS
            await self._clock.sleep(wait)

    def _checked_info(self, info: pb.GetRunInfoResponse) -> pb.GetRunInfoResponse:
        check = ResponseCheck(self._peer, "GetRunInfo")
        check.require(0 < info.temperature <= 2, f"temperature is {info.temperature}; it must be in (0, 2]")
        check.require(info.max_new_tokens > 0, f"max_new_tokens is {info.max_new_tokens}; it must be at least 1")
        stops = info.stop_token_ids
        check.require(
            len(stops) <= _MAX_STOP_IDS and min(stops, default=0) >= 0,
            f"{len(stops)} stop_token_ids, the lowest {min(stops, default=0)}; at most {_MAX_STOP_IDS}, from 0",
        )
        return info

    async def _renew(self) -> None:
        while True:
            first, failed = not self._named.is_set(), False
            all_leases = list(self._renewals()) or [{}] * first
            for leases in all_leases:  # renew now: leases of the earlier process may end soon
                try:
                    await self._renew_some(leases, are_all=first and len(all_leases) == 1)
                except FourfoldError as error:
                    _log.info("leases could not be renewed: tasks=%d error=%s", len(leases), error)
                    failed = True
            if not failed:
                self._named.set()
            await self._clock.sleep(_RETRY_SECONDS if first and failed else min(self._ttl / 3, FIRST_RENEWAL_SECONDS))

    def _renewals(self) -> Iterator[dict[str, str]]:
        """Yield the leases for each call, by task. Two leases of one task are in different calls."""
        left = set(self._tracked)
        while left:
            leases = dict(islice(dict(sorted(left)).items(), _MAX_RENEWALS))
            left.difference_update(leases.items())
            yield leases

    async def _renew_some(self, leases: dict[str, str], *, are_all: bool) -> None:
        open_sessions = self._sessions()
        request = pb.RenewTasksRequest(
            task_ids=leases,
            leases=leases.values(),
            gateway=self._gateway,
            all=are_all,
            sessions=[open_sessions.get(lease, pb.TaskSession()) for lease in leases.items()],
        )
        response: pb.RenewTasksResponse = await self._call(self._stub.RenewTasks, request, _TIMEOUT_SECONDS)
        self._ttl = max(response.ttl.ToNanoseconds() / 1e9, 1.0)
        for task_id in leases.keys() & set(response.gone_task_ids):
            await self._on_gone(task_id, leases[task_id])
            self._tracked.discard((task_id, leases[task_id]))

    async def _deliver(self) -> None:
        """Send the outbox, again and again, in the order in which sessions closed."""
        wait = _RETRY_SECONDS
        while True:
            self._wake.clear()
            sent = 0
            try:
                entries = await self._store.read_outbox(max_count=_PUT_COUNT, max_bytes=_PUT_BYTES)
                if entries:
                    sent = await self._put(entries)
                    wait = _RETRY_SECONDS if sent else min(2 * wait, _MAX_RETRY_SECONDS)
            except FourfoldError as error:
                _log.info("trajectories wait in the outbox: %s", error)
                wait = min(2 * wait, _MAX_RETRY_SECONDS)
            if sent:
                continue
            try:
                async with asyncio.timeout(wait):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _put(self, entries: list[OutboxEntry]) -> int:
        """Send trajectories; return how many of them were settled."""
        trajectories = [pb.Trajectory.FromString(entry.trajectory) for entry in entries]
        # The store returns a large trajectory alone. gRPC does not send it, so it would block all later ones.
        if len(entries[0].trajectory) > MAX_TRAJECTORY_BYTES:
            self.untrack(trajectories[0])
            await self._on_delivered(entries[0].session_id, TOO_LARGE)
            return 1
        request = pb.PutTrajectoriesRequest(trajectories=trajectories)
        try:
            response: pb.PutTrajectoriesResponse = await self._call(
                self._stub.PutTrajectories, request, 2 * _TIMEOUT_SECONDS
            )
        except (InvalidInput, NotFound, WrongState) as error:
            if len(entries) > 1:  # find the trajectory that was refused
                return sum([await self._put([entry]) for entry in entries])
            await self._on_delivered(entries[0].session_id, error.reason)
            return 1
        self._check_count(response, len(response.results), len(entries))
        settled = 0
        for entry, trajectory, result in zip(entries, trajectories, response.results, strict=True):
            rule = f"a result for task {result.task_id!r:.140}; {trajectory.task_id} is due"
            ResponseCheck(self._peer, "PutTrajectories").require(result.task_id == trajectory.task_id, rule)
            if result.code != code_pb2.OK and result.code not in _FINAL:
                continue
            self.untrack(trajectory)
            await self._on_delivered(entry.session_id, (result.reason or "REFUSED") if result.code else "")
            settled += 1
        return settled
