"""Implements the operations of the gateway, `AgentApi`: tasks, sessions, sampling and trajectories."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import replace
from typing import Any, Final

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.bounds import (
    MAX_FLOAT32,
    MAX_SCORED_TOKENS,
    MAX_TRAJECTORY_BYTES,
    MAX_TRAJECTORY_METRICS,
    TRAJECTORY_METRIC,
)
from fourfold.config import Config
from fourfold.contract import CONTRACT_VERSION
from fourfold.coordinator.v1 import experience_service_pb2 as experience
from fourfold.errors import (
    AlreadyExists,
    DeadlinePassed,
    FourfoldError,
    InvalidInput,
    NotFound,
    Overloaded,
    PermissionDenied,
    Unauthenticated,
    WrongState,
)
from fourfold.host.cancellation import completed
from fourfold.model.tokenizer import Tokenizer
from fourfold.rpc.codec import check_id, pack_floats
from fourfold.rpc.limits import Quotas
from fourfold.security.access import Security
from fourfold.security.principal import LOCAL_AGENT, Principal
from fourfold.security.tokens import check_token
from fourfold_gateway.api import Caller
from fourfold_gateway.conversation import ChatTemplate
from fourfold_gateway.coordinator_link import FIRST_RENEWAL_SECONDS, CoordinatorLink
from fourfold_gateway.encoding import PromptEncoder, PromptLimits
from fourfold_gateway.engines import EnginePool
from fourfold_gateway.generation import Generator
from fourfold_gateway.sessions import KEY_PREFIX, Session, Sessions, owner_of
from fourfold_gateway.store import SessionStore
from fourfold_gateway.trajectory import TOO_LARGE, Limits

_log = logging.getLogger("fourfold.gateway.core")

_MAX_JSON_BYTES: Final = 64 << 10
_IDLE_SECONDS: Final = (1.0, 600.0, 3600.0)  # least, default, most
_WAIT_SECONDS: Final = (10.0, 60.0)  # default, most
_FEW_TOKENS: Final = 64
_SCORE_SECONDS: Final = 60.0
_TICK_SECONDS: Final = 0.5
_PRUNE_SECONDS: Final = 60.0
_MAX_LEASED: Final = 10_000
_REASON: Final = re.compile(r"[A-Z][A-Z0-9_]{0,62}")
# Reasons of environment services that are not the fault of the task. The task is attempted again, a few times at most.
_AGAIN: Final = frozenset({"ENVIRONMENT_DRAINED", "ENVIRONMENT_DIED", "NO_ENVIRONMENT", "GATEWAY_ERROR"})
# Methods of AgentService that the key of a session allows.
_KEY_METHODS: Final = frozenset(
    {"GetInfo", "GetQuota", "Tokenize", "Detokenize", "ApplyChatTemplate", "Generate", "ScoreTokens", "CloseSession"}
    | {"ExportSession", "WatchSession"}
)


class GatewayCore:
    """The operations of one gateway. Call `start`, then `run` in a task."""

    def __init__(
        self,
        *,
        config: Config,
        tokenizer: Tokenizer,
        engines: EnginePool,
        store: SessionStore,
        quotas: Quotas,
        security: Security | None,
    ) -> None:
        self._config, self._tokenizer, self._engines = config, tokenizer, engines
        self._quotas, self._security = quotas, security
        limits = PromptLimits(config.model.max_context_tokens)
        self._template, self._encoder = ChatTemplate(tokenizer, limits), PromptEncoder(limits, quotas)
        self.sessions = Sessions(
            store,
            self._template,
            Limits(max_segments=config.agents.max_segments, max_context_tokens=config.model.max_context_tokens),
            most=config.gateway.max_open_sessions,
            most_each=config.gateway.max_open_sessions_per_agent,
        )
        self.generator = Generator(
            engines=engines,
            tokenizer=tokenizer,
            template=self._template,
            encoder=self._encoder,
            store=store,
            quotas=quotas,
            max_context_tokens=config.model.max_context_tokens,
            run_info=lambda: self._run().run_info(),
        )
        self.link: CoordinatorLink | None = None  # None: the gateway has no run
        self.http_url = ""
        self._leased: dict[str, tuple[experience.LeasedTask, str, float]] = {}  # task, owner, monotonic end

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read the sessions of an earlier process of this gateway."""
        for session in await self.sessions.restore():
            if (task := session.task) is not None and self.link is not None:
                self.link.track(task)

    async def run(self) -> None:
        """Expire idle sessions and forget old ones, until cancelled."""
        pruned = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = time.monotonic()
            self._leased = {task_id: entry for task_id, entry in self._leased.items() if entry[2] > now}
            try:
                await self._expire_idle()
                if now - pruned > _PRUNE_SECONDS:
                    pruned = now
                    await self.sessions.prune()
            except FourfoldError as error:  # such as a full disk; the next tick tries again
                _log.warning("sessions could not be expired: %s", error)

    async def _expire_idle(self) -> None:
        for session in self.sessions.live:
            if session.stored.state == pb.SESSION_STATE_OPEN and session.expires_in() <= 0:
                await self._expire(session, "IDLE")

    async def on_delivered(self, session_id: str, reason: str) -> None:
        """Note that the run has a trajectory, or refused it with a reason."""
        session = await self.sessions.look_up(session_id)
        if session is not None:
            state = pb.SESSION_STATE_REFUSED if reason else pb.SESSION_STATE_STORED
            await self.sessions.settle(session, state, reason)

    async def on_gone(self, task_id: str, lease: str) -> None:
        """Expire the session of an ended lease: the group closed, another agent has the task, or the run changed."""
        for session in self.sessions.live:
            if (session.stored.task_id, session.lease) == (task_id, lease):
                await self._expire(session, "TASK_GONE")

    def task_sessions(self) -> dict[tuple[str, str], experience.TaskSession]:
        """Return the open sessions as the run sees them, by task and lease."""
        return {
            (session.stored.task_id, session.lease): session.task_message()
            for session in self.sessions.live
            if session.stored.task_id and session.stored.state == pb.SESSION_STATE_OPEN
        }

    async def _expire(self, session: Session, reason: str) -> None:
        async with session.closing:
            if session.stored.state == pb.SESSION_STATE_OPEN:
                await self.sessions.settle(session, pb.SESSION_STATE_EXPIRED, reason)
                if reason == "IDLE":  # a task that is gone may have a new lease, and a release would end that attempt
                    await self._release(session, "SESSION_EXPIRED", again=True)

    async def _release(self, session: Session, reason: str, *, again: bool) -> None:
        if (task := session.task) is not None and self.link is not None:
            await self.link.release(task, reason, again=again)

    def _run(self) -> CoordinatorLink:
        if self.link is None:
            raise WrongState(
                "this gateway has no run, so that it has no tasks and trains on nothing; start it with --coordinator",
                reason="NO_RUN",
            )
        return self.link

    # -- callers ------------------------------------------------------------------------------------------------------

    def check_key(self, key: str, method: str) -> Caller:
        """Return the caller with a key; see `AgentApi`."""
        if key.startswith(KEY_PREFIX):
            found = self.sessions.caller_of_key(key)
            if found is None:
                raise Unauthenticated("unknown session key; the session may have ended", reason="UNKNOWN_SESSION_KEY")
            if method not in _KEY_METHODS:
                raise PermissionDenied(f"a session's key may not call {method}; use a token", reason="SESSION_KEY")
            session_id, owner = found
            role, _, name = owner.partition("/")
            return Caller(Principal(role, name) if name else LOCAL_AGENT, session_id)
        if self._security is None:  # loopback without TLS: ignore the key, which client libraries always send
            return Caller(LOCAL_AGENT)
        return Caller(Principal("agent", check_token(f"Bearer {key}", method, self._security.tokens).name))

    def admit(self, caller: Caller) -> AbstractContextManager[None]:
        """Count a call over HTTP; see `AgentApi`. Programs of this machine have no limit, as on the internal port."""
        return nullcontext() if self._security is None else self._quotas.call(caller.principal)

    async def get_info(self, caller: Caller) -> pb.GetInfoResponse:
        info = self.link.info if self.link is not None else None
        return pb.GetInfoResponse(
            contract_version=CONTRACT_VERSION,
            model=self._config.model.source,
            tokenizer_sha256=self._tokenizer.sha256,
            max_context_tokens=self._config.model.max_context_tokens,
            vocabulary_size=self._tokenizer.vocabulary_size,
            policy_version=self._engines.policy_version,
            training=info is not None and (info.has_tasks or info.has_own_groups),
            run_name=info.run_name if info is not None else "",
            http_url=self.http_url,
            separates_reasoning=bool(self._config.rollout.reasoning_parser),
        )

    async def get_quota(self, caller: Caller) -> pb.GetQuotaResponse:
        limits, tokens = self._quotas.usage(caller.principal)
        counted = self._security is not None and math.isfinite(limits.calls_per_second)  # see `admit`
        return pb.GetQuotaResponse(
            max_open_sessions=self.sessions.most_each,
            open_session_count=self.sessions.open_count(owner_of(caller.principal)),
            max_tokens_in_flight=int(limits.tokens_in_flight) if math.isfinite(limits.tokens_in_flight) else 0,
            tokens_in_flight=tokens,
            max_calls_per_second=limits.calls_per_second if counted else 0.0,
        )

    # -- text ---------------------------------------------------------------------------------------------------------

    async def tokenize(self, caller: Caller, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        special = request.add_special_tokens
        ids = await self._encoder.run(caller.principal, request.text, self._tokenizer.encode, add_special=special)
        return pb.TokenizeResponse(token_ids=ids)

    async def detokenize(self, caller: Caller, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        size = self._tokenizer.vocabulary_size
        count, most = len(request.token_ids), self._encoder.limits.text_bytes  # the most ids that Tokenize can return
        if count > most:
            raise InvalidInput(f"{count} token ids; at most {most} are decoded in one call: send them in parts")
        ids = list(request.token_ids)
        if wrong := [i for i in (min(ids, default=0), max(ids, default=0)) if not 0 <= i < size]:
            raise InvalidInput(f"token id {wrong[0]} is outside the vocabulary [0, {size})")
        if len(ids) <= _FEW_TOKENS:  # decoding takes less time than the start of a thread
            return pb.DetokenizeResponse(text=self._tokenizer.decode(ids))
        return pb.DetokenizeResponse(text=await asyncio.to_thread(self._tokenizer.decode, ids))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; see `AgentApi`."""
        return self._tokenizer.token_bytes(token_id)

    def is_neutral(self, variables: Mapping[str, Any]) -> bool:
        """Compare the renderings of a conversation; see `AgentApi`."""
        return self._template.is_neutral(variables)

    async def apply_chat_template(
        self, caller: Caller, request: pb.ApplyChatTemplateRequest
    ) -> pb.ApplyChatTemplateResponse:
        text, ids = await self._encoder.run(caller.principal, request.chat, self._template.encode)
        return pb.ApplyChatTemplateResponse(text=text, token_ids=ids)

    # -- tasks and sessions -------------------------------------------------------------------------------------------

    async def next_task(self, caller: Caller, request: pb.NextTaskRequest) -> pb.NextTaskResponse:
        link = self._run()
        if not link.run_info().has_tasks:
            raise WrongState("this run has no tasks for agents; set agents.source = 'tasks'", reason="NO_TASKS")
        default, most = _WAIT_SECONDS
        wait = request.wait.ToNanoseconds() / 1e9 if request.HasField("wait") else default
        if not 0 <= wait <= most:
            raise InvalidInput(f"wait is {wait:g} s; it must be in [0, {most:g}] s")
        self.sessions.check_room(owner_of(caller.principal), trained=True)
        if len(self._leased) >= _MAX_LEASED:
            raise Overloaded("too many tasks wait for their sessions; open these first", retry_after=5.0)
        if request.incarnation:
            check_id(request.incarnation, "incarnation")
        task = await link.lease(wait, agent=request.incarnation)
        if task is None:
            return pb.NextTaskResponse()
        ttl = task.ttl.ToNanoseconds() / 1e9
        # If the session opened later, the lease could end before its first renewal.
        end = time.monotonic() + ttl - min(ttl / 3, FIRST_RENEWAL_SECONDS)
        self._leased[task.task_id] = (task, owner_of(caller.principal), end)
        return pb.NextTaskResponse(task=_agent_task(task))

    async def open_session(self, caller: Caller, request: pb.OpenSessionRequest) -> pb.OpenSessionResponse:
        check_id(request.session_id, "session_id")
        least, default, most = _IDLE_SECONDS
        idle = request.idle_timeout.ToNanoseconds() / 1e9 if request.HasField("idle_timeout") else default
        if not least <= idle <= most:
            raise InvalidInput(f"idle_timeout is {idle:g} s; it must be in [{least:g}, {most:g}] s")
        owner, attempt = owner_of(caller.principal), _attempt(request)
        if (session := await self.sessions.look_up(request.session_id)) is not None:
            if (session.stored.owner, session.attempt) != (owner, attempt):
                raise AlreadyExists(
                    f"session {request.session_id} is another attempt or another caller's; choose a new id"
                )
            return pb.OpenSessionResponse(session=session.message(), session_key=session.key)
        self.sessions.check_room(owner, trained=request.WhichOneof("attempt") is not None)
        task = await self._take_task(caller, request)
        # Another call must not open a second session for the task.
        leased = None if task is None else self._leased.pop(task.task_id, None)

        async def add() -> Session:
            try:
                session = await self.sessions.add(request.session_id, owner, attempt, task, idle)
            except DeadlinePassed:  # the session is open; a repeated call finds it
                self._track(task)
                raise
            except FourfoldError:
                if leased is not None:
                    self._leased[leased[0].task_id] = leased
                raise
            self._track(task)
            return session

        # Completed even if the caller leaves, because its repeated call must find the session with its key.
        session = await completed(add())
        return pb.OpenSessionResponse(session=session.message(), session_key=session.key)

    def _track(self, task: experience.LeasedTask | None) -> None:
        if task is not None:
            self._run().track(task)

    async def _take_task(self, caller: Caller, request: pb.OpenSessionRequest) -> experience.LeasedTask | None:
        """Return the task that a session attempts; None: none."""
        kind, owner = request.WhichOneof("attempt"), owner_of(caller.principal)
        if kind is None:
            return None
        link = self._run()
        if kind == "task_id":
            task, holder, end = self._leased.get(request.task_id, (None, "", 0.0))
            if task is None or holder != owner or end < time.monotonic():
                raise NotFound(f"task {request.task_id[:140]!r} is not leased to you, or no longer; call NextTask")
            return task
        if not link.run_info().has_own_groups:
            raise WrongState("this run takes no groups of agents; set agents.source = 'groups'", reason="NO_OWN_GROUPS")
        group = request.own_group
        check_id(group.key, "own_group.key")
        for name in ("description", "answer", "metadata_json"):
            if (size := len(getattr(group, name).encode())) > _MAX_JSON_BYTES:
                raise InvalidInput(f"own_group.{name} has {size} bytes; the limit is {_MAX_JSON_BYTES}")
        _check_object(group.metadata_json, "own_group.metadata_json")
        return await link.join_group(
            experience.JoinGroupRequest(
                attempt_id=hashlib.sha256(f"{owner}/{request.session_id}".encode()).hexdigest()[:32],
                key=group.key,
                owner=caller.principal.name,
                description=group.description,
                answer=group.answer,
                metadata_json=group.metadata_json,
            )
        )

    async def generate(
        self, caller: Caller, request: pb.GenerateRequest, *, timeout: float
    ) -> AsyncGenerator[pb.TurnChunk, None]:
        """Sample one turn; see `AgentApi`."""
        session_id = request.session_id or caller.session_id
        session = await self.sessions.find(caller, session_id) if session_id else None
        async with aclosing(self.generator.generate(caller, session, request, timeout=timeout)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def score_tokens(self, caller: Caller, request: pb.ScoreTokensRequest) -> pb.ScoreTokensResponse:
        ids, size = list(request.token_ids), self._tokenizer.vocabulary_size
        most = min(MAX_SCORED_TOKENS, self._config.model.max_context_tokens - 1)
        if not 2 <= len(ids) <= most or not all(0 <= i < size for i in ids):
            raise InvalidInput(f"token_ids has {len(ids)} tokens; it must have 2 to {most}, each in [0, {size})")
        with self._quotas.tokens(caller.principal, len(ids)):
            logprobs, version = await self._engines.call(
                caller.session_id or str(caller.principal),
                lambda client: client.score_tokens(ids, timeout=_SCORE_SECONDS),
                timeout=_SCORE_SECONDS,
            )
        return pb.ScoreTokensResponse(logprobs=pack_floats(logprobs), policy_version=version)

    async def close_session(self, caller: Caller, request: pb.CloseSessionRequest) -> pb.CloseSessionResponse:
        session = await self.sessions.find(caller, request.session_id)
        digest = hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
        kind = _check_outcome(request)

        async def end() -> None:
            async with session.closing:
                stored = session.stored
                if stored.state == pb.SESSION_STATE_EXPIRED:
                    session.check_open()
                if stored.state != pb.SESSION_STATE_OPEN:
                    if stored.outcome_sha256 != digest:
                        raise AlreadyExists(f"session {request.session_id} was closed with another outcome")
                elif kind == "abandon_reason":
                    reason = request.abandon_reason
                    await self.sessions.settle(session, pb.SESSION_STATE_ABANDONED, reason, outcome_sha256=digest)
                    await self._release(session, reason, again=reason in _AGAIN)
                else:
                    await self._close(session, request, digest)

        # Completed even if the caller leaves: the store could have a closed session that still takes turns here.
        await completed(end())
        return pb.CloseSessionResponse(session=session.message())

    async def _close(self, session: Session, request: pb.CloseSessionRequest, digest: bytes) -> None:
        """Make the trajectory durable; without a task, settle the session."""
        if session.turns_in_flight:
            raise WrongState("a turn is in flight; wait for its end, or cancel it", reason="TURN_RUNNING")
        scored = request.WhichOneof("outcome") == "score"
        task, turns = session.task, session.trajectory.turn_count
        rewards = {turn.turn_index: turn.reward for turn in request.turn_rewards}
        stored = replace(
            session.stored,
            reward=None if scored else request.reward,
            metrics=dict(request.metrics),
            outcome_sha256=digest,
        )
        if task is None:
            if scored:
                raise WrongState("only a session of a task or of a group can be scored by the run", reason="NO_TASK")
            # A session without a task is not sent to the run. Only its agent can read it, with ExportSession.
            changes: dict[str, Any] = {"reward": stored.reward, "metrics": stored.metrics, "outcome_sha256": digest}
            return await self.sessions.settle(session, pb.SESSION_STATE_CLOSED, **changes)
        if scored and not self._run().run_info().has_scorer:
            raise WrongState("the run has no reward service for agents; close with a reward", reason="NO_SCORER")
        segments = session.trajectory.to_experiences(
            task.task_id, task.group_id, turn_rewards=rewards, truncated=request.truncated
        )
        trajectory = experience.Trajectory(
            task_id=task.task_id,
            segments=segments,
            reward=None if scored else request.reward,
            metrics=request.metrics,
            turn_count=turns,
            lease=task.lease,
        )
        data = trajectory.SerializeToString()
        if len(data) > MAX_TRAJECTORY_BYTES:
            raise WrongState(
                f"the trajectory has {len(data)} bytes, and the run takes {MAX_TRAJECTORY_BYTES}; abandon the session, "
                f"and close the next one after fewer tokens",
                reason=TOO_LARGE,
            )
        await self.sessions.close(session, replace(stored, state=pb.SESSION_STATE_CLOSED), data)
        self._run().wake()

    async def export_session(self, caller: Caller, request: pb.ExportSessionRequest) -> pb.ExportSessionResponse:
        session = await self.sessions.find(caller, request.session_id)
        response = pb.ExportSessionResponse(session=session.message())
        if session.trajectory.turn_count:
            stored = session.stored
            names = stored.task_id or stored.session_id, stored.group_id or stored.session_id
            response.segments.extend(session.trajectory.to_experiences(*names))
        for turn in session.trajectory.turns:
            response.turns.add(
                segment_index=session.trajectory.final_index(turn),
                prompt_token_count=turn.prompt_token_count,
                completion_token_count=turn.completion.token_ids.size,
                request_id=turn.request_id,
                message=session.conversation.reply_of(turn),
            )
        return response

    async def watch_session(self, caller: Caller, request: pb.WatchSessionRequest) -> AsyncIterator[pb.Session]:
        session = await self.sessions.find(caller, request.session_id)
        async for state in self.sessions.watch(session):
            yield state


def _attempt(request: pb.OpenSessionRequest) -> bytes:
    """Return the SHA-256 of the task or group that a session attempts."""
    same = pb.OpenSessionRequest()
    same.CopyFrom(request)
    same.ClearField("session_id")
    same.ClearField("idle_timeout")
    return hashlib.sha256(same.SerializeToString(deterministic=True)).digest()


def _check_outcome(request: pb.CloseSessionRequest) -> str:
    """Check the outcome of a session; return its kind."""
    kind = request.WhichOneof("outcome")
    if kind is None or (kind == "score" and not request.score):
        raise InvalidInput(
            'the outcome is missing; close with one of {"reward": 1.0}, {"score": true} (the run scores the session) '
            'and {"abandon_reason": "GAVE_UP"}'
        )
    numbers = [
        ("reward", request.reward),
        *((f"metric {name[:80]!r}", value) for name, value in request.metrics.items()),
        *((f"the reward of turn {turn.turn_index}", turn.reward) for turn in request.turn_rewards),
    ]
    if wrong := next((f"{what} is {value}" for what, value in numbers if not math.isfinite(value)), ""):
        raise InvalidInput(f"{wrong}; it must be a finite number")
    if abs(request.reward) > MAX_FLOAT32:
        raise InvalidInput(f"reward is {request.reward}; it must be a float32, at most {MAX_FLOAT32:.4g} in size")
    if (unnamed := next((name for name in request.metrics if not TRAJECTORY_METRIC.fullmatch(name)), None)) is not None:
        raise InvalidInput(f"metric {unnamed[:80]!r}: a name has 1 to 63 characters of [A-Za-z0-9_./-]")
    if kind == "abandon_reason" and not _REASON.fullmatch(request.abandon_reason):
        raise InvalidInput(f"abandon_reason is {request.abandon_reason[:80]!r}; give UPPER_SNAKE_CASE, at most 63")
    if len(request.metrics) > MAX_TRAJECTORY_METRICS:
        raise InvalidInput(f"{len(request.metrics)} metrics; at most {MAX_TRAJECTORY_METRICS}")
    if len({turn.turn_index for turn in request.turn_rewards}) < len(request.turn_rewards):
        raise InvalidInput("turn_rewards has two rewards of one turn; give at most one for each")
    return str(kind)


def _check_object(text: str, what: str) -> None:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidInput(f"{what} must be a JSON object")


def _agent_task(task: experience.LeasedTask) -> pb.Task:
    result = pb.Task(
        task_id=task.task_id,
        group_id=task.group_id,
        sample_index=task.sample_index,
        group_size=task.group_size,
        text=task.text,
        answer=task.answer,
        metadata_json=task.metadata_json,
        time_left=task.time_left,
        evaluation=task.evaluation,
        seed=task.seed,
    )
    messages = json.loads(task.messages_json) if task.messages_json else []
    for message in messages:
        added = result.messages.add(
            role=str(message.get("role", "")),
            content=str(message.get("content") or ""),
            name=str(message.get("name", "")),
            tool_call_id=str(message.get("tool_call_id", "")),
            reasoning=str(message.get("reasoning_content", "")),
        )
        for call in message.get("tool_calls", ()):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            added.tool_calls.add(id=call.get("id", ""), name=name, arguments_json=text)
    return result
