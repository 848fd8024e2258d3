"""Starts and ends the child processes of a benchmark, and gives it a folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from fourfold.config import Config, dump
from fourfold.errors import ConfigError, DeadlinePassed, Unavailable
from fourfold.host.process import Command, Supervisor
from fourfold.host.scratch import Scratch

_POLL_SECONDS: Final = 0.02
_STOP_SECONDS: Final = 5.0
_MODEL_SECONDS: Final = 600.0
_MEET_SECONDS: Final = 600.0
_MEET_POLL_SECONDS: Final = 0.001


class BenchProcesses:
    """The child processes of one benchmark. Their logs are in folder/logs. A context manager that ends all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._supervisor = Supervisor(folder / "logs")

    def __enter__(self) -> BenchProcesses:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def start(self, name: str, *words: str, env: Mapping[str, str] | None = None) -> None:
        """Start `python WORDS`."""
        self._supervisor.start(Command(name=name, argv=(sys.executable, *words), env=env or {}))

    def run(self, name: str, *words: str, timeout: float, env: Mapping[str, str] | None = None) -> None:
        """Start `python WORDS` and wait for its end; raises as `wait`."""
        self.start(name, *words, env=env)
        self.wait(name, timeout=timeout)

    def wait(self, *names: str, timeout: float, until: Callable[[], bool] | None = None) -> None:
        """Wait until these processes have ended with exit code 0, or until `until` returns True; it is polled.

        Raises:
            Unavailable: one failed, or another child died meanwhile; with the end of its log.
            DeadlinePassed: they took longer than `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            # Before `deaths`: the death of a process that ends after this line is found in the next iteration.
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

    def write_model(self, shape: str, *, context: int) -> Path:
        """Write a model with random weights in a child process; return its folder. Raises as `wait`."""
        words = ("-m", "fourfold_bench.models", str(self.folder / "model"), shape, str(context))
        self.run("model", *words, timeout=_MODEL_SECONDS)
        return self.folder / "model"

    def write_recipe(self, config: Config) -> str:
        """Write a recipe; return its path."""
        path = self.folder / "recipe.toml"
        path.write_text(dump(config), encoding="utf-8")
        return str(path)

    def serve(self, role: str, recipe: str, *, env: Mapping[str, str]) -> None:
        """Start `fourfold serve ROLE RECIPE` on a free port of the loopback interface; the child's name is ROLE."""
        listen = ("--listen", "127.0.0.1:0", "--run-dir", str(self.folder / "run"))
        self.start(role, "-m", "fourfold", "serve", role, recipe, *listen, env=env)

    def ready(self, *names: str, timeout: float) -> list[str]:
        """Wait for the READY lines of services; return their host:port. Raises as `wait`."""
        found = self._supervisor.wait_ready(names, timeout_seconds=timeout)
        return [found[name] for name in names]

    def end(self, name: str) -> None:
        """End a service with SIGTERM, and with SIGKILL if that does not suffice."""
        child = self._supervisor.children[name]
        child.terminate()
        child.reap(_STOP_SECONDS)
        if child.alive:
            child.kill_group()
            child.reap(_STOP_SECONDS)
        self._supervisor.deaths()  # so that `wait` does not report this death

    def log(self, name: str) -> Path:
        """Return the path of a child's log."""
        return self._supervisor.children[name].log

    def pid(self, name: str) -> int:
        """Return the process id of a child."""
        return self._supervisor.children[name].pid

    def stop(self) -> None:
        """End all children and their descendants. None can be started afterwards."""
        self._supervisor.stop(_STOP_SECONDS)


def meet(folder: Path, place: str, index: int, count: int) -> None:
    """Return when `count` processes have come to this place; they meet by files in a folder.

    Raises:
        DeadlinePassed: another one did not come.
    """
    (folder / f"{place}.{index}").touch()
    deadline = time.monotonic() + _MEET_SECONDS
    while len(list(folder.glob(f"{place}.*"))) < count:
        if time.monotonic() > deadline:
            raise DeadlinePassed(f"another client did not come to {place} in {_MEET_SECONDS:.0f} s")
        time.sleep(_MEET_POLL_SECONDS)


@contextmanager
def workplace(purpose: str, *, keep: Path | None = None) -> Iterator[Path]:
    """Yield a folder: a scratch folder, which stays and is named on stderr if the block fails.

    Args:
        purpose: part of the scratch folder's name.
        keep: a folder to use instead, which stays; made if missing.

    Raises:
        ConfigError: `keep` is not empty.
    """
    if keep is not None:
        if keep.exists() and any(keep.iterdir()):
            raise ConfigError(f"--keep {keep}: the folder must be empty or new; give another one")
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()
        return
    scratch, done = Scratch(purpose), False
    try:
        yield scratch.path
        done = True
    finally:
        if done or isinstance(sys.exception(), KeyboardInterrupt | ConfigError):  # ConfigError: nothing was measured
            scratch.remove()
        else:
            # The next benchmark removes unlocked scratch folders; under this name it does not find the folder.
            kept = scratch.path.rename(scratch.path.with_name(f"kept-{scratch.path.name}"))
            print(f"fourfold: the files of the benchmark are in {kept} (before: {scratch.path})", file=sys.stderr)


def say(event: str) -> None:
    """Print progress to stderr, with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {event}", file=sys.stderr)
