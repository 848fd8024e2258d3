"""Ties the life of a process to another one, and finds and kills the descendants of a process.

A process that is killed cannot end its children. Three mechanisms make sure that none is left over:

    die_with_parent   the kernel kills a child when the parent's thread that started it ends
    die_with          a thread of the process waits for the end of any other process
    the guard         `python -m fourfold.host.process_tree PID TAG`: waits for the end of a supervisor and kills its
                      descendants, and every process with its tag in the environment. It covers processes that
                      libraries start, which call neither function above.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Final

PARENT_PID_VARIABLE: Final = "FOURFOLD_PARENT_PID"
"""Environment variable with the pid of the supervisor that started a process."""
TAGS_VARIABLE: Final = "FOURFOLD_SUPERVISORS"
"""Environment variable with the tags of all supervisors above a process, separated by commas."""
_PR_SET_PDEATHSIG: Final = 1
_GUARD_SECONDS: Final = 1.0
_TRACKER_SECONDS: Final = 1.0
_RETRY_SECONDS: Final = 0.01


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have the kernel SIGKILL this process when its parent ends; end now if the parent has ended already.

    The kernel watches the parent's *thread* that started this process, so start children from a thread that lives as
    long as the parent does. On systems without prctl the later end of the parent goes unnoticed. The default parent is
    the supervisor that started this process; without one, nothing happens.
    """
    if parent_pid is None:
        if (value := os.environ.get(PARENT_PID_VARIABLE)) is None:
            return
        parent_pid = int(value)
    if (prctl := getattr(ctypes.CDLL(None), "prctl", None)) is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before the line above, and the kernel sends no signal for that
        os.kill(os.getpid(), signal.SIGKILL)


def die_with(pid: int, *also_kill: int) -> None:
    """Kill the processes `also_kill` and then this one as soon as the process `pid`, which need not be a parent, ends.

    A daemon thread waits without polling. Nothing happens on kernels without pidfd, or if `pid` is another user's.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        _kill(*also_kill, os.getpid())
        return
    except (OSError, AttributeError):
        return

    def wait_and_kill() -> None:
        _has_ended(descriptor, None)
        _kill(*also_kill, os.getpid())

    threading.Thread(target=wait_and_kill, name=f"die-with-{pid}", daemon=True).start()


def _kill(*pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def parent_of(pid: int) -> int:
    """Return the pid of a process's parent; 0 if the process is gone or its parent is in another PID namespace."""
    try:
        # The command name before the last ")" may itself hold blanks and brackets.
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def descendants(roots: set[int]) -> set[int]:
    """Return the pids of all children, grandchildren and so on of some processes, at this moment."""
    children: dict[int, list[int]] = {}
    for pid in _all_pids():
        children.setdefault(parent_of(pid), []).append(pid)
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        new = set(children.get(waiting.pop(), ())) - found
        found |= new
        waiting += new
    return found


def _is_tracker(pid: int) -> bool:
    """Return whether a process is multiprocessing's resource tracker.

    It removes the semaphores and the shared memory that killed processes left in /dev/shm, and then ends by itself.
    """
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker import main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def kill_group(group: int) -> None:
    """SIGKILL the processes of a group that this user may kill, but for resource trackers."""
    killed: set[int] = set()
    while members := {pid for pid in _all_pids() if _group_of(pid) == group} - killed:  # they may start others
        _kill(*(pid for pid in members if not _is_tracker(pid)))
        killed |= members


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


def tag_variable(tag: str) -> dict[str, str]:
    """Return the environment variable with a tag beside the tags of this process."""
    return {TAGS_VARIABLE: ",".join(filter(None, (os.environ.get(TAGS_VARIABLE), tag)))}


def kill_tagged(tag: str) -> int:
    """SIGKILL every process with a supervisor's tag in its environment, in any session; return how many are left.

    Repeated for 1 s, because a process may start another one meanwhile. Then resource trackers are killed, too.
    """
    deadline = time.monotonic() + _TRACKER_SECONDS
    while count := _kill_tagged(tag, trackers=(late := time.monotonic() > deadline)):
        if late:
            break
        time.sleep(_RETRY_SECONDS)
    return count


def _kill_tagged(tag: str, *, trackers: bool) -> int:
    wanted = re.compile(rb"(?:^|\0)" + TAGS_VARIABLE.encode() + rb"=[^\0]*" + tag.encode())
    count = 0
    for pid in _all_pids():
        if pid == os.getpid():
            continue
        with contextlib.suppress(OSError):  # the process is gone, or another user's
            # The descriptor holds the process: its pid cannot be given to another one between the check and the kill.
            descriptor = os.pidfd_open(pid)
            try:
                if wanted.search(Path(f"/proc/{pid}/environ").read_bytes()):
                    count += 1
                    if trackers or not _is_tracker(pid):
                        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            finally:
                os.close(descriptor)
    return count


class ProcessHandles:
    """Processes held by descriptor, so that a pid that is used again is never taken for the old process."""

    def __init__(self) -> None:
        self._descriptors: dict[int, int] = {}

    def add(self, pids: set[int]) -> None:
        """Hold more processes, and release those that have ended."""
        for pid, descriptor in list(self._descriptors.items()):
            if _has_ended(descriptor, 0):
                os.close(self._descriptors.pop(pid))
        for pid in pids - self._descriptors.keys():
            with contextlib.suppress(OSError):
                self._descriptors[pid] = os.pidfd_open(pid)

    def kill(self) -> None:
        """SIGKILL all processes but resource trackers, and release all."""
        for pid, descriptor in self._descriptors.items():
            if not _is_tracker(pid):
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)
        self._descriptors.clear()


def _has_ended(descriptor: int, timeout_seconds: float | None) -> bool:
    """Wait for the end of the process behind a pidfd; without a timeout, for as long as it takes."""
    poll = select.poll()  # `select.select` takes no descriptor above 1,023
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout_seconds is None else timeout_seconds * 1000))


def guard(supervisor_pid: int, tag: str) -> None:
    """Wait for the end of a supervisor, then SIGKILL its descendants so far and all processes with its tag."""
    handles = ProcessHandles()
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(supervisor_pid)
        while not _has_ended(descriptor, _GUARD_SECONDS):
            # The tag alone is not enough: libraries that rename their processes overwrite the environment.
            handles.add(descendants({supervisor_pid}) - {os.getpid()})
    handles.kill()
    while kill_tagged(tag):
        pass


if __name__ == "__main__":
    guard(int(sys.argv[1]), sys.argv[2])
