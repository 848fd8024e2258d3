"""Starts, watches, explains and ends the child processes of one owner.

    Supervisor --start--> child in its own session, stdout and stderr to logs/<name>.log
         |                  (one thread per child records when it died, so that the first death is known)
         |<--READY line-- the log
         '--stop--> SIGTERM to all children at once, 2 s later SIGKILL to every process group and to
                    every other process that has this supervisor's tag in its environment

If the owner itself is killed, `fourfold.host.process_tree` ends the children: call `Supervisor.start` from the main
thread, or from one that lives as long as the supervisor, because the kernel ties a child to the thread that started it.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fourfold.errors import DeadlinePassed, Unavailable
from fourfold.host import logs
from fourfold.host.disk import explain_no_space
from fourfold.host.postmortem import Death, last_message, log_tail, oom_kill_count
from fourfold.host.process_tree import (
    PARENT_PID_VARIABLE,
    ProcessHandles,
    descendants,
    kill_group,
    kill_tagged,
    tag_variable,
)

STOP_GRACE_SECONDS: Final = 2.0
NOTICE: Final = signal.SIGUSR1
"""Signal to a ready trainer, from a launcher: its machine is about to leave."""
_POLL_SECONDS: Final = 0.05
_ROTATION_SECONDS: Final = 1.0
_REAP_SECONDS: Final = 1.0
_READY: Final = re.compile(rb"^READY (\S+)\s*$", re.MULTILINE)
_NOT_READY: Final = re.compile(rb"^NOT READY: (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A program to start as a child."""

    name: str  # member id; the log is named after it
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)  # variables added to the environment of this process


class ChildProcess:
    """A started process and its log. Made by `Supervisor.start`."""

    def __init__(self, command: Command, *, log: Path, tag: str, changed: threading.Event) -> None:
        self.command = command
        self.log = log
        self.started = time.monotonic()
        self.target = ""  # host:port of the READY line; empty until the line has been read
        self.obstacle = ""  # text of the last NOT READY line: the reason why the started process is not ready
        self.death: Death | None = None
        self.reaped = False  # from then on the kernel may give the pid to another process
        self._changed = changed
        self._log_lock = threading.Lock()
        self._oom_kills = oom_kill_count()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = self._log_read = log.stat().st_size if log.exists() else 0
        env = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",  # the last lines of a dying process must reach its log
            "PYTHONFAULTHANDLER": "1",  # writes the stack of a crash to the log
            **command.env,
            PARENT_PID_VARIABLE: str(os.getpid()),
            **tag_variable(tag),
        }
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                command.argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, env=env
            )
        self.pid = self._popen.pid
        self._waiter = threading.Thread(target=self._wait, name=f"wait-{command.name}", daemon=True)
        self._waiter.start()

    @property
    def alive(self) -> bool:
        """True until the process has ended."""
        return self.death is None

    def poll_ready(self) -> bool:
        """Read new lines of the log; return whether the READY line is among all that were read."""
        # The log may be gone, or no descriptor free. That must not end the thread that records the death.
        with self._log_lock, contextlib.suppress(OSError):
            if not self.target:
                with self.log.open("rb") as file:
                    file.seek(self._log_read)
                    complete = file.read().rpartition(b"\n")[0]
                if complete:
                    self._log_read += len(complete) + 1
                    if obstacles := _NOT_READY.findall(complete):
                        self.obstacle = obstacles[-1].decode(errors="replace")
                    if match := _READY.search(complete):
                        self.target = match.group(1).decode(errors="replace")
        return bool(self.target)

    def rotate_log(self) -> None:
        """Cut the log down if it is too long."""
        with self._log_lock:
            if logs.rotate(self.log):
                self._log_start = self._log_read = 0

    def terminate(self) -> None:
        """Send SIGTERM to the process, unless it is dead."""
        self._signal(signal.SIGTERM)

    def give_notice(self) -> None:
        """Send NOTICE to the process, unless it is dead."""
        self._signal(NOTICE)

    def kill_group(self) -> None:
        """SIGKILL the whole process group, unless the process is reaped; members of it may outlive their leader."""
        if not self.reaped:
            kill_group(self.pid)

    def reap(self, timeout_seconds: float = _REAP_SECONDS) -> None:
        """Collect the exit status of a process whose group was killed."""
        self._waiter.join(timeout_seconds)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout_seconds)
            self.reaped = True

    def _signal(self, number: signal.Signals) -> None:
        if not self.reaped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _wait(self) -> None:
        # WNOWAIT leaves a zombie: its pid and group id cannot be reused before `reap`.
        info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        exited = info is not None and info.si_code == os.CLD_EXITED
        status = info.si_status if info is not None else 0
        # A process that printed an obstacle had started: its death is no failed start, which would end the run.
        was_ready = self.poll_ready() or bool(self.obstacle)
        last_lines = log_tail(self.log, self._log_start)
        message = last_message(self.log, self.command.name, self._log_start)
        self.death = Death(
            name=self.command.name,
            time=time.time(),
            exit_code=status if exited else 0,
            signal=0 if exited else status,
            oom_kills=oom_kill_count() - self._oom_kills,
            was_ready=was_ready,
            log=str(self.log),
            last_lines=last_lines,
            message=message,
            space=explain_no_space(message or "\n".join(last_lines), self.log.parent),
        )
        self._changed.set()


