"""The signals that a fault test sends to a process."""

from __future__ import annotations

import os
import signal
from contextlib import suppress


def stop(pid: int) -> None:
    """SIGSTOP: it stops answering without dying."""
    os.kill(pid, signal.SIGSTOP)


def go_on(pid: int) -> None:
    """SIGCONT, unless it ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def terminate(pid: int) -> None:
    """SIGTERM."""
    os.kill(pid, signal.SIGTERM)


def kill(pid: int) -> None:
    """kill -9."""
    os.kill(pid, signal.SIGKILL)
