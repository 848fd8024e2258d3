"""Names the set of processes that can map each other's memory. Imports no torch."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path


def host_id() -> str:
    """Return a name that is equal for processes that can map each other's memory: host, boot, PID and IPC namespace.

    32 hexadecimal digits: a hash, which reveals none of these names.
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
