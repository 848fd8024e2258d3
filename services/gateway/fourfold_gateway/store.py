"""Keeps the sessions of a gateway in a database: their state, their turns, and closed trajectories on their way.

    add_turns, close_session ... --> queue --> writer thread: everything that waits, in one transaction --> callers

The database is SQLite in WAL mode, `sessions.sqlite` in the gateway's folder. A call returns when its transaction is
committed, so that a killed process loses nothing that it reported. A machine that loses power may lose the turns of
the last seconds, but no closed session: `close_session` also flushes the database to the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import numpy as np

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.errors import ConfigError, DeadlinePassed, FourfoldError, Internal, Unavailable
from fourfold.host.disk import is_full
from fourfold.rpc import codec
from fourfold.sample import VersionSpan
from fourfold.sample.sampled import SampledTokens, pack_columns, read_columns
from fourfold.sample.token_columns import SAMPLED_COLUMNS
from fourfold_gateway.trajectory import Sampling, Turn

T = TypeVar("T")

# Stored as `PRAGMA user_version`.
_VERSION: Final = 1
# A turn's rowid rises in the order in which the turns of a session finished.
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS sessions (
  session_id TEXT PRIMARY KEY, owner TEXT NOT NULL, key_digest BLOB NOT NULL, state INTEGER NOT NULL,
  task_id TEXT NOT NULL, group_id TEXT NOT NULL, task BLOB NOT NULL, idle_seconds REAL NOT NULL,
  created_at REAL NOT NULL, used_at REAL NOT NULL, settled_at REAL, reason TEXT NOT NULL, reward REAL,
  metrics TEXT NOT NULL, outcome_sha256 BLOB NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS sessions_by_settled ON sessions (settled_at);
CREATE TABLE IF NOT EXISTS turns (
  id INTEGER PRIMARY KEY, session_id TEXT NOT NULL, number INTEGER NOT NULL, segment_index INTEGER NOT NULL,
  prompt_token_count INTEGER NOT NULL, finish_reason INTEGER NOT NULL, request_id TEXT NOT NULL,
  request_sha256 BLOB NOT NULL, sample_index INTEGER NOT NULL, temperature REAL NOT NULL, top_p REAL NOT NULL,
  top_k INTEGER NOT NULL, observation BLOB NOT NULL, token_ids BLOB NOT NULL, logprobs BLOB NOT NULL,
  constrained BLOB NOT NULL, version_spans BLOB NOT NULL, chat BLOB NOT NULL, reply BLOB NOT NULL,
  UNIQUE (session_id, number));
CREATE TABLE IF NOT EXISTS outbox (
  id INTEGER PRIMARY KEY AUTOINCREMENT, session_id TEXT NOT NULL UNIQUE, trajectory BLOB NOT NULL);
"""
_PUT_SESSION: Final = (
    "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (session_id) DO UPDATE SET "
    "state = excluded.state, task_id = excluded.task_id, group_id = excluded.group_id, task = excluded.task, "
    "used_at = excluded.used_at, settled_at = excluded.settled_at, reason = excluded.reason, "
    "reward = excluded.reward, metrics = excluded.metrics, outcome_sha256 = excluded.outcome_sha256"
)
_TOKENS: Final = tuple(column.name for column in SAMPLED_COLUMNS)
_TURN: Final = (
    "session_id, number, segment_index, prompt_token_count, finish_reason, request_id, request_sha256, sample_index, "
    f"temperature, top_p, top_k, observation, {', '.join(_TOKENS)}, version_spans, chat, reply"
)
_PUT_TURN: Final = f"INSERT INTO turns ({_TURN}) VALUES (?{', ?' * _TURN.count(',')})"
# The row may exist: a call is repeated after its deadline, although it may have taken effect.
_PUT_OUTBOX: Final = (
    "INSERT INTO outbox (session_id, trajectory) VALUES (?, ?) "
    "ON CONFLICT (session_id) DO UPDATE SET trajectory = excluded.trajectory"
)
_GET_TURNS: Final = f"SELECT {_TURN} FROM turns WHERE session_id = ? ORDER BY id"
_SPAN: Final = np.dtype([("version", "<i8"), ("count", "<i4")])
_BATCH_CHANGES: Final = 256  # changes in one transaction
_FULL_RETRY_SECONDS: Final = 5.0
_STOP: Final = None


