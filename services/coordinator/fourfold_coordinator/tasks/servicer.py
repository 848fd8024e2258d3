"""Serves `coordinator.v1.ExperienceService`: gives tasks to gateways, and takes trajectories."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.rpc import code_pb2

from fourfold.config import Config
from fourfold.coordinator.v1 import experience_service_pb2 as pb
from fourfold.coordinator.v1 import experience_service_pb2_grpc as pb_grpc
from fourfold.errors import (
    AlreadyExists,
    FourfoldError,
    InvalidInput,
    NotFound,
    PermissionDenied,
    Unavailable,
    WrongState,
)
from fourfold.host.cancellation import completed
from fourfold.host.clock import SYSTEM_CLOCK, Clock
from fourfold.rpc.codec import check_id, duration
from fourfold.sample.record import AgentTask
from fourfold.sample.sample import shortest
from fourfold.security import principal
from fourfold.security.principal import LOCAL

from ..data.prompts import own_prompt
from ..state.experiences import ExperienceStore
from ..state.faults import FaultLog
from ..state.samples import Trajectory
from .check import TrajectoryRules, check_trajectory
from .task_queue import BAD_TRAJECTORY, AgentSession, Attempt, AttemptState, OwnProblem, TaskQueue, check_reason

log = logging.getLogger("fourfold.coordinator")

Context = grpc.aio.ServicerContext[Any, Any]

AGENT_SCORER: Final = "agent"  # scorer of a reward that came with the trajectory
_MAX_TASKS: Final = 1_000
_MAX_WAIT_SECONDS: Final = 60.0
_WAIT_SECONDS: Final = 10.0
_MAX_RENEWALS: Final = 10_000
_MAX_TEXT_BYTES: Final = 64 << 10
_HEX: Final = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSource:
    """The parts of an assembled run that the servicer needs."""

    config: Config
    run_id: str
    queue: TaskQueue
    experiences: ExperienceStore
    faults: FaultLog
    vocabulary_size: Callable[[], int]  # the largest of the engines; 0 without engines
    newest_version: Callable[[], int]  # highest policy version that an engine may have received


class ExperienceServicer(pb_grpc.ExperienceServiceServicer):
    """Translates between messages and the task queue; UNAVAILABLE until the run is assembled."""

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._source: TaskSource | None = None
        self._clock = clock

    def open(self, source: TaskSource) -> None:
        """Serve the tasks of a run from now on."""
        self._source = source

    @property
    def _run(self) -> TaskSource:
        if self._source is None:
            raise Unavailable("the coordinator reads its data; try again", reason="STARTING", retry_after=1.0)
        return self._source

    async def GetRunInfo(self, request: pb.GetRunInfoRequest, context: Context) -> pb.GetRunInfoResponse:
        """Describe the run."""
        config, agents = self._run.config, self._run.config.agents
        return pb.GetRunInfoResponse(
            run_name=config.name,
            run_id=self._run.run_id,
            has_tasks=agents.source == "tasks",
            has_own_groups=agents.source == "groups",
            group_size=config.batch.group_size,
            temperature=config.sampling.temperature,
            max_new_tokens=config.sampling.max_new_tokens,
            max_segment_count=agents.max_segments,
            has_scorer=agents.reward == "service",
            stop_token_ids=config.sampling.stop_token_ids,
        )

    async def LeaseTasks(self, request: pb.LeaseTasksRequest, context: Context) -> pb.LeaseTasksResponse:
        """Lease waiting tasks; wait for the first."""
        run = self._with("tasks")
        if not 1 <= request.max_task_count <= _MAX_TASKS:
            raise InvalidInput(f"max_task_count is {request.max_task_count}; it must be in [1, {_MAX_TASKS}]")
        wait = request.wait.ToNanoseconds() / 1e9 if request.HasField("wait") else _WAIT_SECONDS
        if not 0 <= wait <= _MAX_WAIT_SECONDS:
            raise InvalidInput(f"wait is {wait:g} s; it must be in [0, {_MAX_WAIT_SECONDS:g}]")
        attempts = await run.queue.lease(
            _gateway(request.gateway), request.max_task_count, wait=wait, agent=request.agent_incarnation
        )
        return pb.LeaseTasksResponse(tasks=[self._to_task(attempt) for attempt in attempts])

    async def JoinGroup(self, request: pb.JoinGroupRequest, context: Context) -> pb.JoinGroupResponse:
        """Lease an attempt in a group of the agents' own."""
        run = self._with("groups")
        if len(request.attempt_id) != 32 or not set(request.attempt_id) <= _HEX:
            raise InvalidInput(f"attempt_id is {request.attempt_id[:40]!r}; it must be 32 hexadecimal digits")
        check_id(request.key, "key")
        for name in ("owner", "description", "answer", "metadata_json"):
            if (size := len(getattr(request, name).encode())) > _MAX_TEXT_BYTES:
                raise InvalidInput(f"{name} has {size} bytes; the limit is {_MAX_TEXT_BYTES}")
        prompt = own_prompt(
            request.description, answer=request.answer, metadata_json=_check_object(request.metadata_json)
        )
        problem = OwnProblem(request.owner, request.key, prompt, asyncio.get_running_loop().create_future())
        attempt = await run.queue.join(_gateway(request.gateway), request.attempt_id, problem)
        return pb.JoinGroupResponse(task=self._to_task(attempt))

    async def RenewTasks(self, request: pb.RenewTasksRequest, context: Context) -> pb.RenewTasksResponse:
        """Extend leases."""
        if len(request.task_ids) > _MAX_RENEWALS:
            raise InvalidInput(f"{len(request.task_ids)} task_ids; one call renews at most {_MAX_RENEWALS}")
        for name in ("leases", "sessions"):
            if (count := len(getattr(request, name))) not in (0, len(request.task_ids)):
                raise InvalidInput(f"{count} {name} of {len(request.task_ids)} tasks; send one for each, or none")
        if request.all and len(request.leases) < len(request.task_ids):
            raise InvalidInput(f"all = true, and no leases of {len(request.task_ids)} tasks; send one for each")
        queue, now = self._run.queue, self._clock.monotonic()
        if request.all and (gateway := _gateway(request.gateway)):
            queue.return_tasks(gateway, but=set(zip(request.task_ids, request.leases, strict=True)))
        gone = queue.renew(request.task_ids, request.leases, [_session_from(s, now) for s in request.sessions])
        return pb.RenewTasksResponse(ttl=duration(self._run.config.agents.lease_seconds), gone_task_ids=gone)

    async def ListTasks(self, request: pb.ListTasksRequest, context: Context) -> pb.ListTasksResponse:
        """List the leased tasks."""
        now, attempts = self._clock.monotonic(), self._run.queue.leased()
        return pb.ListTasksResponse(tasks=[_state_of(attempt, now) for attempt in attempts])

    async def ReleaseTasks(self, request: pb.ReleaseTasksRequest, context: Context) -> pb.ReleaseTasksResponse:
        """End tasks without a trajectory."""
        if not request.tasks:
            raise InvalidInput("no tasks; name at least one")
        reasons = [check_reason(task.reason) for task in request.tasks]
        for task, reason in zip(request.tasks, reasons, strict=True):
            self._run.queue.release(task.task_id, reason, again=task.again, lease=task.lease)
        return pb.ReleaseTasksResponse()

    async def PutTrajectories(self, request: pb.PutTrajectoriesRequest, context: Context) -> pb.PutTrajectoriesResponse:
        """Store trajectories, one after the other; one that is refused has its own result."""
        if not request.trajectories:
            raise InvalidInput("no trajectories; send at least one")
        return pb.PutTrajectoriesResponse(results=[await self._put(message) for message in request.trajectories])

    # -- parts ------------------------------------------------------------------------------------------------------

    def _with(self, source: str) -> TaskSource:
        """Return the run; raise WrongState when its groups come from another source."""
        run = self._run
        if run.config.agents.source != source:
            raise WrongState(
                f'this needs agents.source = "{source}", and the run has "{run.config.agents.source}"',
                reason="OTHER_SOURCE",
            )
        return run

    def _to_task(self, attempt: Attempt) -> pb.LeasedTask:
        group, prompt = attempt.group, attempt.group.prompt
        left = max(attempt.lease_end - self._clock.monotonic(), 0.001)
        return pb.LeasedTask(
            task_id=attempt.task_id,
            group_id=group.group_id,
            sample_index=attempt.index,
            group_size=len(group.attempts),
            messages_json=prompt.messages_json,
            text="" if prompt.messages_json else prompt.text,
            answer=prompt.answer,
            metadata_json=prompt.metadata_json,
            ttl=duration(left),
            time_left=duration(self._run.queue.time_left(attempt)),
            evaluation=group.evaluation,
            seed=attempt.seed,
            lease=attempt.lease,
        )

    async def _put(self, message: pb.Trajectory) -> pb.PutResult:
        try:
            found = self._run.queue.find(message.task_id)
            digest = hashlib.sha256(message.SerializeToString(deterministic=True)).digest()
            if isinstance(found, bytes):
                _check_same(message.task_id, found, digest)
            else:
                async with found.lock:  # two calls may bring the same trajectory at the same time
                    await self._take(found, message, digest)
        except FourfoldError as error:
            return pb.PutResult(
                task_id=message.task_id,
                code=code_pb2.Code.Value(error.code),
                reason=error.reason,
                message=error.message,
            )
        return pb.PutResult(task_id=message.task_id, code=code_pb2.OK)

    async def _take(self, attempt: Attempt, message: pb.Trajectory, digest: bytes) -> None:
        """Check and store the trajectory of an attempt."""
        run = self._run
        if attempt.state is AttemptState.TAKEN:
            _check_same(attempt.task_id, attempt.digest, digest)
            return
        if not attempt.open or attempt.group.closed.is_set():
            raise NotFound(f"task {attempt.task_id} has ended: {attempt.reason or 'its group closed'}")
        if message.lease and message.lease not in attempt.leases:
            raise NotFound(
                f"task {attempt.task_id} was never given with the lease {message.lease[:40]!r}: another run has a task "
                f"with the same id",
                reason="OTHER_LEASE",
            )
        try:
            segments = check_trajectory(message, group_id=attempt.group.group_id, rules=self._rules(attempt))
        except InvalidInput as error:
            name = attempt.gateway or "gateway"
            run.faults.record(name, BAD_TRAJECTORY, f"{name}: {error.message}")
            log.warning("trajectory refused: gateway=%s: %s", name, error.message)
            run.queue.refuse(attempt)
            raise
        prompt = attempt.group.prompt
        trajectory = Trajectory(
            prompt=prompt,
            segments=segments,
            completion="",  # decoded when the group is complete
            task=AgentTask(text=prompt.text, answer=prompt.answer, metadata_json=prompt.metadata_json),
            metrics=dict(message.metrics),
        )
        if message.HasField("reward"):
            trajectory = trajectory.with_values(score=shortest(message.reward), scorer=AGENT_SCORER)
        run.queue.begin_storing(attempt)
        # Completed even if the gateway dies or leaves. A sample that only the store has would keep its group open for
        # ever, and its trajectory could not be stored again.
        await completed(_store(run, attempt, trajectory, digest))

    def _rules(self, attempt: Attempt) -> TrajectoryRules:
        run, config = self._run, self._run.config
        vocabulary_size, whole = run.vocabulary_size(), config.algorithm.needs_whole_trajectories
        if not vocabulary_size:
            raise Unavailable("no engine has told its vocabulary yet; try again", retry_after=1.0)
        return TrajectoryRules(
            vocabulary_size=vocabulary_size,
            max_tokens=config.model.max_context_tokens,
            max_segments=config.agents.max_segments,
            newest_version=run.newest_version(),
            temperature=config.sampling.temperature,
            needs_reward=config.agents.reward == "agent",
            max_total_tokens=config.batch.tokens_per_micro_batch if whole and not attempt.group.evaluation else 0,
        )


