"""Keeps the state of every sample of a run in a database: the coordinator's durable memory.

    ISSUED --> RUNNING --> ROLLED --> READY --> LEASED --> TRAINED
      ^           |          |          |         |           |
      +-----------+          v          v         v           v  (by a restore only)
                          DROPPED(reason): counted, named, never silent

The database is SQLite in WAL mode, in `runs/<name>/ledger.sqlite`. Each call is one transaction, or a part of one
(`group_commit.py`), so that the coordinator may be killed between any two of them. A sample enters exactly one step:
`lease` takes it from READY, `acknowledge` makes it TRAINED. Only a `restore` makes a LEASED sample READY again: it goes
back to weights that have not seen it.

The arrays of a READY sample are in a segment file (`experiences.py`); the table `records` has their place.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from fourfold.errors import AlreadyExists, NotFound, WrongState

from .eval_results import EvalRow, check_examples, read_results, write_results
from .typed_json import load

# Reasons for which the coordinator itself drops samples.
TRAINER_RESTORED: Final = "TRAINER_RESTORED"
COORDINATOR_RESTARTED: Final = "COORDINATOR_RESTARTED"
ISSUED_AGAIN: Final = (TRAINER_RESTORED, COORDINATOR_RESTARTED)  # the run draws these prompts again
STALE: Final = "STALE"  # sampled by weights that are too old for its step
FILTERED: Final = "FILTERED"  # dynamic sampling did not keep the group
NOT_SELECTED: Final = "NOT_SELECTED"  # algorithm.selection chose other samples of the group, or none
BASELINE: Final = "BASELINE"  # a greedy completion, which is never trained on
BY_DESIGN: Final = (FILTERED, NOT_SELECTED, BASELINE)  # part of the algorithm; all other reasons are failures


class SampleState(StrEnum):
    """State of a sample; the values are stored in the database."""

    ISSUED = "ISSUED"
    RUNNING = "RUNNING"
    ROLLED = "ROLLED"
    READY = "READY"
    LEASED = "LEASED"
    TRAINED = "TRAINED"
    DROPPED = "DROPPED"


# Transitions of `move` and `drop`. Only `lease` and `acknowledge` lead to LEASED and TRAINED. Only `restore` drops a
# TRAINED sample: its step went into weights that no longer exist.
LEGAL_TRANSITIONS: Final[Mapping[SampleState, frozenset[SampleState]]] = {
    SampleState.ISSUED: frozenset({SampleState.RUNNING, SampleState.DROPPED}),
    SampleState.RUNNING: frozenset({SampleState.ROLLED, SampleState.ISSUED, SampleState.DROPPED}),
    SampleState.ROLLED: frozenset({SampleState.READY, SampleState.DROPPED}),
    SampleState.READY: frozenset({SampleState.DROPPED}),
    SampleState.LEASED: frozenset(),
    SampleState.TRAINED: frozenset(),
    SampleState.DROPPED: frozenset(),
}

_UNFINISHED: Final = tuple(s for s in SampleState if s not in (SampleState.TRAINED, SampleState.DROPPED))

# Stored as `PRAGMA user_version`.
_VERSION: Final = 2
# No index contains the state, because each of a sample's five moves would write the index, too.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS samples (
  sample_id TEXT PRIMARY KEY, group_id TEXT NOT NULL, position INTEGER NOT NULL, step INTEGER NOT NULL,
  state TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '') WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS samples_of_step ON samples (step);
CREATE INDEX IF NOT EXISTS samples_by_position ON samples (position);
CREATE TABLE IF NOT EXISTS records (
  sample_id TEXT PRIMARY KEY, segment INTEGER NOT NULL, offset INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS steps (
  step INTEGER PRIMARY KEY, policy_version INTEGER NOT NULL, skipped_reason TEXT NOT NULL,
  data_position INTEGER NOT NULL, seconds REAL NOT NULL, metrics TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS versions (policy_version INTEGER PRIMARY KEY, step INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS checkpoints (
  step INTEGER PRIMARY KEY, data_position INTEGER NOT NULL, policy_version INTEGER NOT NULL,
  eval_count INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS evals (
  step INTEGER PRIMARY KEY, score REAL NOT NULL, half_width REAL, answer_count INTEGER NOT NULL,
  missing_count INTEGER NOT NULL, answers TEXT NOT NULL, sets TEXT NOT NULL DEFAULT '[]');
"""
RESUMES_KEY: Final = "resumes"  # number of coordinator processes that resumed the run
_PROGRESS: Final = f"""SELECT (SELECT COALESCE(MAX(step), 0) FROM steps), (SELECT MAX(step) FROM checkpoints),
  (SELECT COALESCE(MAX(CAST(value AS INTEGER)), 0) FROM meta WHERE key = '{RESUMES_KEY}')"""
