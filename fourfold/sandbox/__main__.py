"""The child of `probe`: enters a sandbox, tries forbidden operations, and prints its SandboxSupport as JSON."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Final

from fourfold.sandbox import landlock, seccomp
from fourfold.sandbox.enter import enter
from fourfold.sandbox.policy import Policy, python_paths
from fourfold.sandbox.support import SandboxSupport

_REFUSED: Final = (errno.EPERM, errno.EACCES)


def main(outside: Path) -> None:
    """Print what a sandboxed process cannot do; `outside` is a readable file outside of the policy's paths."""
    abi, calls = landlock.abi(), seccomp.offered()
    enter(Policy(read=python_paths(), hidden=(str(outside),), memory_bytes=1 << 30, cpu_seconds=10))
    support = SandboxSupport(
        files=bool(abi) and _is_refused(outside.read_bytes),
        network=calls and _is_refused(_open_socket),
        processes=calls and _is_refused(_start_process),
        landlock_abi=abi,
    )
    sys.stdout.write(json.dumps(asdict(support)))


def _is_refused(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except OSError as error:
        return error.errno in _REFUSED
    return False


def _open_socket() -> None:
    socket.socket(socket.AF_UNIX).close()


def _start_process() -> None:
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
