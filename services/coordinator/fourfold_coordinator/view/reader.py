"""Reads runs for the pages of `fourfold view`.

    pages --RunReader--> FolderReader --> config.toml, metrics.jsonl, timeline.jsonl, report.json, ledger, index.db
                                      '--> RunCoordinator: state, weight plane

`RunReader` is all that pages know of a run. For a run of another machine (`remote.py`), the folder is a copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sqlite3
import threading
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from fourfold import config as configuration
from fourfold.config import Config
from fourfold.coordinator.client import CoordinatorClient
from fourfold.coordinator.v1 import run_service_pb2 as pb
from fourfold.errors import ConfigError, FourfoldError
from fourfold.model import folder as model_folder
from fourfold.model.tokenizer import Tokenizer

from ..launch.run_folder import ADDRESS_FILE, CONFIG_FILE, LEDGER_FILE, METRICS_FILE, REPORT_FILE
from ..state.eval_results import read_results
from ..state.ledger import EvalRow, read_evals
from ..state.samples import SAMPLES_FILE
from ..state.timeline import TIMELINE_FILE, parse_line
from ..state.trajectory_index import TrajectoryIndex

EVALUATIONS_FILE: Final = "evaluations.jsonl"
"""In a copy of a run: what the ledger has of the evaluations."""
_RPC_SECONDS: Final = 2.0
_CONNECT_SECONDS: Final = 0.5
_STATE_SECONDS: Final = 2.0  # for which a state is used again
_PLANE_SECONDS: Final = 1.0  # for which an answer is used again
_UPDATE_SECONDS: Final = 1.0  # between two updates of an index of our own
_IDLE_SECONDS: Final = 60.0  # without a page that asks for the index
# An index in the run's folder that is older than the samples by more than this is not kept up to date by the run.
_RECORDER_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """When members worked in one step, in seconds after its start."""

    step: int
    seconds: float
    members: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]  # intervals by member and phase


class RunReader(Protocol):
    """A run, in progress or ended. Any thread may call."""

    name: str

    def state(self) -> str:
        """Return "running", "finished" or "stopped"."""

    def recipe(self) -> Mapping[str, Any]:
        """Return the tables of the recipe; empty if it is not readable."""

    def config(self) -> Config | None:
        """Return the recipe; None if this release cannot read it."""

    def steps(self) -> Sequence[Mapping[str, Any]]:
        """Return the lines of metrics.jsonl, in order."""

    def report(self) -> Mapping[str, Any]:
        """Return report.json; empty before the end."""

    def evaluations(self) -> Sequence[EvalRow]:
        """Return all evaluations, in order."""

    def timeline(self, step: int) -> StepTimeline | None:
        """Return when members worked in a step; None if that was not recorded."""

    def weight_plane(self) -> pb.GetWeightPlaneResponse | None:
        """Return the present state of weight updates; None if the run does not answer."""

    def index(self) -> TrajectoryIndex:
        """Return the index of the trajectories, which may lag behind the run."""

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer of the run; None if its model is not on this machine."""


class RunCoordinator(Protocol):
    """The coordinator process of a run, if it lives. Any thread may call; answers come within seconds."""

    def state(self) -> str:
        """Return "running", "finished" or "stopped"."""

    def weight_plane(self) -> pb.GetWeightPlaneResponse | None:
        """Return the state of weight updates; None without an answer."""