class Supervisor:
    """Owns child processes: none of them, and none of their descendants, outlives it.

    All methods may be called from any thread; for `start` see the module's docstring.
    """

    def __init__(self, log_directory: Path) -> None:
        self.children: dict[str, ChildProcess] = {}
        """The latest child of each name."""
        self._log_directory = log_directory
        self.tag = secrets.token_hex(8)
        """Value in the environment of every descendant. A caller must set it before a library starts processes."""
        self._guard: subprocess.Popen[bytes] | None = None
        self._adopted = ProcessHandles()
        self._changed = threading.Event()
        self._stop_now = threading.Event()
        self._stopping = threading.Event()
        self._rotation: threading.Thread | None = None
        self._all: list[ChildProcess] = []
        self._reported: set[ChildProcess] = set()

    def start(self, command: Command) -> ChildProcess:
        """Start a child. It replaces a dead child of the same name and continues its log."""
        if self._stopping.is_set():
            raise Unavailable(f"{command.name} is not started: all processes are being stopped")
        if (old := self.children.get(command.name)) is not None:
            old.kill_group()
            old.reap()
        log = self._log_directory / f"{command.name}.log"
        self.start_guard()
        try:
            child = ChildProcess(command, log=log, tag=self.tag, changed=self._changed)
        except OSError as error:
            raise Unavailable(f"{command.name}: cannot start {command.argv[0]}: {error}") from None
        self.children[command.name] = child
        self._all.append(child)
        if self._rotation is None:
            self._rotation = threading.Thread(target=self._rotate_logs, name="rotate-logs", daemon=True)
            self._rotation.start()
        return child

    def start_guard(self) -> None:
        """Start the process that kills all descendants if this process is killed. `start` calls this."""
        if self._guard is None:
            argv = (sys.executable, "-m", "fourfold.host.process_tree", str(os.getpid()), self.tag)
            self._guard = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)

    def adopt(self, pids: set[int]) -> None:
        """Take over processes that a library started: `stop` and `kill` end them, too."""
        self._adopted.add(pids)

    def deaths(self) -> list[Death]:
        """Return the deaths since the last call, the first one first."""
        new = [child for child in self._all if child.death is not None and child not in self._reported]
        self._reported.update(new)
        return sorted((child.death for child in new if child.death is not None), key=lambda death: death.time)

    def is_ready(self, name: str) -> bool:
        """Return whether the latest child of this name lives and has printed its READY line."""
        child = self.children.get(name)
        return child is not None and child.alive and child.poll_ready()

    def obstacle(self, name: str) -> str:
        """Return the printed reason why the latest child of this name is not ready; empty: none is known."""
        child = self.children.get(name)
        return "" if child is None or not child.alive or child.poll_ready() else child.obstacle

    def wait_ready(self, names: Iterable[str], *, timeout_seconds: float) -> dict[str, str]:
        """Wait until each named child has printed its READY line; return the host:port of each by name.

        Raises:
            Unavailable: a child died instead; with the explanation of the first death.
            DeadlinePassed: with the names that are missing and the paths of their logs.
        """
        names = list(names)
        deadline = time.monotonic() + timeout_seconds
        while True:
            if dead := self.deaths():
                raise Unavailable(dead[0].explain())
            missing = [name for name in names if not self.children[name].poll_ready()]
            if not missing:
                return {name: self.children[name].target for name in names}
            if time.monotonic() > deadline:
                files = ", ".join(str(self.children[name].log) for name in missing)
                raise DeadlinePassed(
                    f"{', '.join(missing)} not ready after {timeout_seconds:.0f} s; see what happened in {files}"
                )
            time.sleep(_POLL_SECONDS)

    def stop(self, grace_seconds: float = STOP_GRACE_SECONDS) -> None:
        """End every child and all their descendants: SIGTERM at once, SIGKILL after the grace. Idempotent."""
        self._stopping.set()
        # While the parents live: an orphan is adopted by init, and only the tag would still identify it.
        self._adopt_descendants()
        for child in self._all:
            if child.alive:
                child.terminate()
        deadline = time.monotonic() + grace_seconds
        while any(child.alive for child in self._all) and time.monotonic() < deadline and not self._stop_now.is_set():
            self._changed.wait(_POLL_SECONDS)
            self._changed.clear()
        self._kill_all()
        for child in self._all:
            child.reap()
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait(_REAP_SECONDS)

    def kill(self) -> None:
        """SIGKILL all processes now. A `stop` that runs in another thread ends its grace."""
        self._stop_now.set()
        self._stopping.set()
        self._kill_all()

    def _rotate_logs(self) -> None:
        while not self._stopping.wait(_ROTATION_SECONDS):
            for child in list(self.children.values()):
                if child.alive:
                    child.rotate_log()

    def _adopt_descendants(self) -> None:
        self._adopted.add(descendants({child.pid for child in self._all if not child.reaped}))

    def _kill_all(self) -> None:
        self._adopt_descendants()
        for child in self._all:
            child.kill_group()
        self._adopted.kill()
        kill_tagged(self.tag)


def raise_file_limit() -> int:
    """Raise the soft limit of open files (often 1,024: as many connections use it up) to the hard one; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
