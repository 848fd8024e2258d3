"""Indexes samples.jsonl and tokens.jsonl for search: index.db in the folder of a run.

    samples.jsonl --update--> samples (numbers, place of the line) + texts (FTS5 over prompt, completion and answer)
    tokens.jsonl  --update--> tokens (place of the line)

The index holds no texts: a page reads the lines of its few rows. `update` indexes what the files have and the index
lacks; it may be killed at any moment, and called by several processes. The file may be deleted: `update` makes it anew.

Words are indexed (`unicode61`), not trigrams, which take 5 times the room and 10 times as long to index.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import sqlite3
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, Final

from .sample_tokens import TOKENS_FILE, TokenSegment, decode_tokens, parse_token_line
from .samples import SAMPLES_FILE, SampleLine, parse_line

INDEX_FILE: Final = "index.db"
MAX_COUNT: Final = 1_000
"""Trajectories that fit some conditions are counted up to this number."""
_VERSION: Final = 3
_CHUNK_BYTES: Final = 8 << 20  # of one transaction
_LOCK_SECONDS: Final = 5.0
_SCAN_BYTES: Final = 1 << 16
# Not a write-ahead log: its readers write, and `fourfold view` must not write to a run.
_SCHEMA: Final = f"""
PRAGMA journal_mode = DELETE;
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS samples (
  id INTEGER PRIMARY KEY AUTOINCREMENT, sample_id TEXT NOT NULL, group_id TEXT NOT NULL, prompt_key INTEGER NOT NULL,
  step INTEGER NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL, crc INTEGER NOT NULL, score REAL,
  tokens INTEGER NOT NULL, logprob REAL, truncated INTEGER NOT NULL, dropped TEXT NOT NULL, scorer TEXT NOT NULL,
  oldest INTEGER NOT NULL, newest INTEGER NOT NULL, source TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS samples_by_name ON samples (sample_id);
CREATE INDEX IF NOT EXISTS samples_by_group ON samples (group_id);
CREATE INDEX IF NOT EXISTS samples_by_prompt ON samples (prompt_key, step);
CREATE INDEX IF NOT EXISTS samples_by_step ON samples (step, newest);
CREATE INDEX IF NOT EXISTS samples_by_score ON samples (score);
CREATE INDEX IF NOT EXISTS samples_by_length ON samples (tokens);
CREATE TABLE IF NOT EXISTS tokens (
  sample_id TEXT PRIMARY KEY, offset INTEGER NOT NULL, length INTEGER NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS tokens_by_offset ON tokens (offset);
CREATE TABLE IF NOT EXISTS left_out (
  file TEXT NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL, crc INTEGER NOT NULL, reason TEXT NOT NULL,
  PRIMARY KEY (file, offset)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS indexed (file TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE VIRTUAL TABLE IF NOT EXISTS texts USING fts5(text, content = '', tokenize = 'unicode61');
PRAGMA user_version = {_VERSION};
COMMIT;
"""
_COLUMNS: Final = (
    "sample_id, group_id, prompt_key, step, offset, length, crc, score, tokens, logprob, truncated, dropped, scorer, "
    "oldest, newest, source"
)
# Policy versions between the newest weights that sampled for the step and the oldest of the sample.
_LAG: Final = "(SELECT MAX(newest) FROM samples AS other WHERE other.step = s.step) - s.oldest"
# The ids of the trajectories with at least some lag: one pass over all, instead of a look at the step of each.
_STALE: Final = (
    "SELECT one.id FROM samples AS one JOIN (SELECT step, MAX(newest) AS top FROM samples GROUP BY step) AS steps "
    "ON steps.step = one.step WHERE steps.top - one.oldest >= ?"
)
ORDERS: Final[Mapping[str, str]] = {
    "newest": "s.id DESC",
    "oldest": "s.id",
    "highest score": "s.score DESC, s.id DESC",
    "lowest score": "s.score NULLS LAST, s.id",
    "longest": "s.tokens DESC, s.id DESC",
    "shortest": "s.tokens, s.id",
    "least likely": "s.logprob NULLS LAST, s.id",
}
# Orders that have an index. If most trajectories have a word, a lookup in this order is faster than sorting.
_ORDER_INDEX: Final[Mapping[str, str]] = {
    "highest score": "samples_by_score",
    "lowest score": "samples_by_score",
    "longest": "samples_by_length",
    "shortest": "samples_by_length",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleQuery:
    """The conditions of a search; None and empty texts match every trajectory."""

    text: str = ""  # words that must all occur, "phrases", and beginnings of words: begin*
    step_from: int | None = None
    step_to: int | None = None
    score_from: float | None = None
    score_to: float | None = None
    tokens_from: int | None = None  # sampled tokens
    tokens_to: int | None = None
    lag_from: int | None = None  # policy versions; see `SampleRow.lag`
    dropped: str = ""  # reason, "trained" for those without one, or "dropped" for any
    scorer: str = ""
    source: str = ""  # name of the source of the prompt
    group_id: str = ""
    prompt_key: int | None = None
    order: str = "newest"  # a key of ORDERS

    def restricts(self) -> bool:
        """Return whether any condition is set."""
        return any(getattr(self, f.name) != f.default for f in fields(self) if f.name != "order")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """The indexed values of a trajectory, and its line of samples.jsonl."""

    sample_id: str
    group_id: str
    prompt_key: int  # equal for equal prompts
    step: int
    score: float | None
    tokens: int  # sampled
    logprob: float | None  # mean, nats
    truncated: bool
    dropped: str
    scorer: str
    lag: int  # versions between the newest weights that sampled for the step and the oldest of this trajectory
    line: SampleLine


@dataclass(frozen=True, slots=True)
class SamplePage:
    """Some of the trajectories of a query."""

    rows: list[SampleRow]
    count: int  # number of all matches; MAX_COUNT: that many or more
    capped: bool  # whether there may be more


class TrajectoryIndex:
    """The index of one run. Every call opens its own connection: any thread and process may call."""

    def __init__(self, folder: Path, path: Path | None = None) -> None:
        """Index the run in `folder`; the index is at `path`, by default index.db in the folder."""
        self.path = path or folder / INDEX_FILE
        self._samples, self._tokens = folder / SAMPLES_FILE, folder / TOKENS_FILE

    # -- writing --------------------------------------------------------------------------------------------------

    def update(self) -> int:
        """Index everything new in the files; return the number of lines indexed.

        Lines that a restore removed are removed from the index. If another process is updating the index, this call
        does nothing. A damaged index is made again. 10^5 trajectories of 1,024 tokens take 93 s of CPU: call it in
        another thread.
        """
        try:
            return self._update()
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                return 0
            raise
        except sqlite3.DatabaseError:
            self.path.unlink(missing_ok=True)
            return self._update()

    def prepare(self) -> None:
        """Make an empty index if there is none, so that it can be searched."""
        with self._open_to_write():
            pass

    def _update(self) -> int:
        count = 0
        # Each present line of samples.jsonl has its line in tokens.jsonl. A line that is appended meanwhile may not
        # have its tokens in the index yet.
        known = self._samples.stat().st_size if self._samples.exists() else 0
        with self._open_to_write() as db:
            for path, end, add, forget in (
                (self._tokens, sys.maxsize, _add_tokens, _forget_tokens),
                (self._samples, known, _add_samples, _forget_samples),
            ):
                try:
                    file = path.open("rb")
                except FileNotFoundError:
                    continue
                with file:
                    forget(db, file)
                    _forget_left_out(db, file, path.name)
                    while found := _index_chunk(db, file, path.name, end, add):
                        count += found
        return count

    @contextlib.contextmanager
    def _open_to_write(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(sqlite3.connect(self.path, isolation_level=None, timeout=_LOCK_SECONDS)) as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version not in (0, _VERSION):
                raise sqlite3.DatabaseError(f"version {version}")  # the index of another release is made again
            if version == 0:
                db.executescript(_SCHEMA)
            yield db

    # -- reading --------------------------------------------------------------------------------------------------

    def pending_bytes(self) -> int:
        """Return the number of bytes that are not indexed yet; raise sqlite3.Error without an index."""
        with self._open_to_read() as db:
            if db.execute("PRAGMA user_version").fetchone() != (_VERSION,):
                raise sqlite3.DatabaseError(f"{self.path}: of another release")
            done = dict(db.execute("SELECT file, bytes FROM indexed"))
        return sum(abs(_whole_size(path) - done.get(path.name, 0)) for path in (self._tokens, self._samples))

    def covers(self) -> bool:
        """Return whether the index has every whole line of the files now."""
        try:
            return self.pending_bytes() == 0
        except sqlite3.Error:
            return False

    def left_out(self) -> dict[str, str]:
        """Return the errors of lines that are left out, by file; raise sqlite3.Error without an index."""
        found = "SELECT file, COUNT(*), MIN(offset), reason FROM left_out GROUP BY file"
        with self._open_to_read() as db:
            return {
                file: f"{count} of its lines cannot be read and are left out; in the one at byte {offset}, {reason}"
                for file, count, offset, reason in db.execute(found)
            }

    def search(self, query: SampleQuery, *, limit: int = 50, skip: int = 0) -> SamplePage:
        """Return the trajectories from number `skip`, in the query's order; raise sqlite3.Error without an index."""
        tables, where, values = _conditions(query)
        order = ORDERS.get(query.order, ORDERS["newest"])
        wanted = ", ".join(f"s.{name}" for name in _COLUMNS.split(", "))
        with self._open_to_read() as db:
            if where == "1":
                (count,) = db.execute("SELECT COUNT(*) FROM samples").fetchone()
            else:
                counting = f"SELECT COUNT(*) FROM (SELECT 1 FROM {tables} WHERE {where} LIMIT {MAX_COUNT})"
                (count,) = db.execute(counting, values).fetchone()
            capped = where != "1" and count >= MAX_COUNT
            if query.text and capped and query.order in _ORDER_INDEX:
                tables = f"samples AS s INDEXED BY {_ORDER_INDEX[query.order]}"
                where = where.replace("texts MATCH ?", "s.id IN (SELECT rowid FROM texts WHERE texts MATCH ?)")
            elif query.text:  # FTS5 yields its rows in this order without sorting
                order = order.replace("s.id", "texts.rowid")
            page = f"SELECT {wanted}, {_LAG} FROM {tables} WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?"
            rows = db.execute(page, (*values, limit, skip)).fetchall()
        return SamplePage(list(self._with_lines(rows)), count, capped)

    def find(self, sample_id: str) -> SampleRow | None:
        """Return a trajectory; None if there is none."""
        rows = self._select("s.sample_id = ? ORDER BY s.id DESC LIMIT 1", sample_id)
        return rows[0] if rows else None

    def group(self, row: SampleRow, limit: int = 200) -> list[SampleRow]:
        """Return the trajectories of a group, `row` included, in the order of the file."""
        return self._select("s.group_id = ? AND s.step = ? ORDER BY s.id LIMIT ?", row.group_id, row.step, limit)

    def same_prompt(self, row: SampleRow, limit: int = 100) -> list[SampleRow]:
        """Return the first trajectory of each group with the same prompt, in order of the steps."""
        first = "SELECT MIN(id) FROM samples WHERE prompt_key = ? GROUP BY step, group_id ORDER BY step LIMIT ?"
        return self._select(f"s.id IN ({first}) ORDER BY s.step, s.id", row.prompt_key, limit)

    def tokens(self, sample_id: str) -> list[TokenSegment]:
        """Return the tokens of a trajectory; empty if tokens.jsonl has none. Raises ValueError: they are damaged."""
        with self._open_to_read() as db:
            place = db.execute("SELECT offset, length, crc FROM tokens WHERE sample_id = ?", (sample_id,)).fetchone()
        if place is None:
            return []
        try:
            with self._tokens.open("rb") as file:
                data = _read(file, *place[:2])
        except FileNotFoundError:
            return []
        if zlib.crc32(data) != place[2]:  # removed by a restore
            return []
        return decode_tokens(parse_token_line(data).tokens)

    def choices(self) -> tuple[list[str], list[str], list[str], int]:
        """Return the scorers, the sources of prompts, the reasons of dropped trajectories, and the last step."""
        with self._open_to_read() as db:
            scorers, sources, reasons = (
                sorted(name for (name,) in db.execute(f"SELECT DISTINCT {column} FROM samples WHERE {column} != ''"))
                for column in ("scorer", "source", "dropped")
            )
            (last,) = db.execute("SELECT MAX(step) FROM samples").fetchone()
        return scorers, sources, reasons, last or 0

    def _select(self, where: str, *values: object) -> list[SampleRow]:
        wanted = ", ".join(f"s.{name}" for name in _COLUMNS.split(", "))
        with self._open_to_read() as db:
            rows = db.execute(f"SELECT {wanted}, {_LAG} FROM samples AS s WHERE {where}", values).fetchall()
        return list(self._with_lines(rows))

    def _open_to_read(self) -> contextlib.closing[sqlite3.Connection]:
        uri = f"{self.path.absolute().as_uri()}?mode=ro"
        return contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_LOCK_SECONDS))

    def _with_lines(self, rows: list[tuple[Any, ...]]) -> Iterator[SampleRow]:
        """Yield rows with their lines; leave out rows that a restore has just removed."""
        if not rows:  # before the first step there is no file
            return
        with self._samples.open("rb") as file:
            for row in rows:
                name, group, key, step, offset, length, crc, score, tokens, logprob, cut, dropped, scorer, *rest = row
                data = _read(file, offset, length)
                if zlib.crc32(data) == crc:
                    yield SampleRow(
                        sample_id=name, group_id=group, prompt_key=key, step=step, score=score, tokens=tokens,
                        logprob=logprob, truncated=bool(cut), dropped=dropped, scorer=scorer, lag=rest[-1],
                        line=parse_line(data),
                    )  # fmt: skip


def _index_chunk(
    db: sqlite3.Connection,
    file: BinaryIO,
    name: str,
    end: int,
    add: Callable[[sqlite3.Connection, bytes, int], None],
) -> int:
    """Index some of the next lines that begin before `end`, in one transaction; return their number."""
    db.execute("BEGIN IMMEDIATE")
    try:
        begin = _indexed_bytes(db, name)
        offset, count = begin, 0
        file.seek(begin)
        while offset < min(begin + _CHUNK_BYTES, end) and (data := file.readline()).endswith(b"\n"):
            try:
                add(db, data, offset)
            except ValueError as error:  # also an id with an unpaired surrogate
                reason = str(error).encode(errors="replace").decode()
                values = (name, offset, len(data), zlib.crc32(data), reason)
                db.execute("INSERT OR REPLACE INTO left_out VALUES (?, ?, ?, ?, ?)", values)
            offset, count = offset + len(data), count + 1
        db.execute("INSERT OR REPLACE INTO indexed VALUES (?, ?)", (name, offset))
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise
    return count


def _indexed_bytes(db: sqlite3.Connection, name: str) -> int:
    row = db.execute("SELECT bytes FROM indexed WHERE file = ?", (name,)).fetchone()
    return int(row[0]) if row else 0


def _add_samples(db: sqlite3.Connection, data: bytes, offset: int) -> None:
    """Index a line of samples.jsonl; raise ValueError for a line that is none."""
    line = parse_line(data)
    versions = [version for version, _ in line.version_spans if version >= 0] or [0]
    text = f"{line.prompt}\n{line.completion}\n{line.answer}"
    values = (
        line.sample_id, line.group_id, _prompt_key(line.prompt), line.step, offset, len(data), zlib.crc32(data),
        line.score, line.completion_tokens, line.logprob_mean, line.truncated, line.dropped, line.scorer,
        min(versions), max(versions), line.source,
    )  # fmt: skip
    marks = ", ".join("?" * len(values))
    row = db.execute(f"INSERT INTO samples ({_COLUMNS}) VALUES ({marks})", values).lastrowid
    # SQLite refuses unpaired surrogates.
    db.execute("INSERT INTO texts (rowid, text) VALUES (?, ?)", (row, text.encode(errors="replace").decode()))


def _add_tokens(db: sqlite3.Connection, data: bytes, offset: int) -> None:
    """Index a line of tokens.jsonl; raise ValueError for a line that is none."""
    name = parse_token_line(data).sample_id
    db.execute("INSERT OR REPLACE INTO tokens VALUES (?, ?, ?, ?)", (name, offset, len(data), zlib.crc32(data)))


def _forget_samples(db: sqlite3.Connection, file: BinaryIO) -> None:
    """Remove rows whose lines a restore removed from the end of the file.

    Row ids are never reused, so that the words of removed rows match nothing.
    """
    while row := db.execute("SELECT step, offset, length, crc FROM samples ORDER BY id DESC LIMIT 1").fetchone():
        if zlib.crc32(_read(file, *row[1:3])) == row[3]:
            break
        db.execute("BEGIN IMMEDIATE")
        db.execute("DELETE FROM samples WHERE step = ?", row[:1])
        (end,) = db.execute("SELECT COALESCE(MAX(offset + length), 0) FROM samples").fetchone()
        db.execute("INSERT OR REPLACE INTO indexed VALUES (?, ?)", (SAMPLES_FILE, end))
        db.execute("COMMIT")


def _forget_tokens(db: sqlite3.Connection, file: BinaryIO) -> None:
    """Index the file from its start if it no longer has the last indexed line."""
    row = db.execute("SELECT offset, length, crc FROM tokens ORDER BY offset DESC LIMIT 1").fetchone()
    if row and zlib.crc32(_read(file, *row[:2])) != row[2]:
        db.execute("BEGIN IMMEDIATE")
        db.execute("DELETE FROM tokens")
        db.execute("INSERT OR REPLACE INTO indexed VALUES (?, 0)", (TOKENS_FILE,))
        db.execute("COMMIT")


def _forget_left_out(db: sqlite3.Connection, file: BinaryIO, name: str) -> None:
    """Forget lines that were left out, from the first one that the file no longer has."""
    last = "SELECT offset, length, crc FROM left_out WHERE file = ? ORDER BY offset DESC LIMIT 1"
    while (row := db.execute(last, (name,)).fetchone()) and zlib.crc32(_read(file, *row[:2])) != row[2]:
        db.execute("BEGIN IMMEDIATE")
        db.execute("DELETE FROM left_out WHERE file = ? AND offset = ?", (name, row[0]))
        db.execute("UPDATE indexed SET bytes = MIN(bytes, ?) WHERE file = ?", (row[0], name))
        db.execute("COMMIT")


def _conditions(query: SampleQuery) -> tuple[str, str, list[object]]:
    """Return the tables, the condition and its values."""
    tables, values, parts = "samples AS s", list[object](), list[str]()
    if query.text:
        tables = "texts JOIN samples AS s ON s.id = texts.rowid"
        parts.append("texts MATCH ?")
        values.append(_match(query.text))
    bounds: tuple[tuple[str, object], ...] = (
        ("s.step >= ?", query.step_from), ("s.step <= ?", query.step_to), ("s.score >= ?", query.score_from),
        ("s.score <= ?", query.score_to), ("s.tokens >= ?", query.tokens_from), ("s.tokens <= ?", query.tokens_to),
        (f"s.id IN ({_STALE})", query.lag_from), ("s.scorer = ?", query.scorer or None),
        ("s.source = ?", query.source or None),
        ("s.group_id = ?", query.group_id or None), ("s.prompt_key = ?", query.prompt_key),
    )  # fmt: skip
    for part, value in bounds:
        if value is not None:
            parts.append(part)
            values.append(value)
    if query.dropped in ("trained", "dropped"):
        parts.append("s.dropped = ''" if query.dropped == "trained" else "s.dropped != ''")
    elif query.dropped:
        parts.append("s.dropped = ?")
        values.append(query.dropped)
    return tables, " AND ".join(parts) or "1", values


def _match(text: str) -> str:
    """Return a text of a user as an expression of FTS5, whose own operators are not available."""
    words = [phrase or word for phrase, word in re.findall(r'"([^"]*)"|([^\s"]+)', text.replace("\0", " "))]
    quoted = [f'"{word.rstrip("*")}"' + "*" * _is_beginning(word) for word in words if word.strip()]
    return " ".join(quoted) or '""'


def _is_beginning(word: str) -> bool:
    return word.endswith("*") and any(map(str.isalnum, word))


def _prompt_key(prompt: str) -> int:
    return int.from_bytes(hashlib.blake2b(prompt.encode(errors="replace"), digest_size=8).digest(), "big", signed=True)


def _read(file: BinaryIO, offset: int, length: int) -> bytes:
    file.seek(offset)
    return file.read(length)


def _whole_size(path: Path) -> int:
    """Return the size of a file without an incomplete last line; 0 if it is missing."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            while end > 0:
                begin = max(end - _SCAN_BYTES, 0)
                newline = _read(file, begin, end - begin).rfind(b"\n")
                if newline >= 0:
                    return begin + newline + 1
                end = begin
    except FileNotFoundError:
        pass
    return 0