class LocalCoordinator:
    """The coordinator of a run in a folder of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def state(self) -> str:
        """Return the state: the coordinator writes its address when it starts, and the report at the end."""
        address, report = self._folder / ADDRESS_FILE, self._folder / REPORT_FILE
        with contextlib.suppress(OSError):
            if report.stat().st_mtime >= _time_of(address):
                return "finished"
        try:  # not by its lock file: a coordinator that starts at that moment would find it locked
            host, _, port = address.read_text(encoding="utf-8").strip().rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
            return "running"
        except (OSError, ValueError):
            return "stopped"

    def weight_plane(self) -> pb.GetWeightPlaneResponse | None:
        try:
            config = configuration.load(self._folder / CONFIG_FILE)
            address = (self._folder / ADDRESS_FILE).read_text(encoding="utf-8").strip()
            with CoordinatorClient(address, certs=config.security.directory) as client:
                return client.get_weight_plane(timeout=_RPC_SECONDS)
        except (FourfoldError, OSError, ValueError):
            return None


@dataclass(slots=True)
class _Lines:
    """The parsed lines of a growing JSONL file."""

    rows: list[Any] = field(default_factory=list)
    offset: int = 0
    inode: int = -1


class FolderReader:
    """A run in a folder of this machine, or a copy of one."""

    def __init__(self, folder: Path, *, cache: Path | None = None, coordinator: RunCoordinator | None = None) -> None:
        """Read the run in `folder`; `cache` is where an index is kept that the run itself does not keep.

        `coordinator` is that of the run; None: the one whose address is in the folder.
        """
        self.name, self.folder = folder.name, folder
        self._coordinator = coordinator or LocalCoordinator(folder)
        self._cache = (cache or cache_folder()) / _cache_name(folder)
        self._lock = threading.Lock()
        self._metrics, self._timeline = _Lines(), _Lines()
        self._state = -_STATE_SECONDS, ""  # and when it was found, on the monotonic clock
        self._plane: tuple[float, pb.GetWeightPlaneResponse | None] = (-_PLANE_SECONDS, None)
        self._is_copy = coordinator is not None
        self._tokenizer: Tokenizer | None = None
        self._asked = 0.0  # for the index, on the monotonic clock
        self._indexer: threading.Thread | None = None

    def state(self) -> str:
        now = time.monotonic()
        if now - self._state[0] >= _STATE_SECONDS:
            self._state = now, self._coordinator.state()
        return self._state[1]

    def recipe(self) -> Mapping[str, Any]:
        try:
            return tomllib.loads((self.folder / CONFIG_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def config(self) -> Config | None:
        try:
            return configuration.load(self.folder / CONFIG_FILE)
        except (FourfoldError, OSError, ValueError):
            return None

    def steps(self) -> Sequence[Mapping[str, Any]]:
        with self._lock:
            self._read_new(self._metrics, self.folder / METRICS_FILE, _metrics_row)
            return list(self._metrics.rows)

    def report(self) -> Mapping[str, Any]:
        try:
            found = json.loads((self.folder / REPORT_FILE).read_text(encoding="utf-8"))
            return found if isinstance(found, dict) else {}
        except (OSError, ValueError):
            return {}

    def evaluations(self) -> Sequence[EvalRow]:
        try:
            return read_evals(self.folder / LEDGER_FILE)
        except (sqlite3.Error, ValueError):
            pass
        try:
            rows = map(json.loads, (self.folder / EVALUATIONS_FILE).read_bytes().splitlines())
            return [EvalRow(**{**row, "sets": read_results(json.dumps(row["sets"]))}) for row in rows]
        except (OSError, ValueError, TypeError, KeyError):
            return _reported_evaluations(self.report())

    def timeline(self, step: int) -> StepTimeline | None:
        with self._lock:
            self._read_new(self._timeline, self.folder / TIMELINE_FILE, parse_line)
            found = next((row for row in reversed(self._timeline.rows) if row[0] == step), None)
        if found is None:
            return None
        return StepTimeline(step=step, seconds=found[2] - found[1], members=found[3])

    def weight_plane(self) -> pb.GetWeightPlaneResponse | None:
        if self.state() != "running":
            return None
        with self._lock:
            now = time.monotonic()
            if now - self._plane[0] >= _PLANE_SECONDS:
                self._plane = now, self._coordinator.weight_plane()
            return self._plane[1]

    def index(self) -> TrajectoryIndex:
        if self._tokenizer is None:  # the page of a trajectory needs it soon, and it takes a second to read
            threading.Thread(target=self.tokenizer, name="tokenizer", daemon=True).start()
        own = TrajectoryIndex(self.folder)
        if self._indexer is None and (own.covers() or _is_kept(own.path, self.folder / SAMPLES_FILE)):
            return own
        found = TrajectoryIndex(self.folder, self._cache / "index.db")
        with self._lock:
            self._asked = time.monotonic()
            if self._indexer is None or not self._indexer.is_alive():
                self._cache.mkdir(parents=True, exist_ok=True)
                found.prepare()
                self._indexer = threading.Thread(target=self._keep, args=(found,), name="index", daemon=True)
                self._indexer.start()
        return found

    def _keep(self, index: TrajectoryIndex) -> None:
        """Update an index as long as pages use it."""
        while time.monotonic() - self._asked < _IDLE_SECONDS:
            with contextlib.suppress(sqlite3.Error, OSError):  # a full disk: tried again
                index.update()
            time.sleep(_UPDATE_SECONDS)

    def tokenizer(self) -> Tokenizer | None:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._load_tokenizer()
            return self._tokenizer

    def _load_tokenizer(self) -> Tokenizer | None:
        source = str(self.recipe().get("model", {}).get("source", ""))
        with contextlib.suppress(FourfoldError, OSError):
            if (self.folder / "model" / "tokenizer.json").is_file():
                return Tokenizer.load(self.folder / "model")
            if self._is_copy:  # its model is on another machine, and another one may be here at the same place
                return None
            # A built-in model would be converted first, which takes a minute; a run has done that.
            if source.startswith(model_folder.BUILTIN_PREFIX) and self.state() != "running":
                return None
            return Tokenizer.load(model_folder.resolve(source))
        return None

    def _read_new(self, lines: _Lines, path: Path, parse: Any) -> None:
        """Parse the lines that were appended since the last call; all of them if the file was replaced."""
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != lines.inode or status.st_size < lines.offset:
                    lines.rows, lines.offset, lines.inode = [], 0, status.st_ino
                file.seek(lines.offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    lines.offset += len(line)
                    if (row := parse(line)) is not None:
                        lines.rows.append(row)
        except FileNotFoundError:
            lines.rows, lines.offset, lines.inode = [], 0, -1


class RunFolders:
    """The runs to show, by name."""

    def __init__(
        self, runs: Sequence[Path | FolderReader], *, root: Path | None = None, cache: Path | None = None
    ) -> None:
        """Show `runs`, and all runs in `root`, also those that start later.

        Raises ConfigError for a folder without a run, and for two with the same name.
        """
        self._root, self._cache = root, cache
        self._readers: dict[str, FolderReader] = {}
        for run in runs:
            reader = run if isinstance(run, FolderReader) else FolderReader(run, cache=cache)
            folder = reader.folder
            if not (folder / CONFIG_FILE).is_file():
                raise ConfigError(f"{folder}: no run is in this folder (no {CONFIG_FILE}); give a folder of runs/")
            if folder.name in self._readers:
                raise ConfigError(f"{folder}: another run has the name {folder.name!r}, too; give only one of them")
            self._readers[folder.name] = reader

    def all(self) -> list[RunReader]:
        """Return the runs, those that changed last first."""
        if self._root is not None and self._root.is_dir():
            for config in self._root.glob(f"*/{CONFIG_FILE}"):
                folder = config.parent
                if not folder.is_symlink() and folder.name not in self._readers:
                    self._readers[folder.name] = FolderReader(folder, cache=self._cache)
        found = [reader for reader in self._readers.values() if (reader.folder / CONFIG_FILE).is_file()]
        return [*sorted(found, key=lambda reader: _changed(reader.folder), reverse=True)]

    def get(self, name: str) -> RunReader | None:
        """Return a run of `all`; a name is never used as a path."""
        return next((reader for reader in self.all() if reader.name == name), None)


def _changed(folder: Path) -> float:
    return max(_time_of(folder / name) for name in (METRICS_FILE, CONFIG_FILE))


def _time_of(path: Path) -> float:
    """Return when a file changed last; 0 if it is missing."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _metrics_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
        return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
    except ValueError:
        return None


def _reported_evaluations(report: Mapping[str, Any]) -> list[EvalRow]:
    found = []
    for row in report.get("evals") or []:
        answers = [
            report.get(f"answers_{when}") or []
            for when in ("before", "after")
            if (report.get(f"eval_{when}") or {}).get("step") == row["step"]
        ]
        counts = row.get("n", 0), row.get("missing", 0)
        examples, sets = answers[-1] if answers else [], read_results(json.dumps(row.get("sets") or []))
        found.append(EvalRow(row["step"], row["score"], row["half_width"], *counts, examples, sets))
    return found


def _is_kept(index: Path, samples: Path) -> bool:
    """Return whether the run itself updates its index: it is hardly older than the samples."""
    try:
        return index.stat().st_mtime >= samples.stat().st_mtime - _RECORDER_SECONDS
    except OSError:
        return False


def cache_folder() -> Path:
    """Return the folder of this user for indexes and copies of runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fourfold" / "view"


def _cache_name(folder: Path) -> str:
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return f"{folder.name}-{digest}"
