"""Checks of the ends of sessions, of quotas, and of the run's tasks."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Final

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.bounds import MAX_NUMBER
from fourfold.errors import Overloaded, WrongState
from fourfold.rpc.codec import ID_PATTERN
from fourfold_tools.conformance.calls import check_retry_delay, refuse
from fourfold_tools.conformance.checks import Checks, Skipped, Violation
from fourfold_tools.conformance.gateway.probe import ABANDONED, GatewayProbe

OUTCOMES: Final = Checks[GatewayProbe]()
_MOST_OPENED: Final = 100
_TASK_SECONDS: Final = 10.0
_ENDED: Final = (pb.SESSION_STATE_CLOSED, pb.SESSION_STATE_STORED)


@OUTCOMES.add
async def check_close(probe: GatewayProbe) -> None:
    """The same CloseSession again has the same response; another outcome is ALREADY_EXISTS, and no turn follows."""
    async with probe.session() as opened:
        name = opened.session.session_id
        await probe.one(probe.request(name))
        request = pb.CloseSessionRequest(session_id=name, reward=0.5, metrics={"calls": 1.0})
        closed = (await probe.call(request)).session
        if closed.session_id != name or closed.state not in _ENDED:
            raise Violation(f"the closed session is {pb.SessionState.Name(closed.state)}; it must be CLOSED or STORED")
        if (again := (await probe.call(request)).session).state not in _ENDED or again.turn_count != closed.turn_count:
            raise Violation("the same CloseSession again had another response; it is idempotent")
        for outcome in ({"reward": 0.25}, {"abandon_reason": ABANDONED}):
            other = pb.CloseSessionRequest(session_id=name, **outcome)
            work = probe.stub.CloseSession(other, timeout=probe.seconds)
            await refuse(work, "CloseSession with another outcome", "ALREADY_EXISTS")
        work = probe.drop(probe.request(name))
        await refuse(work, "a turn of a closed session", "FAILED_PRECONDITION", reason="SESSION_NOT_OPEN")
        if (await probe.export(name)).session.turn_count != 1:
            raise Violation("ExportSession of a closed session has another number of turns")


@OUTCOMES.add
async def check_abandon(probe: GatewayProbe) -> None:
    """An abandoned session is ABANDONED with its reason, also when the call is repeated, and takes no turns."""
    async with probe.session() as opened:
        name = opened.session.session_id
        for _ in range(2):
            session = await probe.give_up(name)
            if (session.state, session.reason) != (pb.SESSION_STATE_ABANDONED, ABANDONED):
                state = pb.SessionState.Name(session.state)
                raise Violation(f"the session is {state} {session.reason!r}; it must be ABANDONED {ABANDONED!r}")
        work = probe.drop(probe.request(name))
        await refuse(work, "a turn of an abandoned session", "FAILED_PRECONDITION", reason="SESSION_NOT_OPEN")


_MALFORMED: Final[Sequence[tuple[str, Callable[[pb.CloseSessionRequest], None]]]] = (
    ("CloseSession without an outcome", lambda request: request.ClearField("outcome")),
    ("score = false", lambda request: setattr(request, "score", False)),
    *(
        (f"reward = {value}", lambda request, value=value: setattr(request, "reward", value))
        for value in (math.nan, math.inf)
    ),
    *(
        (f"abandon_reason = {text[:20]!r}", lambda request, text=text: setattr(request, "abandon_reason", text))
        for text in ("no idea", "lower", "A" * 64, "")
    ),
    ("a metric that is NaN", lambda request: request.metrics.update({"calls": math.nan})),
    ("65 metrics", lambda request: request.metrics.update({f"m{i}": 1.0 for i in range(65)})),
    (
        "two rewards of one turn",
        lambda request: request.turn_rewards.extend([pb.TurnReward(turn_index=0, reward=1.0)] * 2),
    ),
)


@OUTCOMES.add
async def check_malformed_close(probe: GatewayProbe) -> None:
    """A malformed CloseSession is refused with INVALID_ARGUMENT, and the session stays open."""
    async with probe.session() as opened:
        name = opened.session.session_id
        await probe.one(probe.request(name))
        for what, change in _MALFORMED:
            request = pb.CloseSessionRequest(session_id=name, reward=1.0)
            change(request)
            work = probe.stub.CloseSession(request, timeout=probe.seconds)
            await refuse(work, what, "INVALID_ARGUMENT")
        work = probe.stub.CloseSession(pb.CloseSessionRequest(session_id=name, score=True), timeout=probe.seconds)
        await refuse(work, "score = true of a session without a task", "FAILED_PRECONDITION", reason="NO_TASK")
        if (await probe.export(name)).session.state != pb.SESSION_STATE_OPEN:
            raise Violation("a session is no longer OPEN after refused CloseSession calls")


@OUTCOMES.add
async def check_quota(probe: GatewayProbe) -> None:
    """GetQuota has the limits of the caller, and counts its open sessions."""
    before = await _quota(probe)
    async with probe.session():
        during = await _quota(probe)
        if during.open_session_count <= 0 or during.open_session_count < before.open_session_count:
            raise Violation(f"open_session_count is {during.open_session_count} while a session is open")
    if (after := await _quota(probe)).open_session_count > during.open_session_count:
        raise Violation(f"open_session_count is {after.open_session_count} after a session was abandoned")
    if 0 < before.open_session_count == during.open_session_count == after.open_session_count:
        raise Skipped("the caller has other sessions, which hide the one of this check")
    if after.open_session_count >= during.open_session_count:
        raise Violation(f"open_session_count stays {after.open_session_count} after a session was abandoned")


async def _quota(probe: GatewayProbe) -> pb.GetQuotaResponse:
    quota: pb.GetQuotaResponse = await probe.call(pb.GetQuotaRequest())
    names = ("max_open_sessions", "open_session_count", "max_tokens_in_flight", "tokens_in_flight")
    for name in (*names, "max_calls_per_second"):
        if not 0 <= getattr(quota, name) < math.inf:
            raise Violation(f"{name} is {getattr(quota, name)}; it must be finite and at least 0")
    return quota


@OUTCOMES.add
async def check_session_limit(probe: GatewayProbe) -> None:
    """One session more than the quota is RESOURCE_EXHAUSTED, reason TOO_MANY_SESSIONS, with a retry delay."""
    quota = await _quota(probe)
    if not 0 < (most := quota.max_open_sessions) <= _MOST_OPENED:
        raise Skipped(f"{most} sessions are too many for a check" if most else "sessions have no limit")
    async with AsyncExitStack() as stack:
        for number in range(most + 1):
            try:
                await stack.enter_async_context(probe.session())
            except (Overloaded, Skipped):
                what = f"session {number + 1}"
                request = pb.OpenSessionRequest(session_id=f"conformance-{uuid.uuid4().hex}")
                work = probe.stub.OpenSession(request, timeout=probe.seconds)
                refusal = await refuse(work, what, "RESOURCE_EXHAUSTED", reason="TOO_MANY_SESSIONS")
                check_retry_delay(refusal, what)
                break
        else:
            raise Violation(f"{most + 1} sessions are open, and the quota has {most}")
    async with probe.session():
        pass


@OUTCOMES.add
async def check_tasks(probe: GatewayProbe) -> None:
    """NextTask leases a task of the run, which opens a session; without a run it is FAILED_PRECONDITION."""
    bad = pb.NextTaskRequest()
    bad.wait.FromSeconds(61)
    if not probe.info.training:
        await refuse(
            probe.stub.NextTask(pb.NextTaskRequest(), timeout=probe.seconds),
            "NextTask without a run",
            "FAILED_PRECONDITION",
        )
        return
    request = pb.NextTaskRequest()
    request.wait.FromNanoseconds(int(min(_TASK_SECONDS, probe.seconds / 2) * 1e9))
    try:
        task = (await probe.call(request)).task
    except WrongState as error:
        raise Skipped(f"the run leases no tasks: {error.message[:200]}") from None
    await refuse(probe.stub.NextTask(bad, timeout=probe.seconds), "wait = 61 s", "INVALID_ARGUMENT")
    unknown = pb.OpenSessionRequest(session_id=f"conformance-{uuid.uuid4().hex}", task_id="no-such-task")
    work = probe.stub.OpenSession(unknown, timeout=probe.seconds)
    await refuse(work, "a task that was not leased", "NOT_FOUND")
    if not task.task_id:
        raise Skipped("no task came")
    _check_task(task)
    async with probe.session(task_id=task.task_id) as opened:
        session = opened.session
        if (session.task_id, session.group_id) != (task.task_id, task.group_id):
            raise Violation(
                f"the session of task {task.task_id} has task {session.task_id!r}, group {session.group_id!r}"
            )
        await probe.one(probe.request(session.session_id, temperature=0.5))
        segment = (await probe.export(session.session_id)).segments[0]
        if segment.group_id != task.group_id:
            raise Violation(f"the segment has group {segment.group_id!r}, and its task {task.group_id!r}")
        wrong = pb.CloseSessionRequest(session_id=session.session_id, reward=1.0)
        wrong.turn_rewards.add(turn_index=7, reward=1.0)
        work = probe.stub.CloseSession(wrong, timeout=probe.seconds)
        await refuse(work, "a reward of a turn that was not sampled", "INVALID_ARGUMENT")
        if (await probe.give_up(session.session_id)).state != pb.SESSION_STATE_ABANDONED:
            raise Violation("the abandoned session of a task is not ABANDONED")


def _check_task(task: pb.Task) -> None:
    for name in ("task_id", "group_id"):
        if not ID_PATTERN.fullmatch(getattr(task, name)):
            raise Violation(f"{name} of a task is {getattr(task, name)[:140]!r}; it must be [A-Za-z0-9_-]{{1,128}}")
    if not 0 <= task.sample_index < task.group_size:
        raise Violation(f"sample_index of a task is {task.sample_index}, of {task.group_size}")
    if bool(task.messages) == bool(task.text):
        raise Violation("a task must have either messages or a text")
    if task.time_left.ToNanoseconds() <= 0:
        raise Violation("time_left of a task is not above 0")
    if not 0 <= task.seed < MAX_NUMBER:
        raise Violation(f"seed of a task is {task.seed}; it must be in [0, 2^53)")
    try:
        fields = json.loads(task.metadata_json or "{}")
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise Violation("metadata_json of a task is no JSON object")
