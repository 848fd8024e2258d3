"""Opens a run of another machine for the pages of `fourfold view`.

    coordinator --ReadFile--> a copy of the run's files in the cache --FolderReader--> pages
                --GetRun, GetWeightPlane--> RemoteCoordinator

The copy is brought up to date while pages are looked at. Without an answer, the pages show what was copied before.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from fourfold.config.table import NAME_PATTERN
from fourfold.coordinator.client import CoordinatorClient
from fourfold.coordinator.run_files import RunFileClient, tail_sha256
from fourfold.coordinator.v1 import run_file_service_pb2 as files_pb
from fourfold.coordinator.v1 import run_service_pb2 as pb
from fourfold.errors import FourfoldError, PeerFault

from ..launch.run_folder import CONFIG_FILE, METRICS_FILE, REPORT_FILE
from ..state.sample_tokens import TOKENS_FILE
from ..state.samples import SAMPLES_FILE
from ..state.timeline import TIMELINE_FILE
from .reader import EVALUATIONS_FILE, FolderReader, cache_folder

_TOKENIZER_FILE: Final = "model/tokenizer.json"
_FILES: Final[Mapping[str, files_pb.RunFile.ValueType]] = {  # in this order: small ones first
    CONFIG_FILE: files_pb.RUN_FILE_RECIPE,
    METRICS_FILE: files_pb.RUN_FILE_METRICS,
    EVALUATIONS_FILE: files_pb.RUN_FILE_EVALUATIONS,
    REPORT_FILE: files_pb.RUN_FILE_REPORT,
    _TOKENIZER_FILE: files_pb.RUN_FILE_TOKENIZER,
    TIMELINE_FILE: files_pb.RUN_FILE_TIMELINE,
    SAMPLES_FILE: files_pb.RUN_FILE_SAMPLES,
    TOKENS_FILE: files_pb.RUN_FILE_TOKENS,
}
_AT_START: Final = (CONFIG_FILE, METRICS_FILE)
_RPC_SECONDS: Final = 5.0
_FILE_SECONDS: Final = 60.0  # after which a large file goes on in another call
_UPDATE_SECONDS: Final = 1.0
_IDLE_SECONDS: Final = 60.0  # without a page that asks
_ENDED: Final = {pb.RUN_PHASE_DONE: "finished", pb.RUN_PHASE_FAILED: "stopped"}


def open_remote(target: str, *, certs: str = "", token: str = "", cache: Path | None = None) -> FolderReader:
    """Return a reader of the run of a coordinator.

    Args:
        target: "HOST:PORT" of the coordinator, or of its `view.public_listen` with a token.
        certs: folder with viewer-0.pem, or with a token only ca.pem; empty: no TLS, on this machine.
        token: with the scope `view`; empty: the certificate is presented.
        cache: folder for copies; None: that of the user.

    Raises:
        FourfoldError: the address is malformed, or the coordinator does not answer or refuses the caller.
    """
    cache = cache or cache_folder()
    runs = CoordinatorClient(target, certs=certs, token=token, timeout=_RPC_SECONDS)
    files = RunFileClient(target, certs=certs, token=token, timeout=_FILE_SECONDS)
    name = runs.get_run().name
    if not re.fullmatch(NAME_PATTERN, name):
        raise PeerFault(f"coordinator at {target}", "BAD_RESPONSE", f"GetRun: {name!r:.80} is no name of a run")
    place = hashlib.sha256(target.encode()).hexdigest()[:16]
    coordinator = RemoteCoordinator(runs, files, cache / "remote" / place / name)
    coordinator.copy(_AT_START)
    return FolderReader(coordinator.folder, cache=cache, coordinator=coordinator)


class RemoteCoordinator:
    """The coordinator of a run on another machine, and the copy of the run's files in `folder`."""

    def __init__(self, runs: CoordinatorClient, files: RunFileClient, folder: Path) -> None:
        self.folder = folder
        self._runs, self._files = runs, files
        self._lock = threading.Lock()
        self._asked = 0.0  # for the state, on the monotonic clock
        self._follower: threading.Thread | None = None

    def state(self) -> str:
        """Return the state, and keep the copy up to date for a while."""
        with self._lock:
            self._asked = time.monotonic()
            if self._follower is None or not self._follower.is_alive():
                self._follower = threading.Thread(target=self._follow, name="copy", daemon=True)
                self._follower.start()
        try:
            return _ENDED.get(self._runs.get_run().phase, "running")
        except FourfoldError:
            return "finished" if (self.folder / REPORT_FILE).is_file() else "stopped"

    def weight_plane(self) -> pb.GetWeightPlaneResponse | None:
        try:
            return self._runs.get_weight_plane()
        except FourfoldError:
            return None

    def _follow(self) -> None:
        """Update the copy as long as pages ask for the state."""
        while time.monotonic() - self._asked < _IDLE_SECONDS:
            with contextlib.suppress(FourfoldError, OSError):  # no answer, or a full disk: tried again
                self.copy(tuple(_FILES))
            time.sleep(_UPDATE_SECONDS)

    def copy(self, names: tuple[str, ...]) -> None:
        """Copy what files have that the copy lacks; raise FourfoldError or OSError."""
        for name in names:
            self._copy_file(self.folder / name, _FILES[name])

    def _copy_file(self, path: Path, file: files_pb.RunFile.ValueType) -> None:
        """Append what is new, or begin a new file, which readers tell from the old one by its inode."""
        path.parent.mkdir(parents=True, exist_ok=True)
        offset, tail = _end_of(path)
        for begin, data in self._files.read_file(file, offset=offset, tail=tail):
            if begin == 0 and offset > 0:
                new = path.with_name(path.name + ".new")
                new.write_bytes(data)
                new.replace(path)
            elif data:
                with path.open("ab") as copy:
                    copy.write(data)


def _end_of(path: Path) -> tuple[int, bytes]:
    """Return the size of a file and its `tail_sha256`; 0 and none if it is missing."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            return size, tail_sha256(file, size)
    except FileNotFoundError:
        return 0, b""
