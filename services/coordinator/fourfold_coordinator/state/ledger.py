"""Where every sample of the run is, durably: the coordinator's one memory.

    ISSUED --> RUNNING --> ROLLED --> READY --> LEASED --> TRAINED
      ^           |          |          |         |           |
      +-----------+          v          v         v           v  (only by restore)
                          DROPPED(reason): counted, named, never silent

SQLite in WAL mode, in `runs/<name>/ledger.sqlite`. A call is one transaction: it happens whole
or not at all, so the coordinator may be killed between any two of them. A sample enters exactly
one step: `lease` takes it from READY, `acknowledge` makes it TRAINED, and no way leads back.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from fourfold.errors import AlreadyExists, NotFound, WrongState

TRAINER_RESTORED: Final = "TRAINER_RESTORED"
FILTERED: Final = "FILTERED"
"""Its group teaches nothing."""
BASELINE: Final = "BASELINE"
"""A greedy answer, which the sampled ones of its prompt were compared with."""
BY_DESIGN: Final = (FILTERED, BASELINE)
"""Reasons that are part of the algorithm; the others are troubles."""


class SampleState(StrEnum):
    """Where a sample is."""

    ISSUED = "ISSUED"
    RUNNING = "RUNNING"
    ROLLED = "ROLLED"
    READY = "READY"
    LEASED = "LEASED"
    TRAINED = "TRAINED"
    DROPPED = "DROPPED"


# What `move` and `drop` allow. LEASED and TRAINED are reached through `lease` and `acknowledge` alone, and a
# TRAINED sample is dropped by `restore` alone: its step went into weights that no longer exist.
LEGAL_TRANSITIONS: Final[Mapping[SampleState, frozenset[SampleState]]] = {
    SampleState.ISSUED: frozenset({SampleState.RUNNING, SampleState.DROPPED}),
    SampleState.RUNNING: frozenset({SampleState.ROLLED, SampleState.ISSUED, SampleState.DROPPED}),
    SampleState.ROLLED: frozenset({SampleState.READY, SampleState.DROPPED}),
    SampleState.READY: frozenset({SampleState.DROPPED}),
    SampleState.LEASED: frozenset(),
    SampleState.TRAINED: frozenset(),
    SampleState.DROPPED: frozenset(),
}

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS samples (
  sample_id TEXT PRIMARY KEY, group_id TEXT NOT NULL, position INTEGER NOT NULL, step INTEGER NOT NULL,
  state TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '') WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS samples_by_step ON samples (step, state);
CREATE INDEX IF NOT EXISTS samples_by_position ON samples (position);
CREATE TABLE IF NOT EXISTS steps (
  step INTEGER PRIMARY KEY, policy_version INTEGER NOT NULL, skipped_reason TEXT NOT NULL,
  data_position INTEGER NOT NULL, seconds REAL NOT NULL, metrics TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS versions (policy_version INTEGER PRIMARY KEY, step INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS checkpoints (
  step INTEGER PRIMARY KEY, data_position INTEGER NOT NULL, policy_version INTEGER NOT NULL,
  eval_count INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS evals (
  step INTEGER PRIMARY KEY, score REAL NOT NULL, half_width REAL, answer_count INTEGER NOT NULL,
  missing_count INTEGER NOT NULL, answers TEXT NOT NULL);
"""
_STEP_COLUMNS: Final = "step, policy_version, skipped_reason, data_position, seconds, metrics"


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedGroup:
    """Ids of one prompt's samples, unique in the run."""

    group_id: str
    sample_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One trained (or skipped) step."""

    step: int
    policy_version: int
    skipped_reason: str
    data_position: int
    """Prompts drawn up to and with this step."""
    seconds: float
    """From the first prompt to the published weights."""
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRow:
    """One held-out evaluation."""

    step: int
    score: float
    half_width: float | None
    """Of the 95 % interval; None when one task group alone was evaluated."""
    answer_count: int
    missing_count: int
    """Answers that got no score."""
    answers: list[dict[str, Any]]
    """A few answers, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    """A durable checkpoint of the whole run."""

    step: int
    data_position: int
    policy_version: int
    eval_count: int