_COUNT_SAMPLES: Final = "SELECT state, COUNT(*) FROM samples GROUP BY state"
_COUNT_REASONS: Final = "SELECT reason, COUNT(*) FROM samples WHERE state = 'DROPPED' GROUP BY reason"
# The fields of the row classes below have the order of these columns.

_IN_LIST: Final = "IN (SELECT value FROM json_each(?))"  # one parameter with any number of values: a JSON array
_LOG_BYTES: Final = 4 << 20  # a larger write-ahead log is written back to the database
_RELEASE_ROWS: Final = 10_000  # most rows of one transaction, which blocks the event loop


def _marks(values: Collection[object]) -> str:
    return ", ".join("?" * len(values))


def _move_query(to: SampleState) -> tuple[list[SampleState], str]:
    """Return the states before a move to `to`, and the SQL of the move."""
    sources = [state for state in SampleState if to in LEGAL_TRANSITIONS[state]]
    where = f"sample_id {_IN_LIST} AND state IN ({_marks(sources)})"
    return sources, f"UPDATE samples SET state = ?, reason = ? WHERE {where}"


_MOVES: Final = {state: _move_query(state) for state in SampleState}


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedGroup:
    """Ids of one prompt's samples, unique in the run."""

    group_id: str
    sample_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """Where the record of a sample begins."""

    sample_id: str
    segment: int  # number of the file
    offset: int  # bytes


@dataclass(frozen=True, slots=True)
class RecordedSample:
    """A sample of a group that is READY, or was leased, with the place of its record."""

    sample_id: str
    group_id: str
    position: int
    dropped: str  # drop reason; empty for a READY sample
    segment: int
    offset: int


