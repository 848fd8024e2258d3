"""Connects a gateway with the coordinator of its run: tasks come from there, finished trajectories go there.

    agent --NextTask--> LeaseTasks --> task --OpenSession--> tracked --RenewTasks--> ... --> close --> outbox
                                                                                                       |
                                              settled  <--STORED, or REFUSED with the run's reason-- PutTrajectories

The outbox is in the session store: a trajectory stays there until the run has it or refuses it, also while the
coordinator or this gateway restarts.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
from google.rpc import code_pb2

from fourfold.coordinator.v1 import experience_service_pb2 as pb
from fourfold.coordinator.v1.experience_service_pb2_grpc import ExperienceServiceStub
from fourfold.errors import FourfoldError, InvalidInput, NotFound, Unavailable, WrongState
from fourfold.host.clock import SYSTEM_CLOCK, Clock
from fourfold.rpc import channel as rpc
from fourfold.rpc.responses import ResponseCheck
from fourfold_rollout.gateway.store import OutboxEntry, SessionStore

_log = logging.getLogger("fourfold.gateway.coordinator")

_TIMEOUT_SECONDS: Final = 15.0
_INFO_SECONDS: Final = 10.0
_RETRY_SECONDS: Final = 0.5
_MAX_RETRY_SECONDS: Final = 10.0
_FIRST_RENEWAL_SECONDS: Final = 5.0
_PUT_COUNT: Final = 32
# Encoded; a Put may have 8 MiB, and a trajectory alone may be larger than this.
_PUT_BYTES: Final = 4 << 20
# The run will not take the trajectory, however often it is sent.
_FINAL: Final = frozenset(
    {code_pb2.NOT_FOUND, code_pb2.INVALID_ARGUMENT, code_pb2.ALREADY_EXISTS, code_pb2.FAILED_PRECONDITION}
)

OnDelivered = Callable[[str, str], Awaitable[None]]
"""Takes a session id, and the reason of a refusal; empty: the run has the trajectory."""


class CoordinatorLink:
    """The connection of one gateway. Call `run` in a task."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        store: SessionStore,
        *,
        peer: str,
        on_delivered: OnDelivered,
        on_gone: Callable[[str], Awaitable[None]],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Prepare; nothing is called yet. `on_gone` takes the id of a tracked task that the run has given up."""
        self._stub: Any = ExperienceServiceStub(channel)
        self._store, self._peer, self._clock = store, peer, clock
        self._on_delivered, self._on_gone = on_delivered, on_gone
        self._tracked: set[str] = set()  # tasks of open sessions and of trajectories in the outbox
        self._ttl = 3 * _FIRST_RENEWAL_SECONDS
        self._wake = asyncio.Event()
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

    def track(self, task_id: str) -> None:
        """Renew the lease of a task from now on."""
        self._tracked.add(task_id)

    def untrack(self, task_id: str) -> None:
        self._tracked.discard(task_id)

    def wake(self) -> None:
        """Deliver the outbox at once."""
        self._wake.set()

    async def lease(self, wait: float) -> pb.LeasedTask | None:
        """Lease one task; wait for it up to `wait` seconds."""
        request = pb.LeaseTasksRequest(max_task_count=1)
        request.wait.FromNanoseconds(int(wait * 1e9))
        response: pb.LeaseTasksResponse = await self._call(self._stub.LeaseTasks, request, wait + _TIMEOUT_SECONDS)
        if not response.tasks:
            return None
        self._check_count(response, len(response.tasks), 1)
        return self._leased(response.tasks[0])

    async def join_group(self, request: pb.JoinGroupRequest) -> pb.LeasedTask:
        """Take a place in a group of the agents."""
        response: pb.JoinGroupResponse = await self._call(self._stub.JoinGroup, request, _TIMEOUT_SECONDS)
        return self._leased(response.task)

    async def release(self, task_id: str, reason: str, *, again: bool) -> None:
        """End a task without a trajectory. A failure is only logged, because the lease ends anyway."""
        self.untrack(task_id)
        request = pb.ReleaseTasksRequest(tasks=[pb.ReleasedTask(task_id=task_id, reason=reason, again=again)])
        try:
            await self._call(self._stub.ReleaseTasks, request, _TIMEOUT_SECONDS)
        except FourfoldError as error:
            _log.info("task could not be released, its lease will end: task=%s error=%s", task_id, error)

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
        while True:
            try:
                self.info = await self._call(self._stub.GetRunInfo, pb.GetRunInfoRequest(), _TIMEOUT_SECONDS)
                wait = _INFO_SECONDS
            except FourfoldError as error:
                if self.info is None:
                    _log.info("the run is not known yet: %s", error)
                wait = _RETRY_SECONDS
            await self._clock.sleep(wait)

    async def _renew(self) -> None:
        while True:
            await self._clock.sleep(min(self._ttl / 3, _FIRST_RENEWAL_SECONDS))
            ids = sorted(self._tracked)[:10_000]
            if not ids:
                continue
            try:
                request = pb.RenewTasksRequest(task_ids=ids)
                response: pb.RenewTasksResponse = await self._call(self._stub.RenewTasks, request, _TIMEOUT_SECONDS)
                self._ttl = max(response.ttl.ToNanoseconds() / 1e9, 1.0)
                for task_id in set(response.gone_task_ids) & self._tracked:
                    await self._on_gone(task_id)
                    self.untrack(task_id)
            except FourfoldError as error:
                _log.info("leases could not be renewed: tasks=%d error=%s", len(ids), error)

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
        request = pb.PutTrajectoriesRequest(trajectories=trajectories)
        try:
            response: pb.PutTrajectoriesResponse = await self._call(
                self._stub.PutTrajectories, request, 2 * _TIMEOUT_SECONDS
            )
        except (InvalidInput, NotFound, WrongState) as error:
            if len(entries) > 1:  # one of them is the cause
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
            self.untrack(trajectory.task_id)
            await self._on_delivered(entry.session_id, (result.reason or "REFUSED") if result.code else "")
            settled += 1
        return settled