class Ledger:
    """The run's database. Used by one thread of one process.

    A write that fails for want of room raises `sqlite3.Error` and changes nothing: it may be repeated.
    """

    def __init__(self, path: Path) -> None:
        """Open the ledger, or make an empty one."""
        self._db = sqlite3.connect(path, isolation_level=None, timeout=5.0)
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            # A killed process loses nothing with NORMAL; only a machine that loses power may lose the newest rows,
            # and `commit_checkpoint` syncs what a restore needs.
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_SCHEMA)
        except sqlite3.Error:  # the disk is full: the caller tries again
            self._db.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
            self._db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # a full disk may have ended it already
                self._db.execute("ROLLBACK")
            raise

    # -- samples ------------------------------------------------------------------------------------------------

    def issue(self, *, step: int, position: int, count: int) -> IssuedGroup:
        """Make `count` ISSUED samples of the prompt at `position`; a prompt that is issued again gets new ids."""
        with self._transaction() as db:
            row = db.execute("SELECT COUNT(DISTINCT group_id) FROM samples WHERE position = ?", (position,)).fetchone()
            group_id = f"p{position:07d}-{row[0]}"
            sample_ids = tuple(f"{group_id}-{index}" for index in range(count))
            db.executemany(
                "INSERT INTO samples (sample_id, group_id, position, step, state) VALUES (?, ?, ?, ?, ?)",
                [(sample_id, group_id, position, step, SampleState.ISSUED) for sample_id in sample_ids],
            )
        return IssuedGroup(group_id=group_id, sample_ids=sample_ids)

    def move(self, sample_ids: Sequence[str], to: SampleState) -> None:
        """Move samples along the picture above, all or none.

        Raises:
            NotFound: an id that was never issued.
            WrongState: a move that the picture does not have.
        """
        with self._transaction():
            self._move(sample_ids, to, reason="")

    def drop(self, sample_ids: Sequence[str], reason: str) -> None:
        """Give samples up, with the reason; raises as `move` does."""
        if not reason:
            raise WrongState("a sample cannot be dropped without a reason; pass one in UPPER_SNAKE_CASE")
        with self._transaction():
            self._move(sample_ids, SampleState.DROPPED, reason=reason)

    def _move(self, sample_ids: Sequence[str], to: SampleState, *, reason: str) -> None:
        for sample_id in sample_ids:
            state = self.state(sample_id)
            if to not in LEGAL_TRANSITIONS[state]:
                raise WrongState(f"sample {sample_id} is {state}; it cannot become {to}", reason="ILLEGAL_TRANSITION")
            self._db.execute("UPDATE samples SET state = ?, reason = ? WHERE sample_id = ?", (to, reason, sample_id))

    def state(self, sample_id: str) -> SampleState:
        """Return where a sample is, or raise NotFound."""
        row = self._db.execute("SELECT state FROM samples WHERE sample_id = ?", (sample_id,)).fetchone()
        if row is None:
            raise NotFound(f"sample {sample_id} was never issued")
        return SampleState(row[0])

    def lease(self, step: int, sample_ids: Sequence[str]) -> None:
        """Put READY samples into the batch of `step`. Idempotent for the same samples.

        Raises:
            AlreadyExists: the step is leased with other samples.
            WrongState: the step is not the next one, or a sample is not READY.
        """
        wanted = set(sample_ids)
        with self._transaction() as db:
            done = self.last_step()
            if step != done + 1:
                raise WrongState(f"step {step} cannot be leased: {done} steps are done, the next is {done + 1}")
            held = {
                row[0] for row in db.execute("SELECT sample_id FROM samples WHERE state = ?", (SampleState.LEASED,))
            }
            if held == wanted:
                return
            if held:
                raise AlreadyExists(f"step {step} is leased with {len(held)} other samples; it takes one batch only")
            for sample_id in sample_ids:
                state = self.state(sample_id)
                if state is not SampleState.READY:
                    raise WrongState(f"sample {sample_id} is {state}; only READY samples are leased")
                db.execute(
                    "UPDATE samples SET state = ?, step = ? WHERE sample_id = ?", (SampleState.LEASED, step, sample_id)
                )

    def acknowledge(
        self, step: int, *, policy_version: int, skipped_reason: str, data_position: int, seconds: float = 0.0
    ) -> None:
        """Record that the trainer has done `step`: its LEASED samples are TRAINED. A repeat changes nothing.

        Raises:
            WrongState: the step is not the next one.
        """
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
            db.execute(
                "INSERT INTO steps (step, policy_version, skipped_reason, data_position, seconds) "
                "VALUES (?, ?, ?, ?, ?)",
                (step, policy_version, skipped_reason, data_position, seconds),
            )

    def record_metrics(self, step: int, metrics: Mapping[str, Any], *, seconds: float) -> None:
        """Keep the metrics of a step that was acknowledged: metrics.jsonl can be written again from them."""
        with self._transaction() as db:
            db.execute("UPDATE steps SET metrics = ?, seconds = ? WHERE step = ?", (json.dumps(metrics), seconds, step))

    def counts(self) -> dict[SampleState, int]:
        """Return the number of samples in every state that has any."""
        return {SampleState(s): n for s, n in self._db.execute("SELECT state, COUNT(*) FROM samples GROUP BY state")}

    def dropped(self, step: int | None = None) -> dict[str, int]:
        """Return the number of dropped samples by reason, of one step or of all."""
        where, values = ("AND step = ?", (step,)) if step is not None else ("", ())
        query = f"SELECT reason, COUNT(*) FROM samples WHERE state = 'DROPPED' {where} GROUP BY reason ORDER BY reason"
        return dict(self._db.execute(query, values).fetchall())

    # -- steps, versions, evaluations, checkpoints ----------------------------------------------------------------

    def last_step(self) -> int:
        """Return the number of steps done."""
        return int(self._db.execute("SELECT COALESCE(MAX(step), 0) FROM steps").fetchone()[0])

    def steps(self) -> list[StepRow]:
        """Return every step done, in order."""
        return [_step_row(row) for row in self._db.execute(f"SELECT {_STEP_COLUMNS} FROM steps ORDER BY step")]

    def step_row(self, step: int) -> StepRow:
        """Return one step, or raise NotFound."""
        row = self._db.execute(f"SELECT {_STEP_COLUMNS} FROM steps WHERE step = ?", (step,)).fetchone()
        if row is None:
            raise NotFound(f"step {step} is not done")
        return _step_row(row)

    def skipped_count(self) -> int:
        """Return the number of steps that had nothing to learn."""
        return int(self._db.execute("SELECT COUNT(*) FROM steps WHERE skipped_reason != ''").fetchone()[0])

    def publishing(self, policy_version: int, step: int) -> None:
        """Record, before any engine may see it, that a version is about to be published. Idempotent."""
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO versions (policy_version, step) VALUES (?, ?)", (policy_version, step))

    def highest_version(self) -> int:
        """Return the highest version that any engine may ever have seen; 0 at the start. Survives `restore`."""
        return int(self._db.execute("SELECT COALESCE(MAX(policy_version), 0) FROM versions").fetchone()[0])

    def add_eval(self, row: EvalRow) -> None:
        """Record an evaluation; one of the same step is replaced."""
        with self._transaction() as db:
            db.execute(
                "INSERT OR REPLACE INTO evals VALUES (?, ?, ?, ?, ?, ?)",
                (row.step, row.score, row.half_width, row.answer_count, row.missing_count, json.dumps(row.answers)),
            )

    def evals(self) -> list[EvalRow]:
        """Return every evaluation, in order."""
        rows = self._db.execute(
            "SELECT step, score, half_width, answer_count, missing_count, answers FROM evals ORDER BY step"
        )
        return [
            EvalRow(
                step=row[0],
                score=row[1],
                half_width=row[2],
                answer_count=row[3],
                missing_count=row[4],
                answers=json.loads(row[5]),
            )
            for row in rows
        ]

    def commit_checkpoint(self, *, step: int, data_position: int, policy_version: int) -> None:
        """Record that the trainer's checkpoint of `step` is durable, with all that a restore needs, and sync.

        Raises:
            WrongState: the step is not the last one done; what would be restored is not what was saved.
        """
        with self._transaction() as db:
            if step != self.last_step():
                raise WrongState(f"checkpoint of step {step}, but {self.last_step()} steps are done")
            evals = db.execute("SELECT COUNT(*) FROM evals WHERE step <= ?", (step,)).fetchone()[0]
            db.execute(
                "INSERT OR REPLACE INTO checkpoints (step, data_position, policy_version, eval_count) "
                "VALUES (?, ?, ?, ?)",
                (step, data_position, policy_version, evals),
            )
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def last_checkpoint(self) -> CheckpointRow | None:
        """Return the newest checkpoint, or None."""
        row = self._db.execute(
            "SELECT step, data_position, policy_version, eval_count FROM checkpoints ORDER BY step DESC LIMIT 1"
        ).fetchone()
        if row is None:
            return None
        return CheckpointRow(step=row[0], data_position=row[1], policy_version=row[2], eval_count=row[3])

    def restore(self, step: int) -> int:
        """Go back to the end of `step`; return how many samples were dropped.

        Everything after it is forgotten: samples are DROPPED with reason TRAINER_RESTORED (those of later steps
        went into weights that are lost, unfinished ones were in the memory of a process that is gone), rows of
        later steps, evaluations and checkpoints are deleted. Samples that those steps had dropped before take the
        same reason: their prompts are issued again, and would be counted twice. Published versions stay: versions
        never go back.
        """
        with self._transaction() as db:
            unfinished = [s for s in SampleState if s not in (SampleState.TRAINED, SampleState.DROPPED)]
            marks = ", ".join("?" * len(unfinished))
            dropped = db.execute(
                f"UPDATE samples SET state = ?, reason = ? WHERE state IN ({marks}) OR (state = ? AND step > ?)",
                (SampleState.DROPPED, TRAINER_RESTORED, *unfinished, SampleState.TRAINED, step),
            ).rowcount
            db.execute(
                "UPDATE samples SET reason = ? WHERE state = ? AND step > ?",
                (TRAINER_RESTORED, SampleState.DROPPED, step),
            )
            for table in ("steps", "evals", "checkpoints"):
                db.execute(f"DELETE FROM {table} WHERE step > ?", (step,))
        return int(dropped)

    # -- facts of the run -----------------------------------------------------------------------------------------

    def get(self, key: str) -> str:
        """Return a fact of the run; empty when it is not known."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return str(row[0]) if row else ""

    def put(self, facts: Mapping[str, str]) -> None:
        """Remember facts of the run."""
        with self._transaction() as db:
            db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", list(facts.items()))


def _step_row(row: tuple[Any, ...]) -> StepRow:
    return StepRow(
        step=row[0],
        policy_version=row[1],
        skipped_reason=row[2],
        data_position=row[3],
        seconds=row[4],
        metrics=json.loads(row[5]) if row[5] else {},
    )
