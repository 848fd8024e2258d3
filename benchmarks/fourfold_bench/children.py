"""The processes of a benchmark: each with a log, none left over, and the end of its log told when it fails."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from fourfold.errors import ConfigError, DeadlinePassed, Unavailable
from fourfold.host.process import Command, Supervisor
from fourfold.host.scratch import Scratch

_POLL_SECONDS: Final = 0.02
_STOP_SECONDS: Final = 5.0


class Children:
    """Of one benchmark, in one folder."""

    def __init__(self, folder: Path) -> None:
        """Begin; logs go to folder/logs."""
        self.folder = folder
        self._supervisor = Supervisor(folder / "logs")

    def start(self, name: str, *words: str, env: Mapping[str, str] | None = None) -> None:
        """Start `python WORDS`."""
        self._supervisor.start(Command(name=name, argv=(sys.executable, *words), env=env or {}))

    def run(self, name: str, *words: str, timeout: float, env: Mapping[str, str] | None = None) -> None:
        """Start `python WORDS` and wait for its end; raises as `wait`."""
        self.start(name, *words, env=env)
        self.wait(name, timeout=timeout)

    def wait(self, *names: str, timeout: float, until: Callable[[], bool] | None = None) -> None:
        """Wait until these have ended by themselves, with exit code 0, or until `until`, called many times, is true.

        Raises:
            Unavailable: one failed, or another child died meanwhile; with the end of its log.
            DeadlinePassed: they took longer than `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            # Who ends after this line is told as a death the next time.
            running = [name for name in names if self._supervisor.children[name].alive]
            for death in self._supervisor.deaths():
                if death.name not in names or death.exit_code or death.signal:
                    raise Unavailable(death.explain())
            if (until is not None and until()) or not running:
                return
            if time.monotonic() > deadline:
                log = self._supervisor.children[running[0]].log
                raise DeadlinePassed(f"{', '.join(running)} still ran after {timeout:.0f} s; the log is {log}")
            time.sleep(_POLL_SECONDS)

    def ready(self, name: str, *, timeout: float) -> str:
        """Wait for a service's READY line; return its host:port. Raises as `wait`."""
        return self._supervisor.wait_ready([name], timeout_seconds=timeout)[name]

    def end(self, name: str) -> None:
        """End a service in order: SIGTERM, and SIGKILL when that does not help."""
        child = self._supervisor.children[name]
        child.terminate()
        child.reap(_STOP_SECONDS)
        if child.alive:
            child.kill_group()
            child.reap(_STOP_SECONDS)
        self._supervisor.deaths()  # this one is no news

    def log(self, name: str) -> Path:
        """Return where a child writes."""
        return self._supervisor.children[name].log

    def pid(self, name: str) -> int:
        """Return the process id of a child."""
        return self._supervisor.children[name].pid

    def stop(self) -> None:
        """End all of them, and what they have started; nothing can be started any more."""
        self._supervisor.stop(_STOP_SECONDS)


@contextmanager
def workplace(purpose: str, *, keep: Path | None = None) -> Iterator[Path]:
    """Give a folder for the block: a scratch folder, which stays and is named when the block fails.

    Args:
        purpose: part of the scratch folder's name.
        keep: a folder to take instead, which stays; made if missing.

    Raises:
        ConfigError: there is something in the folder to keep.
    """
    if keep is not None:
        if keep.exists() and any(keep.iterdir()):
            raise ConfigError(f"{keep}: there is something in it; give a folder that is empty, or none yet")
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()
        return
    scratch, done = Scratch(purpose), False
    try:
        yield scratch.path
        done = True
    finally:
        if done or isinstance(sys.exception(), KeyboardInterrupt | ConfigError):  # a ConfigError: nothing was measured
            scratch.remove()
        else:
            # Under another name: the next benchmark removes scratch folders that nobody holds.
            kept = scratch.path.rename(scratch.path.with_name(f"kept-{scratch.path.name}"))
            sys.stderr.write(f"fourfold: what the benchmark wrote is in {kept} (it was in {scratch.path})\n")