class StoreFull(Unavailable):
    """The disk of the session store is full. Nothing of the change was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSession:
    """A session without its turns. Times are Unix seconds."""

    session_id: str
    owner: str
    """Name of the principal that opened it."""
    key_digest: bytes
    """SHA-256 of the session's key."""
    state: pb.SessionState.ValueType
    task_id: str = ""
    group_id: str = ""
    task: bytes = b""
    """The gateway's own encoding of the task."""
    idle_seconds: float = 600.0
    created_at: float = 0.0
    used_at: float = 0.0
    """Time of the last call that was written."""
    settled_at: float | None = None
    """Time of the last change of the state; `prune` deletes the session some time later."""
    reason: str = ""
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    outcome_sha256: bytes = b""
    """Digest of the CloseSession request, which identifies a repeated request."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredTurn:
    """A turn and the messages that it added to its conversation."""

    turn: Turn
    chat: bytes = b""
    """From `Conversation.record`; empty for a prompt that was not a conversation."""
    reply: bytes = b""
    """The assistant's message, encoded; empty likewise."""


@dataclass(frozen=True, slots=True)
class OutboxEntry:
    """A closed trajectory that the coordinator has not taken yet."""

    id: int
    """Rises in the order in which sessions closed."""
    session_id: str
    trajectory: bytes
    """An encoded `coordinator.v1.Trajectory`."""


