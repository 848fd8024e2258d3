"""Child processes of one owner: started in their own session, watched, explained, and ended without a rest.

    Supervisor --start--> child in a session of its own, stdout and stderr to logs/<name>.log
         |                  (one thread per child notes when it died, so that the first death is known)
         |<--READY line-- the log
         '--stop--> SIGTERM to all at once, 2 s later SIGKILL to every process group and to
                    whatever else carries this supervisor's tag in its environment

When the owner itself is killed, children end too: they learn its pid from FOURFOLD_PARENT_PID and ask the kernel
for a SIGKILL at its death (`die_with_parent`), and a small guard process ends what did not ask, such as the helpers of
libraries. The kernel ties the former to the *thread* that started the child: call `start` from the main thread, or
from one that lives as long as the supervisor.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import secrets
import select
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
from fourfold.host import log_rotation
from fourfold.host.postmortem import Death, oom_kill_count, said, tail

PARENT_PID_VARIABLE: Final = "FOURFOLD_PARENT_PID"
TAGS_VARIABLE: Final = "FOURFOLD_SUPERVISORS"
STOP_GRACE_SECONDS: Final = 2.0
_POLL_SECONDS: Final = 0.05
_GUARD_SECONDS: Final = 1.0
_ROTATION_SECONDS: Final = 1.0
_PR_SET_PDEATHSIG: Final = 1
_READY: Final = re.compile(rb"^READY (\S+)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What to start."""

    name: str
    """Member id; also the name of the log."""
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's environment."""


class Child:
    """One started process. Made by `Supervisor.start`."""

    def __init__(self, command: Command, *, log: Path, tag: str, changed: threading.Event) -> None:
        self.command = command
        self.log = log
        self.started = time.monotonic()
        self.target = ""
        """What the READY line says; empty before it came."""
        self.death: Death | None = None
        self._changed = changed
        self._reading = threading.Lock()
        self._oom_kills = oom_kill_count()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = self._log_read = log.stat().st_size if log.exists() else 0
        inherited = os.environ.get(TAGS_VARIABLE, "")
        env = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",  # the last words of a dying process must reach its log
            "PYTHONFAULTHANDLER": "1",  # and so must the stack of one that crashes
            **command.env,
            PARENT_PID_VARIABLE: str(os.getpid()),
            TAGS_VARIABLE: f"{inherited},{tag}" if inherited else tag,
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
        """Whether it has not ended yet."""
        return self.death is None

    def poll_ready(self) -> bool:
        """Return whether the READY line has come."""
        with self._reading:
            if not self.target:
                with self.log.open("rb") as file:
                    file.seek(self._log_read)
                    complete = file.read().rpartition(b"\n")[0]
                if complete:
                    self._log_read += len(complete) + 1
                    if match := _READY.search(complete):
                        self.target = match.group(1).decode()
            return bool(self.target)

    def rotate_log(self) -> None:
        """Cut the log off if it is too long."""
        with self._reading:
            if log_rotation.rotate(self.log):
                self._log_start = self._log_read = 0

    def send(self, number: signal.Signals) -> None:
        """Signal the process; nothing happens when it is dead. Not reaped before `reap`, so the pid is ours."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill_group(self) -> None:
        """SIGKILL the whole process group; it may outlive its leader."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self, timeout_seconds: float) -> None:
        """Collect a process that was killed."""
        self._waiter.join(timeout_seconds)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout_seconds)

    def _wait(self) -> None:
        # WNOWAIT leaves a zombie: its pid and group id cannot be reused before `reap`.
        info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        exited = info is not None and info.si_code == os.CLD_EXITED
        status = info.si_status if info is not None else 0
        was_ready = self.poll_ready()
        self.death = Death(
            name=self.command.name,
            time=time.time(),
            exit_code=status if exited else 0,
            signal=0 if exited else status,
            oom_kills=oom_kill_count() - self._oom_kills,
            was_ready=was_ready,
            log=str(self.log),
            last_lines=tail(self.log, self._log_start),
            said=said(self.log, self.command.name, self._log_start),
        )
        self._changed.set()


