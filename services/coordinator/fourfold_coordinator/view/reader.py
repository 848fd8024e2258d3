"""Reads runs for the pages of `fourfold view`.

    pages --> RunReader --> config.toml, metrics.jsonl, timeline.jsonl, report.json, ledger, index.db
                        '--> RunCoordinator: state, weight plane

`RunReader` is all that pages know of a run. For a run of another machine (`remote.py`), the folder is a copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import socket
import sqlite3
import threading
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from pydantic import TypeAdapter

from fourfold import config as configuration
from fourfold.config import Config
from fourfold.coordinator.client import CoordinatorClient
from fourfold.coordinator.v1 import run_service_pb2 as pb
from fourfold.errors import ConfigError, FourfoldError
from fourfold.model import folder as model_folder
from fourfold.model.tokenizer import Tokenizer
from fourfold.rpc.channel import is_loopback, split_target

from ..launch.copied_files import EVALUATIONS_FILE, TOKENIZER_FILE
from ..launch.run_folder import is_finished, read_address
from ..launch.run_names import CONFIG_FILE, FAILED_SUFFIX, LEDGER_FILE, METRICS_FILE, REPORT_FILE
from ..state.eval_results import EvalRow, Example, SetResult, check_examples
from ..state.ledger import Progress, read_evals, read_progress
from ..state.sample_tokens import TOKENS_FILE
from ..state.samples import SAMPLES_FILE
from ..state.timeline import TIMELINE_FILE, StepTimeline, parse_line
from ..state.trajectory_index import TrajectoryIndex
from ..state.typed_json import Finite, Whole, check, load, parse

T = TypeVar("T")

_RPC_SECONDS: Final = 2.0
_CONNECT_SECONDS: Final = 0.5
_STATE_SECONDS: Final = 2.0  # a state is cached for this time
_PLANE_SECONDS: Final = 1.0  # an answer is cached for this time
_UPDATE_SECONDS: Final = 1.0  # interval of updates of an index in our cache
_LINE_BYTES: Final = 1 << 25  # size of the longest line that is read
_IDLE_SECONDS: Final = 60.0  # after this time without a request, the index is not updated
# A coordinator writes to its ledger every 5 s. On a shared file system, a recent write shows that it lives.
_WRITTEN_SECONDS: Final = 30.0
_INDEX_SECONDS: Final = 2.0  # the first page waits this long for an index in our cache, enough for a small run
# The run does not update an index in its folder that is older than the samples by more than this.
_RECORDER_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding of the whole run."""

    text: str
    steps: Whole
    first: Whole
    last: Whole


