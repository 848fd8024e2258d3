"""Keeps the sessions of a gateway: opens, expires and settles them, checks keys, and restores them after a restart.

    open --> turns --> closed --> stored | refused
      '--> expired | abandoned

Open sessions are in memory and in the store; settled ones are in the store alone, for `_KEEP_SECONDS`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Final

from google.protobuf.message import DecodeError

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.coordinator.v1 import experience_service_pb2 as experience
from fourfold.errors import AlreadyExists, DeadlinePassed, NotFound, Overloaded, PermissionDenied, WrongState
from fourfold.security.principal import Principal
from fourfold_gateway.api import Caller
from fourfold_gateway.conversation import ChatTemplate, Conversation
from fourfold_gateway.store import SessionStore, StoredSession
from fourfold_gateway.trajectory import Limits, SessionTokens

_log = logging.getLogger("fourfold.gateway.sessions")

KEY_PREFIX: Final = "ffs_"
_KEEP_SECONDS: Final = 3600.0
_RETRY_SECONDS: Final = 2.0
_DIGEST_BYTES: Final = 32
_MAX_ENDINGS: Final = 64  # most reasons that are counted: agents may invent any
_PRUNE_COUNT: Final = 200  # sessions deleted in one transaction; turns wait for its end


def owner_of(principal: Principal) -> str:
    """Return the name under which a caller owns sessions. Without TLS, all callers of this machine are one."""
    return str(principal) if principal.name else "local"


class Session:
    """One session with its tokens."""

    def __init__(
        self, stored: StoredSession, trajectory: SessionTokens, conversation: Conversation, *, key: str
    ) -> None:
        self.stored, self.trajectory, self.conversation = stored, trajectory, conversation
        task = self.task
        self.lease = task.lease if task is not None else ""  # cached, because the task never changes
        self.key = key  # kept until the first turn, for a repeated OpenSession; later only its digest is known
        self.used = time.monotonic()
        self.turns_in_flight = 0
        self.running: dict[str, asyncio.Event] = {}  # by request_id; the event is set when the turn has ended
        self.closing = asyncio.Lock()
        self.writing = asyncio.Lock()  # held while finished turns are added and written
        self._changed = asyncio.Event()

    @property
    def session_id(self) -> str:
        return self.stored.session_id

    @property
    def task(self) -> experience.LeasedTask | None:
        """Return the leased task; None: the session is not trained on."""
        data = self.stored.task[_DIGEST_BYTES:]
        return experience.LeasedTask.FromString(data) if data else None

    @property
    def attempt(self) -> bytes:
        """Return the digest of the task or group that the session attempts."""
        return self.stored.task[:_DIGEST_BYTES]

    def touch(self) -> None:
        """Restart the idle time."""
        self.used = time.monotonic()

    def set(self, stored: StoredSession) -> None:
        """Replace the state and wake the watchers."""
        self.stored = stored
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def next_change(self) -> asyncio.Event:
        """The event that the next change sets."""
        return self._changed

    def check_open(self) -> None:
        """Raise WrongState unless the session takes turns."""
        if self.stored.state != pb.SESSION_STATE_OPEN:
            state = pb.SessionState.Name(self.stored.state).removeprefix("SESSION_STATE_")
            raise WrongState(
                f"session {self.session_id} is {state} {self.stored.reason}".rstrip() + "; open another one",
                reason="SESSION_NOT_OPEN",
            )

    def expires_in(self) -> float:
        """Return the seconds until the session expires."""
        if self.turns_in_flight:
            return self.stored.idle_seconds
        return self.used + self.stored.idle_seconds - time.monotonic()

    def task_message(self) -> experience.TaskSession:
        """Return the session as the run sees it."""
        result = experience.TaskSession(session_id=self.session_id, turn_count=self.trajectory.turn_count)
        result.expires_in.FromNanoseconds(max(int(self.expires_in() * 1e9), 1))
        if not self.turns_in_flight:
            result.idle.FromNanoseconds(int((time.monotonic() - self.used) * 1e9))
        return result

    def message(self) -> pb.Session:
        """Return the session as agents see it."""
        stored, trajectory = self.stored, self.trajectory
        result = pb.Session(
            session_id=stored.session_id,
            state=stored.state,
            task_id=stored.task_id,
            group_id=stored.group_id,
            turn_count=trajectory.turn_count,
            segment_count=len(trajectory.segments),
            token_count=trajectory.token_count,
            reason=stored.reason,
            reward=stored.reward,
        )
        if stored.state == pb.SESSION_STATE_OPEN:
            result.expire_time.FromNanoseconds(int((time.time() + self.expires_in()) * 1e9))
        return result


class Sessions:
    """The sessions of one gateway. Use it from one event loop."""

    def __init__(
        self, store: SessionStore, template: ChatTemplate, limits: Limits, *, most: int, most_each: int
    ) -> None:
        """Prepare; `most` sessions may be open in all, and `most_each` of one owner.

        Sessions with and without a task are counted apart. Without TLS, the environments of the run and all other
        programs of the machine are one owner, and sessions without a task must not use up their limits.
        """
        self.store, self._template, self._limits = store, template, limits
        self._most, self.most_each = most, most_each
        self._live: dict[str, Session] = {}  # not settled
        self._by_key: dict[bytes, str] = {}
        self._open: Counter[tuple[str, bool]] = Counter()  # by owner, and whether the session has a task
        self.ended: Counter[str] = Counter()  # settled sessions by state and reason

    async def restore(self) -> list[Session]:
        """Read the sessions that were not settled when the last gateway ended; their idle time begins anew.

        If the disk lost a turn of a session, only that session ends.
        """
        for stored in await self.store.load_unsettled():
            try:
                session, damaged = await self._build(stored, key=""), False
            except (ValueError, LookupError, struct.error, DecodeError) as error:
                _log.error("session cannot be restored: session=%s error=%r", stored.session_id, error)
                trajectory = SessionTokens(self._limits)
                session, damaged = Session(stored, trajectory, Conversation(self._template, trajectory), key=""), True
            self._add(session)
            if damaged and stored.state == pb.SESSION_STATE_OPEN:  # the trajectory of a closed session is in the outbox
                await self.settle(session, pb.SESSION_STATE_EXPIRED, "DAMAGED")
        return list(self._live.values())

    @property
    def live(self) -> list[Session]:
        return list(self._live.values())

    def open_count(self, owner: str) -> int:
        """Return the number of an owner's open sessions with a task, or without one, whichever is larger."""
        return max(self._open[owner, trained] for trained in (False, True))

    def caller_of_key(self, key: str) -> tuple[str, str] | None:
        """Return session id and owner of a session's key; None: no open session has it."""
        session_id = self._by_key.get(hashlib.sha256(key.encode()).digest())
        session = self._live.get(session_id or "")
        return (session.session_id, session.stored.owner) if session else None

    def check_room(self, owner: str, *, trained: bool) -> None:
        """Raise Overloaded when the owner, or all owners together, have too many open sessions of one kind."""
        kind = "of the run's tasks and groups" if trained else "without a task"
        total = sum(count for (_, each), count in self._open.items() if each == trained)
        for count, most, whose in (
            (self._open[owner, trained], self.most_each, f"of {owner} (gateway.max_open_sessions_per_agent)"),
            (total, self._most, "of all agents (gateway.max_open_sessions)"),
        ):
            if count >= most:
                raise Overloaded(
                    f"{count} sessions {kind} {whose} are open, and {most} may be; close some, or try again later",
                    reason="TOO_MANY_SESSIONS",
                    retry_after=_RETRY_SECONDS,
                )

    async def find(self, caller: Caller, session_id: str) -> Session:
        """Return a session of the caller, also a settled one.

        Raises:
            NotFound: there is none, or it belongs to another caller.
            PermissionDenied: the caller has the key of another session.
        """
        if caller.session_id and session_id != caller.session_id:
            raise PermissionDenied(f"this key belongs to session {caller.session_id} alone", reason="OTHER_SESSION")
        session = await self.look_up(session_id)
        if session is None or session.stored.owner != owner_of(caller.principal):
            raise NotFound(f"no session {session_id[:140]!r}; open it first (settled ones are kept for an hour)")
        return session

    async def look_up(self, session_id: str) -> Session | None:
        """Return a session of any caller; None if there is none."""
        if session_id in self._live:
            return self._live[session_id]
        stored = await self.store.load_session(session_id)
        return None if stored is None else self._live.get(session_id) or await self._build(stored, key="")

    async def add(
        self, session_id: str, owner: str, attempt: bytes, task: experience.LeasedTask | None, idle_seconds: float
    ) -> Session:
        """Open a session with a new key. After DeadlinePassed the session is open, but may be lost in a restart."""
        self.check_room(owner, trained=task is not None)
        if session_id in self._live:
            raise AlreadyExists(f"session {session_id} is being opened by another call")
        key, now = KEY_PREFIX + secrets.token_urlsafe(32), time.time()
        stored = StoredSession(
            session_id=session_id,
            owner=owner,
            key_digest=hashlib.sha256(key.encode()).digest(),
            state=pb.SESSION_STATE_OPEN,
            task_id=task.task_id if task else "",
            group_id=task.group_id if task else "",
            task=attempt + (task.SerializeToString() if task else b""),
            idle_seconds=idle_seconds,
            created_at=now,
            used_at=now,
        )
        trajectory = SessionTokens(self._limits)
        session = Session(stored, trajectory, Conversation(self._template, trajectory), key=key)
        self._add(session)
        try:
            await self.store.put_session(stored)
        except DeadlinePassed:
            raise  # the store may still write it
        except BaseException:
            self._remove(session)
            raise
        return session

    async def close(self, session: Session, stored: StoredSession, trajectory: bytes) -> None:
        """Make a closed trajectory durable."""
        await self.store.close_session(stored, trajectory)
        self._stop_counting(session)
        session.set(stored)

    async def settle(
        self, session: Session, state: pb.SessionState.ValueType, reason: str = "", **changes: object
    ) -> None:
        """End a session for good."""
        stored = replace(session.stored, state=state, reason=reason, settled_at=time.time(), **changes)  # type: ignore[arg-type]
        await self.store.settle(stored)
        self._stop_counting(session)
        session.set(stored)
        self._remove(session)
        name = pb.SessionState.Name(state).removeprefix("SESSION_STATE_")
        ending = f"{name}_{reason}".rstrip("_")
        if ending not in self.ended and len(self.ended) >= _MAX_ENDINGS:
            ending = f"{name}_OTHER"
        self.ended[ending] += 1

    async def prune(self) -> None:
        """Delete sessions that were settled long ago."""
        more = True
        while more:
            more = await self.store.prune(time.time() - _KEEP_SECONDS, max_count=_PRUNE_COUNT) == _PRUNE_COUNT

    async def watch(self, session: Session) -> AsyncIterator[pb.Session]:
        """Yield the session now and after every change, until it is settled."""
        settled = False
        while not settled:
            # Read state and event together: otherwise a change could be missed while the consumer is busy.
            change, message, settled = session.next_change, session.message(), session.stored.settled_at is not None
            yield message
            if not settled:
                await change.wait()

    async def _build(self, stored: StoredSession, *, key: str) -> Session:
        turns = await self.store.load_turns(stored.session_id)
        trajectory = SessionTokens.restore(self._limits, [each.turn for each in turns])
        triples = [(each.turn, each.chat, each.reply) for each in turns]
        return Session(stored, trajectory, Conversation.restore(self._template, trajectory, triples), key=key)

    def _add(self, session: Session) -> None:
        self._live[session.session_id] = session
        self._by_key[session.stored.key_digest] = session.session_id
        if session.stored.state == pb.SESSION_STATE_OPEN:
            self._open[_kind(session)] += 1

    def _stop_counting(self, session: Session) -> None:
        if session.session_id in self._live and session.stored.state == pb.SESSION_STATE_OPEN:
            kind = _kind(session)
            self._open[kind] -= 1
            if not self._open[kind]:
                del self._open[kind]

    def _remove(self, session: Session) -> None:
        if session.stored.state == pb.SESSION_STATE_OPEN:
            self._stop_counting(session)
        self._live.pop(session.session_id, None)
        self._by_key.pop(session.stored.key_digest, None)


def _kind(session: Session) -> tuple[str, bool]:
    """Return the owner of a session, and whether it has a task."""
    return session.stored.owner, bool(session.stored.task_id)