class Supervisor:
    """Starts children and outlives them. All methods may be called from any thread, but see `die_with_parent`."""

    def __init__(self, log_directory: Path) -> None:
        self.children: dict[str, Child] = {}
        """The latest child of each name."""
        self._log_directory = log_directory
        self.tag = secrets.token_hex(8)
        """In the environment of every descendant; also put it there yourself before a library starts processes."""
        self._guard: subprocess.Popen[bytes] | None = None
        self._pins = _Pins()
        self._changed = threading.Event()
        self._hurry = threading.Event()
        self._stopping = False
        self._rotation: threading.Thread | None = None
        self._stopped = threading.Event()
        self._all: list[Child] = []
        self._reported: set[int] = set()

    def start(self, command: Command) -> Child:
        """Start a child; a dead one of the same name is replaced and its log goes on.

        Raises:
            Unavailable: the program cannot be started, or `stop` was called.
        """
        if self._stopping:
            raise Unavailable(f"{command.name} is not started: everything is being stopped")
        if (old := self.children.get(command.name)) is not None:
            old.kill_group()
            old.reap(1.0)
        log = self._log_directory / f"{command.name}.log"
        self.start_guard()
        try:
            child = Child(command, log=log, tag=self.tag, changed=self._changed)
        except OSError as error:
            raise Unavailable(f"{command.name}: cannot start {command.argv[0]}: {error}") from None
        self.children[command.name] = child
        self._all.append(child)
        if self._rotation is None:
            self._rotation = threading.Thread(target=self._rotate_logs, name="rotate-logs", daemon=True)
            self._rotation.start()
        return child

    def start_guard(self) -> None:
        """Start the process that ends all the others when this one is killed; `start` does it, too."""
        if self._guard is None:
            argv = (sys.executable, "-m", "fourfold.host.process", str(os.getpid()), self.tag)
            self._guard = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)

    def adopt(self, pids: set[int]) -> None:
        """Take processes that a library started; `stop` and `kill` end them, too."""
        self._pins.add(pids)

    def deaths(self) -> list[Death]:
        """Return the deaths since the last call, the first one first."""
        new = [child for child in self._all if child.death is not None and child.pid not in self._reported]
        self._reported.update(child.pid for child in new)
        return sorted((child.death for child in new if child.death is not None), key=lambda death: death.time)

    def wait_ready(self, names: Iterable[str], *, timeout_seconds: float) -> dict[str, str]:
        """Wait until each named child has printed its READY line; return their targets.

        Raises:
            Unavailable: one died instead, with its explanation.
            DeadlinePassed: with the names that are missing and where their logs are.
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
                logs = ", ".join(str(self.children[name].log) for name in missing)
                raise DeadlinePassed(
                    f"{', '.join(missing)} not ready after {timeout_seconds:.0f} s; what it is doing is in {logs}"
                )
            time.sleep(_POLL_SECONDS)

    def stop(self, grace_seconds: float = STOP_GRACE_SECONDS) -> None:
        """End every child and all their descendants: SIGTERM at once, SIGKILL after the grace. Idempotent."""
        self._stopping = True
        # While parents live: a process whose parent died cannot be told from a stranger, unless it kept our tag.
        self._pins.add(descendants({child.pid for child in self._all}))
        for child in self._all:
            if child.alive:
                child.send(signal.SIGTERM)
        self._stopped.set()
        deadline = time.monotonic() + grace_seconds
        while any(child.alive for child in self._all) and time.monotonic() < deadline and not self._hurry.is_set():
            self._changed.wait(_POLL_SECONDS)
            self._changed.clear()
        self._kill_all()
        for child in self._all:
            child.reap(1.0)
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait(1.0)

    def kill(self) -> None:
        """End everything now: a running `stop` waits no longer, or does so here."""
        self._hurry.set()
        self._stopped.set()
        self._stopping = True
        self._kill_all()

    def _rotate_logs(self) -> None:
        while not self._stopped.wait(_ROTATION_SECONDS):
            for child in list(self.children.values()):
                if child.alive:
                    child.rotate_log()

    def _kill_all(self) -> None:
        self._pins.add(descendants({child.pid for child in self._all}))
        for child in self._all:
            child.kill_group()
        self._pins.kill()
        deadline = time.monotonic() + 1.0
        # Again and again: a process may start another one while we read /proc.
        while kill_tagged(self.tag) and time.monotonic() < deadline:
            time.sleep(0.01)


def die_with_parent() -> None:
    """Ask the kernel to end this process when its supervisor dies, or end it now if that has happened already."""
    parent = os.environ.get(PARENT_PID_VARIABLE)
    if parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        os.kill(os.getpid(), signal.SIGKILL)


def raise_file_limit() -> int:
    """Allow this process as many open files as its owner may have; return how many that is.

    The usual soft limit of 1,024 is used up by as many connections.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def kill_tagged(tag: str) -> int:
    """SIGKILL every process that inherited a supervisor's tag, however it detached itself; return how many."""
    wanted = re.compile(rb"(?:^|\0)" + TAGS_VARIABLE.encode() + rb"=[^\0]*" + tag.encode())
    count = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # gone, or another user's
            # The descriptor pins the process: its pid cannot become another's between the look and the kill.
            descriptor = os.pidfd_open(int(entry.name))
            try:
                if wanted.search((entry / "environ").read_bytes()):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    count += 1
            finally:
                os.close(descriptor)
    return count


class _Pins:
    """Processes held by descriptor: a pid that is used again is never taken for the old process."""

    def __init__(self) -> None:
        self._descriptors: dict[int, int] = {}

    def add(self, pids: set[int]) -> None:
        """Hold more processes, and let go of those that ended."""
        for pid, descriptor in list(self._descriptors.items()):
            if _has_ended(descriptor):
                os.close(self._descriptors.pop(pid))
        for pid in pids - self._descriptors.keys():
            with contextlib.suppress(OSError):
                self._descriptors[pid] = os.pidfd_open(pid)

    def kill(self) -> None:
        """SIGKILL all of them, and let go."""
        for descriptor in self._descriptors.values():
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)
        self._descriptors.clear()


def _has_ended(descriptor: int, timeout_seconds: float = 0.0) -> bool:
    """Wait for the end of the process behind a pidfd. Not with `select`, which takes no descriptor above 1,023."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_seconds * 1000))


def descendants(roots: set[int]) -> set[int]:
    """Return the pids of all children, grandchildren ... of some processes, at this moment."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        for pid in children.get(waiting.pop(), []):
            if pid not in found:
                found.add(pid)
                waiting.append(pid)
    return found


def end_with(pid: int, tag: str) -> None:
    """Wait for the end of a supervisor, then SIGKILL its descendants: those seen so far, and those with its tag."""
    pins = _Pins()
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        while not _has_ended(descriptor, _GUARD_SECONDS):
            # Libraries that rename their processes wipe the tag out.
            pins.add(descendants({pid}) - {os.getpid()})
    pins.kill()
    while kill_tagged(tag):
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    end_with(int(sys.argv[1]), sys.argv[2])