@dataclass(frozen=True, slots=True)
class _ReportedEval:
    step: Whole
    score: Finite
    half_width: Finite | None = None
    n: Whole = 0
    missing: Whole = 0
    sets: tuple[SetResult, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """The part of report.json that pages show."""

    seconds: Finite | None = None
    diagnosis: list[Finding] = field(default_factory=list)
    evals: list[_ReportedEval] = field(default_factory=list)
    eval_before: _ReportedEval | None = None
    eval_after: _ReportedEval | None = None
    answers_before: list[Example] = field(default_factory=list)
    answers_after: list[Example] = field(default_factory=list)

    def evaluations(self) -> list[EvalRow]:
        """Return the evaluations."""
        examples = {
            row.step: [asdict(answer) for answer in answers]
            for row, answers in ((self.eval_before, self.answers_before), (self.eval_after, self.answers_after))
            if row is not None
        }
        return [
            EvalRow(row.step, row.score, row.half_width, row.n, row.missing, examples.get(row.step, []), row.sets)
            for row in self.evals
        ]


@dataclass(frozen=True, slots=True)
class _Step:
    """The texts of a line of metrics.jsonl; its numbers are checked where they are drawn."""

    step: Whole
    alarms: list[str] = field(default_factory=list)
    end_time: str = ""


_EVAL: Final = TypeAdapter(EvalRow)
_REPORT: Final = TypeAdapter(Report)
_STEP: Final = TypeAdapter(_Step)


class RunCoordinator(Protocol):
    """The coordinator process of a run, if it lives. Any thread may call; answers come within seconds."""

    peer: str
    """Name of the coordinator that sent the files of the run; empty: they are in a folder of this machine."""

    def state(self) -> str:
        """Return "running", "finished", "stopped", or "unreachable" if only the machine of the run knows."""

    def weight_plane(self) -> pb.GetWeightPlaneResponse | None:
        """Return the state of weight updates; None without an answer."""

    def faults(self) -> list[str]:
        """Return the errors of the last answers."""


class LocalCoordinator:
    """The coordinator of a run in a folder of this machine."""

    peer = ""

    def __init__(self, folder: Path) -> None:
        self._folder, self._fault = folder, ""
        self._finished: tuple[tuple[float, float], bool] = ((0.0, 0.0), False)  # by the times of its files

    def state(self) -> str:
        """Return the state: finished with a report of all steps, running if the coordinator's address answers.

        The coordinator of a shared folder may be on another machine, and not be reachable from here.
        """
        times = _time_of(self._folder / REPORT_FILE), _time_of(self._folder / CONFIG_FILE)
        if times != self._finished[0]:  # to parse both files takes 4 ms
            self._finished = times, is_finished(self._folder)
        if self._finished[1]:
            return "finished"
        try:  # a test of its lock file could make a starting coordinator fail
            target = split_target(read_address(self._folder))
        except (ConfigError, OSError, ValueError):
            return "stopped"
        try:
            socket.create_connection(target, timeout=_CONNECT_SECONDS).close()
            return "running"
        except (OSError, ValueError):
            return "stopped" if is_loopback(target[0]) or not self._is_written() else "running"

    def _is_written(self) -> bool:
        ledger = self._folder / LEDGER_FILE
        written = max(_time_of(ledger), _time_of(ledger.with_name(f"{LEDGER_FILE}-wal")))
        return time.time() - written < _WRITTEN_SECONDS

    def weight_plane(self) -> pb.GetWeightPlaneResponse | None:
        try:
            config = configuration.load(self._folder / CONFIG_FILE)
            with CoordinatorClient(read_address(self._folder), certs=config.security.directory) as client:
                plane = client.get_weight_plane(timeout=_RPC_SECONDS)
            self._fault = ""
            return plane
        except (FourfoldError, OSError, ValueError) as error:
            self._fault = str(error)
            return None

    def faults(self) -> list[str]:
        return [self._fault] if self._fault else []


@dataclass(slots=True)
class _Lines:
    """The parsed lines of a growing JSONL file."""

    rows: list[Any] = field(default_factory=list)
    offset: int = 0
    inode: int = -1
    left_out: int = 0
    fault: str = ""  # of the first line that was left out

    def reset(self, inode: int) -> None:
        self.rows, self.offset, self.inode, self.left_out, self.fault = [], 0, inode, 0, ""


class RunReader:
    """A run in a folder of this machine, or a copy of one, in progress or ended.

    Any thread may call. Unreadable data is missing, and `faults` has the reason.
    """

    def __init__(
        self,
        folder: Path,
        *,
        cache: Path | None = None,
        coordinator: RunCoordinator | None = None,
        address: str = "",
    ) -> None:
        """Read the run in `folder`; `cache` is where an index is kept that the run itself does not keep.

        `coordinator` is that of the run; None: the one whose address is in the folder. `address` is that of a
        coordinator on another machine.
        """
        self.name, self.folder = folder.name, folder
        self.long_name = f"{folder.name}@{address}" if address else f"{folder.name} ({folder.absolute().parent.name})"
        self._coordinator = coordinator or LocalCoordinator(folder)
        self.peer = self._coordinator.peer
        self._cache = (cache or cache_folder()) / _cache_name(folder)
        self._lock = threading.Lock()
        self._lines = defaultdict[str, _Lines](_Lines)
        self._faults: dict[str, str] = {}  # by file
        self._state = -_STATE_SECONDS, ""  # when the state was found, on the monotonic clock, and the state
        self._plane: tuple[float, pb.GetWeightPlaneResponse | None] = (-_PLANE_SECONDS, None)
        self._tokenizer: Tokenizer | None = None
        self._asked = 0.0  # last request for the index, on the monotonic clock
        self._indexer: threading.Thread | None = None
        self._indexed = threading.Event()  # whether the thread has indexed the files once

    def state(self) -> str:
        """Return "running", "finished", "stopped", "unreachable", or "failed" for a start that came to no step."""
        now = time.monotonic()
        if now - self._state[0] >= _STATE_SECONDS:
            found = self._coordinator.state()
            is_failed = found == "stopped" and self.folder.suffix == FAILED_SUFFIX
            self._state = now, "failed" if is_failed else found
        return self._state[1]

    def progress(self) -> Progress | None:
        """Return the last step and checkpoint, and how often the run was resumed; None for a run of another machine."""
        with contextlib.suppress(sqlite3.Error):  # `evaluations` notes what is wrong with the file
            return read_progress(self.folder / LEDGER_FILE)
        return None

    def recipe(self) -> Mapping[str, Any]:
        """Return the tables of the recipe; empty if it is not readable."""
        return self._read(CONFIG_FILE, _read_recipe) or {}

    def config(self) -> Config | None:
        """Return the recipe; None if this release cannot read it."""
        try:  # from text: `include` in the file could name any file of this machine
            return configuration.from_tables(self.recipe(), source=str(self.folder / CONFIG_FILE))
        except (FourfoldError, ValueError, RecursionError):
            return None

    def steps(self) -> Sequence[Mapping[str, Any]]:
        """Return the lines of metrics.jsonl, in order."""
        return self._read_lines(METRICS_FILE, _metrics_row)

    def report(self) -> Report:
        """Return report.json; empty before the end."""
        return self._read(REPORT_FILE, lambda path: parse(_REPORT, path.read_bytes())) or Report()

    def faults(self) -> list[str]:
        """Return the errors of files and of answers of the coordinator."""
        sent = f"{self.peer}: " if self.peer else ""
        fix = "what needs it is missing here; restore the file, or use the release of Fourfold that wrote it"
        found = [f"{sent}{name}: {problem}; {fix}" for name, problem in sorted(self._faults.copy().items())]
        return found + self._coordinator.faults()

    def evaluations(self) -> Sequence[EvalRow]:
        """Return all evaluations, in order."""
        rows = self._read(LEDGER_FILE, read_evals)
        if rows is None:
            rows = self._read_lines(EVALUATIONS_FILE, _evaluation)
        return rows or self.report().evaluations()

    def timeline(self, step: int) -> StepTimeline | None:
        """Return the line of the timeline of a step; None if there is none."""
        return next((row for row in reversed(self._read_lines(TIMELINE_FILE, parse_line)) if row.step == step), None)

    def weight_plane(self) -> pb.GetWeightPlaneResponse | None:
        """Return the present state of weight updates; None if the run does not answer."""
        if self.state() != "running":
            return None
        with self._lock:
            now = time.monotonic()
            if now - self._plane[0] >= _PLANE_SECONDS:
                self._plane = now, self._coordinator.weight_plane()
            return self._plane[1]

    def index(self) -> TrajectoryIndex:
        """Return the index; wait up to 2 s for the first update of an index in our cache."""
        if self._tokenizer is None:  # load it now: the page of a trajectory needs it, and loading takes a second
            threading.Thread(target=self.tokenizer, name="tokenizer", daemon=True).start()
        own = TrajectoryIndex(self.folder)
        if self._indexer is None and _is_kept(own, self.folder / SAMPLES_FILE):
            return self._checked(own)
        found = TrajectoryIndex(self.folder, self._cache / "index.db")
        with self._lock:
            self._asked = time.monotonic()
            if starts := self._indexer is None or not self._indexer.is_alive():
                self._indexed.clear()
                self._cache.mkdir(parents=True, exist_ok=True)
                found.prepare()
                self._indexer = threading.Thread(target=self._keep, args=(found,), name="index", daemon=True)
                self._indexer.start()
        if starts:
            self._indexed.wait(_INDEX_SECONDS)
        return self._checked(found)

    def _checked(self, index: TrajectoryIndex) -> TrajectoryIndex:
        """Return an index, after noting the errors of its files."""
        found = index.left_out()
        for name in (SAMPLES_FILE, TOKENS_FILE):
            self._note(name, found.get(name, ""))
        return index

    def _keep(self, index: TrajectoryIndex) -> None:
        """Update an index as long as pages use it."""
        while time.monotonic() - self._asked < _IDLE_SECONDS:
            with contextlib.suppress(sqlite3.Error, OSError):  # a full disk: tried again
                index.update()
                self._indexed.set()
            time.sleep(_UPDATE_SECONDS)

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer of the run; None if its model is not on this machine."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._load_tokenizer()
            return self._tokenizer

    def _load_tokenizer(self) -> Tokenizer | None:
        own = self._read(TOKENIZER_FILE, lambda path: Tokenizer.load(path.parent))
        if own is not None:
            return own
        model = self.recipe().get("model")
        source = str(model.get("source", "")) if isinstance(model, dict) else ""
        with contextlib.suppress(FourfoldError, OSError):
            if self.peer:  # the model is on another machine; the same path here may have another one
                return None
            # Converting a built-in model takes a minute; a run on this machine has done that.
            if source.startswith(model_folder.BUILTIN_PREFIX) and not model_folder.is_ready(source):
                return None
            return Tokenizer.load(model_folder.resolve(source))
        return None

    def _read(self, name: str, read: Callable[[Path], T]) -> T | None:
        """Return the result of `read` for a file; None if it is missing, or, with a fault, if it cannot be read."""
        problem, found = "", None
        path = self.folder / name
        if path.is_file():
            try:
                found = read(path)
            except (ConfigError, OSError, ValueError, sqlite3.Error) as error:
                problem = str(error)
        self._note(name, problem)
        return found

    def _note(self, name: str, problem: str) -> None:
        """Note the error of a file; an empty text clears it."""
        if problem:
            self._faults[name] = problem
        else:
            self._faults.pop(name, None)

    def _read_lines(self, name: str, parse: Callable[[bytes], T]) -> list[T]:
        """Return the parsed lines of a growing file. Lines that `parse` refuses are left out, with a fault."""
        with self._lock:
            lines = self._lines[name]
            _read_new(lines, self.folder / name, parse)
            self._note(name, f"{lines.left_out} lines are left out; in the first, {lines.fault}" if lines.fault else "")
            return list(lines.rows)


def _read_new(lines: _Lines, path: Path, parse: Callable[[bytes], Any]) -> None:
    """Parse the lines that were appended since the last call; all of them if the file was replaced."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != lines.inode or status.st_size < lines.offset:
                lines.reset(status.st_ino)
            file.seek(lines.offset)
            while (line := file.readline(_LINE_BYTES)).endswith(b"\n"):
                lines.offset += len(line)
                try:
                    lines.rows.append(parse(line))
                except ValueError as error:
                    lines.left_out += 1
                    lines.fault = lines.fault or str(error)
            if len(line) == _LINE_BYTES:
                lines.left_out, lines.offset = lines.left_out + 1, status.st_size
                lines.fault = lines.fault or f"it has more than {_LINE_BYTES:,} bytes, and what follows is not read"
    except FileNotFoundError:
        lines.reset(-1)


class RunFolders:
    """The runs to show, by name."""

    def __init__(
        self, runs: Sequence[Path | RunReader], *, root: Path | None = None, cache: Path | None = None
    ) -> None:
        """Show `runs`, and all runs in `root`, also those that start later.

        If runs have the same name, the later ones are shown by their address or with their folder. Raises ConfigError
        for a folder without a run, and for one that is given twice.
        """
        self._root, self._cache = root, cache
        self._readers: dict[str, RunReader] = {}
        for run in runs:
            reader = run if isinstance(run, RunReader) else RunReader(run, cache=cache)
            folder = reader.folder
            if not (folder / CONFIG_FILE).is_file():
                raise ConfigError(f"{folder}: no run is in this folder (no {CONFIG_FILE}); give a folder of runs/")
            if any(folder.resolve() == other.folder.resolve() for other in self._readers.values()):
                raise ConfigError(f"{folder}: the run is given twice; give it once")
            more = (f"{reader.long_name} {number}" for number in itertools.count(2))
            names = itertools.chain((reader.name, reader.long_name), more)
            reader.name = next(name for name in names if name not in self._readers)
            self._readers[reader.name] = reader

    def all(self) -> list[RunReader]:
        """Return the runs, those that changed last first."""
        if self._root is not None and self._root.is_dir():
            for config in self._root.glob(f"*/{CONFIG_FILE}"):
                folder = config.parent
                if not folder.is_symlink() and folder.name not in self._readers:
                    self._readers[folder.name] = RunReader(folder, cache=self._cache)
        found = [reader for reader in self._readers.values() if (reader.folder / CONFIG_FILE).is_file()]
        return [*sorted(found, key=lambda reader: _changed(reader.folder), reverse=True)]

    def get(self, name: str) -> RunReader | None:
        """Return a run of `all`; a name is never used as a path."""
        return next((reader for reader in self.all() if reader.name == name), None)


def _changed(folder: Path) -> float:
    return max(_time_of(folder / name) for name in (METRICS_FILE, CONFIG_FILE))


def _time_of(path: Path) -> float:
    """Return the time of a file's last change; 0 if it is missing."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read_recipe(path: Path) -> dict[str, Any]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        configuration.flatten(tables)
        return tables
    except RecursionError:
        raise ValueError("its tables are nested too deeply") from None


def _metrics_row(line: bytes) -> dict[str, Any]:
    row = load(line)
    texts = asdict(check(_STEP, row))
    return {**row, **texts}


def _evaluation(line: bytes) -> EvalRow:
    row = parse(_EVAL, line)
    check_examples(row.answers)
    return row


def _is_kept(index: TrajectoryIndex, samples: Path) -> bool:
    """Return whether an index has all lines, or is so new that the run itself must be updating it."""
    try:
        return not index.pending_bytes() or index.path.stat().st_mtime >= samples.stat().st_mtime - _RECORDER_SECONDS
    except (OSError, sqlite3.Error):
        return False


REMOTE: Final = "remote"
"""Folder in `cache_folder` that has the copies of runs on other machines."""


def cache_folder() -> Path:
    """Return the folder of this user for indexes and copies of runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fourfold" / "view"


def _cache_name(folder: Path) -> str:
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return f"{folder.name}-{digest}"