class SessionStore:
    """The durable sessions of one gateway. One event loop uses it; `stop` ends its thread.

    A call that is cancelled, or whose time ends, may still take effect. Every method raises `StoreFull` when the disk
    is full, with nothing written, DeadlinePassed when the disk does not answer, and Internal when the database is
    damaged.
    """

    def __init__(self, folder: Path, *, timeout: float = 30.0) -> None:
        """Open the store of a folder, which is made if it does not exist; `timeout` of every call is in seconds.

        Raises:
            ConfigError: another gateway has the folder, or the database is of a newer release or damaged.
            StoreFull: there is no room for the database.
        """
        self.folder, self._timeout = folder, timeout
        self._lock = _lock(folder)
        try:
            self._db = _open(folder / "sessions.sqlite")
        except BaseException:
            os.close(self._lock)
            raise
        self._queue: queue.SimpleQueue[_Change[Any] | None] = queue.SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="sessions", daemon=True)
        self._thread.start()

    async def put_session(self, session: StoredSession) -> None:
        """Insert a session or replace its row. Owner, key, idle time and time of creation never change."""
        row = _session_row(session)
        await self._do(lambda db: _put_session(db, row))

    async def add_turns(self, session_id: str, turns: Sequence[StoredTurn]) -> None:
        """Add finished turns, all or none. The turns of a session are added in the order in which they finished."""
        rows = [_turn_row(session_id, each) for each in turns]
        await self._do(lambda db: _ignore(db.executemany(_PUT_TURN, rows)))

    async def close_session(self, session: StoredSession, trajectory: bytes) -> None:
        """Replace the row of a session and put its trajectory into the outbox; flush both to the disk."""
        row = _session_row(session)

        def change(db: sqlite3.Connection) -> None:
            _put_session(db, row)
            db.execute(_PUT_OUTBOX, (session.session_id, trajectory))

        await self._do(change, flush=True)

    async def settle(self, session: StoredSession) -> None:
        """Replace the row of a session and take its trajectory, if there is one, out of the outbox."""
        row = _session_row(session)

        def change(db: sqlite3.Connection) -> None:
            _put_session(db, row)
            db.execute("DELETE FROM outbox WHERE session_id = ?", (session.session_id,))

        await self._do(change)

    async def read_outbox(self, *, after: int = 0, max_count: int = 100, max_bytes: int = 4 << 20) -> list[OutboxEntry]:
        """Return trajectories of the outbox in the order of their closing.

        Args:
            after: id of the last entry that the caller has.
            max_count: at least 1.
            max_bytes: of all trajectories together; the first is returned whatever its size.
        """

        def read(db: sqlite3.Connection) -> list[OutboxEntry]:
            found, size = list[OutboxEntry](), 0
            query = "SELECT id, session_id, trajectory FROM outbox WHERE id > ? ORDER BY id LIMIT ?"
            with contextlib.closing(db.execute(query, (after, max_count))) as rows:
                for row in rows:
                    size += len(row[2])
                    if found and size > max_bytes:
                        break
                    found.append(OutboxEntry(*row))
            return found

        return await self._do(read)

    async def load_session(self, session_id: str) -> StoredSession | None:
        """Return a session; None if there is none, or it was pruned."""

        def read(db: sqlite3.Connection) -> StoredSession | None:
            row = db.execute("SELECT * FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
            return None if row is None else _session(row)

        return await self._do(read)

    async def load_unsettled(self) -> list[StoredSession]:
        """Return the open sessions and the closed ones whose trajectories are in the outbox."""
        query = "SELECT * FROM sessions WHERE settled_at IS NULL"
        return await self._do(lambda db: [_session(row) for row in db.execute(query)])

    async def load_turns(self, session_id: str) -> list[StoredTurn]:
        """Return the turns of a session in the order in which they finished, as `SessionTokens.restore` takes them."""
        return await self._do(lambda db: [_turn(row) for row in db.execute(_GET_TURNS, (session_id,))])

    async def prune(self, settled_before: float, *, max_count: int = 1_000) -> int:
        """Delete up to `max_count` sessions that were settled before a time (Unix seconds); return their number."""

        def change(db: sqlite3.Connection) -> int:
            query = "SELECT session_id FROM sessions WHERE settled_at < ? LIMIT ?"
            ids = db.execute(query, (settled_before, max_count)).fetchall()
            for table in ("turns", "outbox", "sessions"):
                db.executemany(f"DELETE FROM {table} WHERE session_id = ?", ids)
            return len(ids)

        return await self._do(change)

    async def stop(self) -> None:
        """Finish the changes that wait, and close the database. Later calls raise Unavailable."""
        if not self._stopped:
            self._stopped = True
            self._queue.put(_STOP)
        await asyncio.to_thread(self._thread.join, self._timeout)
        if self._thread.is_alive():
            raise DeadlinePassed(self._late())

    async def _do(self, work: Callable[[sqlite3.Connection], T], *, flush: bool = False) -> T:
        """Run `work` in the writer thread, in a transaction with others; return its result when it is committed."""
        if self._stopped:
            raise Unavailable("the session store is closed: this gateway is shutting down")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        change = _Change(work, flush, done, loop)
        self._queue.put(change)
        try:
            async with asyncio.timeout(self._timeout):
                return await done
        except TimeoutError:
            raise DeadlinePassed(self._late()) from None

    def _late(self) -> str:
        return f"{self.folder}: the session store did not finish within {self._timeout:g} s; check the disk"

    def _run(self) -> None:
        """Commit the changes in the queue until `stop`."""
        more = True
        while more:
            batch = [first] if (first := self._queue.get()) is not _STOP else []
            more = bool(batch)
            with contextlib.suppress(queue.Empty):
                while more and len(batch) < _BATCH_CHANGES:
                    change = self._queue.get_nowait()
                    if change is _STOP:
                        more = False
                    else:
                        batch.append(change)
            if batch:
                self._commit(batch)
                _report(batch)
        self._db.close()
        os.close(self._lock)

    def _commit(self, batch: Sequence[_Change[Any]]) -> None:
        """Make changes in one transaction, or, when it fails, each in one of its own."""
        try:
            # A commit with FULL also flushes the earlier commits, which are in the same log.
            self._db.execute(f"PRAGMA synchronous = {'FULL' if any(c.flush for c in batch) else 'NORMAL'}")
            self._db.execute("BEGIN IMMEDIATE")
            for change in batch:
                change.result = change.work(self._db)
            self._db.execute("COMMIT")
        except Exception as error:  # an error of one change must not end the thread that makes all changes
            with contextlib.suppress(sqlite3.Error):
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
            if len(batch) > 1:
                for change in batch:
                    self._commit([change])
            else:
                batch[0].error = _explain(error, self.folder)


class _Change(Generic[T]):
    """A change of the database, and its outcome."""

    __slots__ = ("done", "error", "flush", "loop", "result", "work")

    def __init__(
        self,
        work: Callable[[sqlite3.Connection], T],
        flush: bool,
        done: asyncio.Future[T],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.work, self.flush, self.done, self.loop = work, flush, done, loop
        self.result: Any = None
        self.error: BaseException | None = None


def _report(batch: Sequence[_Change[Any]]) -> None:
    """Pass the results to the callers, with one wake-up of each event loop."""

    def report() -> None:
        for change in batch:
            if change.done.done():  # cancelled
                continue
            if change.error is None:
                change.done.set_result(change.result)
            else:
                change.done.set_exception(change.error)

    with contextlib.suppress(RuntimeError):  # the event loop is closed, so the callers have ended
        batch[0].loop.call_soon_threadsafe(report)


def _explain(error: Exception, folder: Path) -> Exception:
    if is_full(error):
        return StoreFull(
            f"{folder}: the session store cannot be written ({error}); nothing was changed: make room on this disk",
            retry_after=_FULL_RETRY_SECONDS,
        )
    if isinstance(error, sqlite3.Error):
        return Internal(f"{folder}: the session store failed: {type(error).__name__}: {error}")
    return error


def _lock(folder: Path) -> int:
    """Lock the folder for this process; return the descriptor that holds the lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if is_full(error):
            raise _explain(error, folder) from None
        raise ConfigError(f"{folder}: cannot use this folder for sessions ({error.strerror})") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ConfigError(
            f"{folder}: another gateway has its sessions there; give each gateway its own folder"
        ) from None
    return descriptor


def _open(path: Path) -> sqlite3.Connection:
    """Open the database, create what it lacks, and check its version."""
    db = sqlite3.connect(path, isolation_level=None, timeout=5.0, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > _VERSION:
            raise ConfigError(
                f"{path}: schema version {version}; this release reads versions up to {_VERSION}: start the gateway "
                f"with the release of Fourfold that wrote it, or give it another folder"
            )
        db.executescript(_SCHEMA)
        known = {row[1] for row in db.execute("PRAGMA table_info(turns)")}
        for name in _TOKENS:  # CREATE TABLE adds no columns to the table of an older file
            if name not in known:
                db.execute(f"ALTER TABLE turns ADD COLUMN {name} BLOB NOT NULL DEFAULT x''")
        db.execute(f"PRAGMA user_version = {_VERSION}")
    except (sqlite3.Error, FourfoldError) as error:
        db.close()
        if isinstance(error, sqlite3.Error) and not is_full(error):
            raise ConfigError(f"{path}: not a session store ({error}); move the file away, or restore it") from None
        raise _explain(error, path.parent) from None
    return db


def _put_session(db: sqlite3.Connection, row: tuple[object, ...]) -> None:
    db.execute(_PUT_SESSION, row)


def _ignore(_: object) -> None:
    """Accept any value and return None."""


def _session_row(session: StoredSession) -> tuple[object, ...]:
    return (
        session.session_id,
        session.owner,
        session.key_digest,
        session.state,
        session.task_id,
        session.group_id,
        session.task,
        session.idle_seconds,
        session.created_at,
        session.used_at,
        session.settled_at,
        session.reason,
        session.reward,
        json.dumps(session.metrics),
        session.outcome_sha256,
    )


def _session(row: Sequence[Any]) -> StoredSession:
    names = StoredSession.__dataclass_fields__
    values = dict(zip(names, row, strict=True))
    return StoredSession(**values | {"metrics": json.loads(values["metrics"])})


def _turn_row(session_id: str, stored: StoredTurn) -> tuple[object, ...]:
    turn, sampling = stored.turn, stored.turn.sampling
    spans = np.array([(s.policy_version, s.token_count) for s in turn.completion.version_spans], _SPAN)
    return (
        session_id,
        turn.number,
        turn.segment_index,
        turn.prompt_token_count,
        turn.finish_reason,
        turn.request_id,
        turn.request_sha256,
        turn.sample_index,
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        codec.pack_ints(turn.observation),
        *pack_columns(turn.completion).values(),
        spans.tobytes(),
        stored.chat,
        stored.reply,
    )


def _turn(row: Sequence[Any]) -> StoredTurn:
    (number, segment_index, prompt_token_count, finish_reason, request_id, request_sha256, sample_index) = row[1:8]
    (temperature, top_p, top_k, observation, *columns, spans, chat, reply) = row[8:]
    completion = SampledTokens(
        **read_columns(dict(zip(_TOKENS, columns, strict=True))),
        version_spans=tuple(
            VersionSpan(policy_version=version, token_count=count)
            for version, count in np.frombuffer(spans, _SPAN).tolist()
        ),
    )
    turn = Turn(
        number=number,
        segment_index=segment_index,
        prompt_token_count=prompt_token_count,
        observation=codec.read_ints(observation),
        completion=completion,
        sampling=Sampling(temperature=temperature, top_p=top_p, top_k=top_k),
        finish_reason=finish_reason,
        request_id=request_id,
        request_sha256=request_sha256,
        sample_index=sample_index,
    )
    return StoredTurn(turn=turn, chat=chat, reply=reply)