async def _store(run: TaskSource, attempt: Attempt, trajectory: Trajectory, digest: bytes) -> None:
    """Make a trajectory durable, and add it to its group."""
    try:
        if not attempt.group.evaluation:
            await run.experiences.keep(trajectory)
    except BaseException as error:
        run.queue.cancel_storing(attempt)  # otherwise the group would stay open for ever after the gateway left
        if isinstance(error, WrongState):  # the run went back to a checkpoint meanwhile
            raise NotFound(f"task {attempt.task_id} has ended: {error.message}") from None
        raise
    run.queue.take(attempt, trajectory, digest)


def _gateway(name: str) -> str:
    """Return the gateway of a call; raise PermissionDenied when its certificate has another name."""
    caller = principal.current()
    if caller == LOCAL:
        return check_id(name, "gateway") if name else ""
    if name not in ("", caller.name):
        raise PermissionDenied(f"{caller} may not call as gateway {name[:140]!r}", reason="NOT_YOUR_MEMBER_ID")
    return caller.name


def _check_same(task_id: str, stored: bytes, digest: bytes) -> None:
    if stored != digest:
        raise AlreadyExists(f"task {task_id}: another trajectory is stored; a task has one", reason="OTHER_TRAJECTORY")


def _check_object(text: str) -> str:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidInput("metadata_json is not a JSON object; send {} or leave it empty")
    return text or "{}"


def _session_from(message: pb.TaskSession, now: float) -> AgentSession | None:
    if not message.session_id:
        return None
    return AgentSession(
        session_id=message.session_id,
        turn_count=message.turn_count,
        idle_since=now - message.idle.ToNanoseconds() / 1e9 if message.HasField("idle") else None,
        expires_at=now + message.expires_in.ToNanoseconds() / 1e9,
    )


def _state_of(attempt: Attempt, now: float) -> pb.TaskState:
    return pb.TaskState(
        task_id=attempt.task_id,
        gateway=attempt.gateway,
        age=duration(now - attempt.leased_at),
        lease_left=duration(attempt.lease_end - now),
        session=None if attempt.session is None else _session_message(attempt.session, now),
    )


def _session_message(session: AgentSession, now: float) -> pb.TaskSession:
    return pb.TaskSession(
        session_id=session.session_id,
        turn_count=session.turn_count,
        idle=None if session.idle_since is None else duration(now - session.idle_since),
        expires_in=duration(session.expires_at - now),
    )
