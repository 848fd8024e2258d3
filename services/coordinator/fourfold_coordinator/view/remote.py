"""Opens a run of another machine for the pages of `fourfold view`.

    coordinator --ReadFile--> a copy of the run's files in the cache --RunReader--> pages
                --GetRun, GetWeightPlane--> RemoteCoordinator

The copy is updated while pages are requested. Without an answer, the pages show the old copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from fourfold.config.table import NAME_PATTERN
from fourfold.coordinator.client import CoordinatorClient, RunFileClient, tail_sha256
from fourfold.coordinator.v1 import run_file_service_pb2 as files_pb
from fourfold.coordinator.v1 import run_service_pb2 as pb
from fourfold.errors import ConfigError, DeadlinePassed, FourfoldError, PeerFault, Unavailable

from ..launch.copied_files import FILES
from ..launch.run_folder import is_finished
from .reader import RunReader

T = TypeVar("T")

_AT_START: Final = (files_pb.RUN_FILE_RECIPE, files_pb.RUN_FILE_METRICS)
# Limit of files that are read as a whole; a larger file is a fault of the coordinator.
_MOST_BYTES: Final = {
    files_pb.RUN_FILE_RECIPE: 1 << 17,
    files_pb.RUN_FILE_REPORT: 1 << 28,
    files_pb.RUN_FILE_TOKENIZER: 1 << 28,
}
COPY_GIB: Final = 32.0
"""Default of `--copy-limit`: some twenty runs of 100,000 trajectories of 1,024 tokens."""
_RPC_SECONDS: Final = 5.0
_FILE_SECONDS: Final = 60.0  # a large file continues in another call after this time
_UPDATE_SECONDS: Final = 1.0
_GIB: Final = 1 << 30
_IDLE_SECONDS: Final = 60.0  # after this time without a request, the copy is not updated
_ENDED: Final = {pb.RUN_PHASE_DONE: "finished", pb.RUN_PHASE_FAILED: "stopped", pb.RUN_PHASE_STOPPED: "stopped"}


class CopyRoom:
    """Limits the bytes of all copies in `folder` with their indexes: a coordinator could send data without end."""

    def __init__(self, folder: Path, limit_gib: float) -> None:
        self.folder, self._limit_gib = folder, limit_gib
        self._used = 0
        self._lock = threading.Lock()

    def count(self) -> None:
        """Count the bytes in the folder, because users remove copies and indexes grow."""
        with self._lock, contextlib.suppress(OSError):  # a folder was removed meanwhile: count again later
            self._used = sum(_size(path) for path in self.folder.rglob("*"))

    def take(self, size: int, what: str) -> None:
        """Count `size` bytes more; raise ConfigError if they exceed the limit."""
        with self._lock:
            if self._used + size > self._limit_gib * _GIB:
                raise ConfigError(
                    f"--copy-limit {self._limit_gib:g}: {what} would exceed these GiB, of which the copies in "
                    f"{self.folder} use {self._used / _GIB:.3g}; remove copies of old runs there, or raise --copy-limit"
                )
            self._used += size


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # replaced meanwhile
        return 0


@contextlib.contextmanager
def open_remote(target: str, *, room: CopyRoom, certs: str = "", token: str = "") -> Iterator[RunReader]:
    """Yield a reader of the run of a coordinator, and end its calls and the copy afterwards.

    Args:
        target: "HOST:PORT" of the coordinator, or of its `view.public_listen` with a token.
        room: folder for copies, and their limit.
        certs: folder with viewer-0.pem, or with a token only ca.pem; empty: no TLS, on this machine.
        token: with the scope `view`; empty: the certificate is presented.

    Raises:
        FourfoldError: the address is malformed, the coordinator does not answer or refuses the caller, or the copy
            exceeds its limit.
    """
    peer = f"coordinator service at {target}"
    with (
        CoordinatorClient(target, certs=certs, token=token, timeout=_RPC_SECONDS) as runs,
        RunFileClient(target, certs=certs, token=token, timeout=_FILE_SECONDS) as files,
    ):
        name = runs.get_run().name
        if not re.fullmatch(NAME_PATTERN, name):
            raise PeerFault(peer, "BAD_RESPONSE", f"GetRun: {name!r:.80} is no name of a run")
        place = hashlib.sha256(target.encode()).hexdigest()[:16]
        coordinator = RemoteCoordinator(runs, files, room.folder / place / name, peer, room)
        room.count()
        for file in _AT_START:
            coordinator.copy(file)
        try:
            yield RunReader(coordinator.folder, cache=room.folder, coordinator=coordinator, address=target)
        finally:
            coordinator.close()


class RemoteCoordinator:
    """The coordinator of a run on another machine, and the copy of the run's files in `folder`."""

    def __init__(self, runs: CoordinatorClient, files: RunFileClient, folder: Path, peer: str, room: CopyRoom) -> None:
        self.folder, self.peer, self._room = folder, peer, room
        self._runs, self._files = runs, files
        self._faults: dict[str, str] = {}  # faults by request
        self._lock = threading.Lock()
        self._asked = 0.0  # last request of the state, on the monotonic clock
        self._answer = "running"  # the last state that the coordinator gave
        self._follower: threading.Thread | None = None
        self._closed = threading.Event()

    def close(self) -> None:
        """End the calls and the copy."""
        self._closed.set()
        self._files.close()  # ends the follower's call before its timeout
        self._runs.close()
        if self._follower is not None:
            self._follower.join(_RPC_SECONDS)

    def state(self) -> str:
        """Return the state, and keep the copy up to date for a while."""
        with self._lock:
            self._asked = time.monotonic()
            if self._follower is None or not self._follower.is_alive():
                self._follower = threading.Thread(target=self._follow, name="copy", daemon=True)
                self._follower.start()
        run = self._ask("state", self._runs.get_run)
        if run is not None:
            self._answer = _ENDED.get(run.phase, "running")
        elif self._answer == "running":  # the run may have ended, or only this machine cannot reach it
            return "finished" if is_finished(self.folder) else "unreachable"
        return self._answer

    def weight_plane(self) -> pb.GetWeightPlaneResponse | None:
        return self._ask("weight plane", self._runs.get_weight_plane)

    def faults(self) -> list[str]:
        return list(self._faults.copy().values())

    def _ask(self, what: str, call: Callable[[], T]) -> T | None:
        """Return the answer to a call; None with a fault if there is none."""
        try:
            found = call()
        except FourfoldError as error:
            self._faults[what] = f"{what} of the run: {error}"
            return None
        self._faults.pop(what, None)
        return found

    def _follow(self) -> None:
        """Update the copy as long as pages ask for the state."""
        while not self._closed.is_set() and time.monotonic() - self._asked < _IDLE_SECONDS:
            self._room.count()
            for file, name in FILES.items():
                try:
                    self.copy(file)
                    self._faults.pop(name, None)
                except (Unavailable, DeadlinePassed):  # all files are copied, or a large one continues later
                    break
                except (FourfoldError, OSError) as error:  # OSError: an error of this machine's disk
                    self._faults[name] = f"{name} was not copied: {error}"
            self._closed.wait(_UPDATE_SECONDS)

    def copy(self, file: files_pb.RunFile.ValueType) -> None:
        """Append the missing bytes to the copy of a file; raise FourfoldError or OSError.

        If the file was replaced, the copy is replaced, too; readers notice this by its inode.
        """
        path = self.folder / FILES[file]
        path.parent.mkdir(parents=True, exist_ok=True)
        offset, tail = _end_of(path)
        most = _MOST_BYTES.get(file, sys.maxsize)
        for begin, data in self._files.read_file(file, offset=offset, tail=tail):
            if begin + len(data) > most:
                raise PeerFault(self.peer, "TOO_LARGE", f"{FILES[file]} has more than {most:,} bytes")
            self._room.take(len(data), f"{FILES[file]} of the {self.peer}")
            if begin == 0 and offset > 0 and not data:  # removed
                path.unlink(missing_ok=True)
            elif begin == 0 and offset > 0:
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
