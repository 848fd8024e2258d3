"""Facts about this host and this process that a weight transfer depends on. No torch here."""

from __future__ import annotations

import ctypes
import hashlib
import os
import select
import signal
import socket
import threading
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def host_id() -> str:
    """Return a name that is equal for processes that can map each other's memory: host, boot, PID and IPC namespace.

    32 hexadecimal digits; a hash, so that it tells nobody anything else.
    """
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid", "/proc/self/ns/ipc"):
        parts.append(_read(Path(path)))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _read(path: Path) -> str:
    try:
        return str(path.readlink()) if path.is_symlink() else path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def die_with_parent(parent: int = 0) -> None:
    """Ask the kernel to kill this process (SIGKILL) when the thread that started it ends.

    Start children from a thread that lives as long as the process, then: the kernel looks at
    the thread. Does nothing on systems without prctl.

    Args:
        parent: pid of the process that started this one; when it is gone already, this
            process ends here. 0: not known, not checked.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent and os.getppid() != parent:
        _kill_all()


def die_with(pid: int, *also_kill: int) -> None:
    """Kill this process, and the processes `also_kill` before it, as soon as process `pid` ends.

    For a process whose parent lives on when `pid` dies. A daemon thread waits for it without
    polling. Does nothing where the kernel has no pidfd or `pid` belongs to another user.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        _kill_all(*also_kill)
        return
    except (OSError, AttributeError):
        return
    threading.Thread(target=_wait_and_kill, args=(descriptor, also_kill), name=f"die-with-{pid}", daemon=True).start()


def parent_of(pid: int) -> int:
    """Return the parent of `pid`, or 0 when it has none that this process can see."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])


def _wait_and_kill(descriptor: int, also_kill: tuple[int, ...]) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    _kill_all(*also_kill)


def _kill_all(*pids: int) -> None:
    for pid in (*pids, os.getpid()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