@dataclass(frozen=True, slots=True)
class StepRow:
    """One trained (or skipped) step."""

    step: int
    policy_version: int
    skipped_reason: str
    data_position: int  # prompts drawn up to and including this step
    seconds: float  # from the first prompt to the published weights
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """A durable checkpoint of the whole run."""

    step: int
    data_position: int
    policy_version: int
    eval_count: int


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """Number of samples in each state, and of dropped ones by reason."""

    states: Mapping[SampleState, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run."""

    step: int  # last finished step; 0: none
    checkpoint_step: int | None  # step of the last checkpoint; None: there is none
    resumes: int = 0  # coordinator processes that resumed the run


# These functions may be called in any thread or process while the ledger is in use. They raise sqlite3.Error if the
# ledger is missing or cannot be read.


def read_sample_counts(path: Path) -> SampleCounts:
    """Count the samples of a ledger."""
    with _reading(path) as db:
        states = {SampleState(state): count for state, count in db.execute(_COUNT_SAMPLES)}
        return SampleCounts(states, dict(db.execute(_COUNT_REASONS).fetchall()))


def read_evals(path: Path) -> list[EvalRow]:
    """Return the evaluations of a ledger, in order."""
    try:
        with _reading(path) as db:
            return _select_evals(db)
    except ValueError as error:  # written by another release
        raise sqlite3.DataError(f"a value of an evaluation cannot be read: {error}") from None


def read_progress(path: Path) -> Progress:
    """Return the progress of the run of a ledger."""
    with _reading(path) as db:
        return Progress(*db.execute(_PROGRESS).fetchone())


def read_value(path: Path, key: str) -> str:
    """Return the value stored under a key of a ledger; empty if there is none, or no ledger."""
    if not path.exists():
        return ""
    with _reading(path) as db:
        return _value(db, key)


def _value(db: sqlite3.Connection, key: str) -> str:
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return str(row[0]) if row else ""


def _reading(path: Path) -> contextlib.closing[sqlite3.Connection]:
    """Open a ledger without changing its folder."""
    # Without a log no process is writing, and a plain connection would create the files of a log.
    mode = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "mode=ro&immutable=1"
    return contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=1.0))


def _select_evals(db: sqlite3.Connection) -> list[EvalRow]:
    columns = "step, score, half_width, answer_count, missing_count, answers, sets"
    rows = db.execute(f"SELECT {columns} FROM evals ORDER BY step")
    return [
        EvalRow(step, score, half_width, count, missing, check_examples(load(answers)), read_results(results))
        for step, score, half_width, count, missing, answers, results in rows
    ]


class Ledger:
    """The run's database. Not thread-safe.

    A write to a full disk raises `sqlite3.Error` and changes nothing, so that it may be repeated.
    """

    def __init__(self, path: Path) -> None:
        """Open the database at `path`, or create an empty one.

        Raises WrongState when a later version of Fourfold wrote it, or it is damaged.
        """
        self._path, self._wal = path, path.with_name(path.name + "-wal")
        self._in_transaction = False
        self.on_issue: Callable[[Sequence[str]], None] = lambda _ids: None
        self.on_move: Callable[[Sequence[str], SampleState, str], None] = lambda _ids, _state, _reason: None
        """Called with the samples of each change, their new state and the reason. A failed change may be repeated."""
        self._db = sqlite3.connect(path, isolation_level=None, timeout=5.0)
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            # With NORMAL a killed process loses nothing. A machine that loses power may lose the newest rows;
            # `sync` is called for those that a restore needs.
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("PRAGMA wal_autocheckpoint = 0")  # it would block the event loop; `sync` makes it
            self._create(path)
        except (sqlite3.Error, WrongState) as error:  # such as a full disk: the caller retries with a new connection
            self._db.close()
            if getattr(error, "sqlite_errorcode", 0) in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
                raise WrongState(
                    f"{path}: damaged, or no ledger ({error}); restore the file from a copy, or start a new run"
                ) from None
            raise

    def _create(self, path: Path) -> None:
        """Create the tables that the file lacks."""
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):  # 0: a new file
            raise WrongState(
                f"{path}: schema version {version}; this release reads version {_VERSION}: resume the run with "
                f"the release of Fourfold that wrote it"
            )
        self._db.executescript(_SCHEMA)
        self._db.execute(f"PRAGMA user_version = {_VERSION}")

    def close(self) -> None:
        self._db.close()

    def sync(self) -> None:
        """Flush all committed transactions to the disk. Takes milliseconds; may be called in another thread."""
        # Syncing the write-ahead log makes transactions durable. SQLite would sync in each commit, on the event loop.
        # SQLite has no locks on this file that closing the descriptor could release.
        try:
            descriptor = os.open(self._wal, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # no such log on a file system without shared memory; SQLite then syncs each commit
            return
        try:
            os.fsync(descriptor)
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        if size > _LOG_BYTES:
            with contextlib.closing(sqlite3.connect(self._path, isolation_level=None, timeout=5.0)) as db:
                db.execute("PRAGMA wal_checkpoint(PASSIVE)")  # transactions continue meanwhile

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Make the calls inside the block in one transaction. An error of one call undoes all."""
        with self._transaction():
            yield

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        if self._in_transaction:
            yield self._db
            return
        self._in_transaction = True
        try:
            with self._db:  # commits; rolls back after an error, unless SQLite has done so, as it does on a full disk
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
        finally:
            self._in_transaction = False

    # -- samples ------------------------------------------------------------------------------------------------

    def issue(self, *, step: int, position: int, count: int) -> IssuedGroup:
        """Create `count` ISSUED samples for the prompt at `position`; a prompt that is issued again gets new ids."""
        with self._transaction() as db:
            row = db.execute("SELECT COUNT(DISTINCT group_id) FROM samples WHERE position = ?", (position,)).fetchone()
            group_id = f"p{position:07d}-{row[0]}"
            sample_ids = tuple(f"{group_id}-{index}" for index in range(count))
            db.executemany(
                "INSERT INTO samples (sample_id, group_id, position, step, state) VALUES (?, ?, ?, ?, ?)",
                [(sample_id, group_id, position, step, SampleState.ISSUED) for sample_id in sample_ids],
            )
        self.on_issue(sample_ids)
        return IssuedGroup(group_id=group_id, sample_ids=sample_ids)

    def move(self, sample_ids: Sequence[str], to: SampleState, *, reason: str = "") -> None:
        """Move all samples to a state, or none; raise WrongState when `LEGAL_TRANSITIONS` does not have a move."""
        with self._transaction() as db:
            self._move(db, sample_ids, to, reason)

    def _move(self, db: sqlite3.Connection, sample_ids: Sequence[str], to: SampleState, reason: str = "") -> None:
        sources, query = _MOVES[to]
        changed = db.execute(query, (to, reason, json.dumps(sample_ids), *sources)).rowcount
        if changed == len(sample_ids):
            self.on_move(sample_ids, to, reason)
            return
        db.rollback()
        for sample_id, state in self._states(sample_ids):
            if state not in sources:
                raise WrongState(f"sample {sample_id} is {state}; it cannot become {to}", reason="ILLEGAL_TRANSITION")
        raise WrongState(
            f"{len(sample_ids)} samples cannot become {to}: some are named twice", reason="ILLEGAL_TRANSITION"
        )

    def drop(self, sample_ids: Sequence[str], reason: str) -> None:
        """Drop samples for a reason in UPPER_SNAKE_CASE; raise the errors of `move`."""
        if not reason:
            raise WrongState("a sample cannot be dropped without a reason; pass one in UPPER_SNAKE_CASE")
        self.move(sample_ids, SampleState.DROPPED, reason=reason)

    def state(self, sample_id: str) -> SampleState:
        """Return the state of a sample; raise NotFound when it was never issued."""
        ((_, state),) = self._states([sample_id])
        return state

    def _states(self, sample_ids: Sequence[str]) -> list[tuple[str, SampleState]]:
        """Return samples with their states, in order; raise NotFound for one that was never issued."""
        query = f"SELECT sample_id, state FROM samples WHERE sample_id {_IN_LIST}"
        states = dict(self._db.execute(query, (json.dumps(sample_ids),)).fetchall())
        if missing := next((sample_id for sample_id in sample_ids if sample_id not in states), None):
            raise NotFound(f"sample {missing} was never issued")
        return [(sample_id, SampleState(states[sample_id])) for sample_id in sample_ids]

    def unfinished(self) -> dict[str, SampleState]:
        """Return the state of each sample that is neither TRAINED nor DROPPED; reads the whole table."""
        rows = self._db.execute(
            f"SELECT sample_id, state FROM samples WHERE state IN ({_marks(_UNFINISHED)})", _UNFINISHED
        )
        return {sample_id: SampleState(state) for sample_id, state in rows}

    def make_ready(self, sample_ids: Sequence[str], places: Sequence[RecordPlace]) -> None:
        """Store the places of records and move ROLLED samples to READY; a repeated call changes only the places.

        `places` also has those of dropped samples of the same groups.
        """
        with self._transaction() as db:
            rows = [(place.sample_id, place.segment, place.offset) for place in places]
            db.executemany("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", rows)
            # Recognize a repeated call by the states: the error of a failed move would undo the places, too.
            ready = f"SELECT sample_id FROM samples WHERE sample_id {_IN_LIST} AND state = ?"
            done = {name for (name,) in db.execute(ready, (json.dumps(sample_ids), SampleState.READY))}
            self._move(db, [name for name in sample_ids if name not in done], SampleState.READY)

    def keep(self, places: Sequence[RecordPlace]) -> None:
        """Store the places of records of RUNNING samples, which become ROLLED: attempts of an unfinished group."""
        with self._transaction() as db:
            rows = [(place.sample_id, place.segment, place.offset) for place in places]
            db.executemany("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", rows)
            self._move(db, [place.sample_id for place in places], SampleState.ROLLED)

    def recorded(self) -> list[RecordedSample]:
        """Return the samples of all groups that are READY or LEASED, in order of position and index.

        Groups are left out unless each live sample has a record. Attempts without
        a trajectory have no record.
        """
        query = """
            WITH live AS (SELECT DISTINCT group_id FROM samples WHERE state IN (?, ?)),
            whole AS (
              SELECT group_id FROM samples LEFT JOIN records USING (sample_id) WHERE group_id IN live
              GROUP BY group_id HAVING SUM(segment IS NULL AND state != 'DROPPED') = 0)
            SELECT sample_id, group_id, position, reason, segment, offset FROM samples JOIN records USING (sample_id)
            WHERE group_id IN whole"""
        samples = [RecordedSample(*row) for row in self._db.execute(query, (SampleState.READY, SampleState.LEASED))]
        return sorted(samples, key=lambda s: (s.position, s.group_id, int(s.sample_id.rpartition("-")[2])))

    def release(self, step: int) -> bool:
        """Forget records of samples that were trained or dropped by `step`; return whether there may be more."""
        with self._transaction() as db:
            # CROSS JOIN makes SQLite read the few records first. It would otherwise read all samples of all steps.
            query = """
                DELETE FROM records WHERE sample_id IN (
                  SELECT sample_id FROM records CROSS JOIN samples USING (sample_id)
                  WHERE step <= ? AND state IN (?, ?) LIMIT ?)"""
            values = (step, SampleState.TRAINED, SampleState.DROPPED, _RELEASE_ROWS)
            return db.execute(query, values).rowcount == _RELEASE_ROWS

    def segments(self) -> set[int]:
        """Return the numbers of the segment files that have records of samples."""
        return {number for (number,) in self._db.execute("SELECT DISTINCT segment FROM records")}

    def lease(self, step: int, sample_ids: Sequence[str]) -> None:
        """Put READY samples into the batch of `step`, the next one; a repeat with the same samples changes nothing."""
        wanted = set(sample_ids)
        with self._transaction() as db:
            done = self.last_step()
            if step != done + 1:
                raise WrongState(f"step {step} cannot be leased: {done} steps are done, the next is {done + 1}")
            held = self.leased().keys()
            if held == wanted:
                return
            if held:
                raise AlreadyExists(f"step {step} is leased with {len(held)} other samples; it takes one batch only")
            values = (SampleState.LEASED, step, json.dumps(sample_ids), SampleState.READY)
            query = f"UPDATE samples SET state = ?, step = ? WHERE sample_id {_IN_LIST} AND state = ?"
            if db.execute(query, values).rowcount == len(wanted):
                self.on_move(sample_ids, SampleState.LEASED, "")
                return
            db.rollback()
            for sample_id, state in self._states(sample_ids):
                if state is not SampleState.READY:
                    raise WrongState(f"sample {sample_id} is {state}; only READY samples are leased")

    def leased(self) -> dict[str, str]:
        """Return the id of the group of each sample in the batch that is leased, by sample id."""
        # Only the step after the last finished one can be leased; the index of steps finds its few samples.
        query = "SELECT sample_id, group_id FROM samples WHERE step = ? AND state = ?"
        return dict(self._db.execute(query, (self.last_step() + 1, SampleState.LEASED)).fetchall())

    def acknowledge(self, step: int, *, policy_version: int, skipped_reason: str, data_position: int) -> None:
        """Record that the trainer has done `step`: its LEASED samples become TRAINED. A repeat changes nothing."""
        with self._transaction() as db:
            done = self.last_step()
            if step == done and step > 0:
                return
            if step != done + 1:
                raise WrongState(f"step {step} cannot be acknowledged: {done} steps are done")
            db.execute(
                "UPDATE samples SET state = ? WHERE state = ? AND step = ?",
                (SampleState.TRAINED, SampleState.LEASED, step),
            )
            row = (step, policy_version, skipped_reason, data_position)
            db.execute("INSERT INTO steps VALUES (?, ?, ?, ?, 0, '')", row)

    def record_metrics(self, step: int, metrics: Mapping[str, Any], *, seconds: float) -> None:
        """Store the metrics of an acknowledged step, from which metrics.jsonl can be written again."""
        with self._transaction() as db:
            db.execute("UPDATE steps SET metrics = ?, seconds = ? WHERE step = ?", (json.dumps(metrics), seconds, step))

    def counts(self) -> dict[SampleState, int]:
        """Return the number of samples by state, without states that have none."""
        return {SampleState(s): n for s, n in self._db.execute(_COUNT_SAMPLES)}

    def dropped(self, step: int | None = None) -> dict[str, int]:
        """Return the number of dropped samples by reason, of one step or of all."""
        where, values = ("AND step = ?", (step,)) if step is not None else ("", ())
        query = f"SELECT reason, COUNT(*) FROM samples WHERE state = 'DROPPED' {where} GROUP BY reason ORDER BY reason"
        return dict(self._db.execute(query, values).fetchall())

    # -- steps, versions, evaluations, checkpoints ----------------------------------------------------------------

    def last_step(self) -> int:
        return int(self._db.execute("SELECT COALESCE(MAX(step), 0) FROM steps").fetchone()[0])

    def steps(self) -> list[StepRow]:
        rows = self._db.execute("SELECT * FROM steps ORDER BY step")
        return [StepRow(*[*row[:-1], json.loads(row[-1] or "{}")]) for row in rows]

    def skipped_count(self) -> int:
        """Return the number of steps that had nothing to learn."""
        return int(self._db.execute("SELECT COUNT(*) FROM steps WHERE skipped_reason != ''").fetchone()[0])

    def publishing(self, policy_version: int, step: int) -> None:
        """Record a policy version before any engine can receive it; a repeat changes nothing."""
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO versions (policy_version, step) VALUES (?, ?)", (policy_version, step))

    def highest_version(self) -> int:
        """Return the highest version that an engine may have received; 0 if none. A `restore` does not lower it."""
        return int(self._db.execute("SELECT COALESCE(MAX(policy_version), 0) FROM versions").fetchone()[0])

    def add_eval(self, row: EvalRow) -> None:
        """Store an evaluation; replace one of the same step."""
        with self._transaction() as db:
            values = (row.step, row.score, row.half_width, row.answer_count, row.missing_count)
            texts = (json.dumps(row.answers), write_results(row.sets))
            db.execute("INSERT OR REPLACE INTO evals VALUES (?, ?, ?, ?, ?, ?, ?)", (*values, *texts))

    def evals(self) -> list[EvalRow]:
        return _select_evals(self._db)

    def commit_checkpoint(self, *, step: int, data_position: int, policy_version: int) -> None:
        """Record the trainer's durable checkpoint of `step`, the last finished one; `sync` makes this row durable."""
        with self._transaction() as db:
            if step != self.last_step():  # a restore would not return to the saved state
                raise WrongState(f"checkpoint of step {step}, but {self.last_step()} steps are done")
            evals = db.execute("SELECT COUNT(*) FROM evals WHERE step <= ?", (step,)).fetchone()[0]
            row = (step, data_position, policy_version, evals)
            db.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?)", row)

    def last_checkpoint(self) -> CheckpointRow | None:
        """Return the newest committed checkpoint, or None."""
        row = self._db.execute("SELECT * FROM checkpoints ORDER BY step DESC LIMIT 1").fetchone()
        return None if row is None else CheckpointRow(*row)

    def next_position(self) -> int:
        """Return the position of the first prompt that was never drawn."""
        return int(self._db.execute("SELECT COALESCE(MAX(position) + 1, 0) FROM samples").fetchone()[0])

    def rows_taken(self) -> int:
        """Return the position of the first row of data that no step has trained on."""
        query = "SELECT data_position FROM steps ORDER BY step DESC LIMIT 1"
        return int((self._db.execute(query).fetchone() or (0,))[0])

    def open_positions(self) -> list[int]:
        """Return the positions whose prompts were drawn and must be drawn again, in order; reads the whole table."""
        query = f"""
            SELECT position FROM samples GROUP BY position
            HAVING SUM(state != ? OR reason NOT IN ({_marks(ISSUED_AGAIN)})) = 0 ORDER BY position"""
        return [position for (position,) in self._db.execute(query, (SampleState.DROPPED, *ISSUED_AGAIN))]

    def restore(self, step: int, reason: str = TRAINER_RESTORED, *, keep: Collection[str] = ()) -> int:
        """Go back to the end of `step`; return the number of samples that this dropped.

        Samples of later steps, whose weights are lost, become DROPPED with `reason`, one of ISSUED_AGAIN. So do
        unfinished samples, whose process is gone. Groups in `keep`, which are ids from `recorded`, stay, and their
        leased samples become READY again. Later steps, evaluations and checkpoints are deleted. Published versions
        stay, because versions never decrease.
        """
        with self._transaction() as db:
            kept = json.dumps(sorted(keep))
            dropped = db.execute(
                f"UPDATE samples SET state = ?, reason = ? "
                f"WHERE (state IN ({_marks(_UNFINISHED)}) OR (state = ? AND step > ?)) AND NOT group_id {_IN_LIST}",
                (SampleState.DROPPED, reason, *_UNFINISHED, SampleState.TRAINED, step, kept),
            ).rowcount
            # Samples that later steps dropped would be counted twice, because their prompts are issued again.
            db.execute(
                f"UPDATE samples SET reason = ? WHERE state = ? AND step > ? "
                f"AND reason NOT IN (?, ?) AND NOT group_id {_IN_LIST}",
                (reason, SampleState.DROPPED, step, *ISSUED_AGAIN, kept),
            )
            db.execute("UPDATE samples SET state = ? WHERE state = ?", (SampleState.READY, SampleState.LEASED))
            for table in ("steps", "evals", "checkpoints"):
                db.execute(f"DELETE FROM {table} WHERE step > ?", (step,))
        return int(dropped)

    # -- key-value facts of the run ---------------------------------------------------------------------------------

    def get(self, key: str) -> str:
        """Return the value stored under `key`; empty if there is none."""
        return _value(self._db, key)

    def put(self, facts: Mapping[str, str]) -> None:
        """Store values by key, replacing existing ones."""
        with self._transaction() as db:
            db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", list(facts.items()))
