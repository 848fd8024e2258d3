"""Finds out which parts of a sandbox this machine enforces: a sandboxed child process tries forbidden operations."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from fourfold.sandbox import landlock, seccomp
from fourfold.sandbox.enter import describe_missing, enter
from fourfold.sandbox.policy import Policy, environment, python_paths

_PROBE_SECONDS: Final = 20.0
_REFUSED: Final = (errno.EPERM, errno.EACCES)
_CHILD: Final = "import sys; from fourfold.sandbox import support; support.try_operations(sys.argv[1])"


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSupport:
    """The forbidden operations that the kernel refused to a sandboxed process."""

    files: bool = False  # reading a file outside of the policy's paths
    network: bool = False  # creating a socket
    processes: bool = False  # starting a process
    landlock_abi: int = 0  # the kernel's Landlock ABI version; 0 without Landlock

    @property
    def complete(self) -> bool:
        """True if this machine enforces every part of a policy."""
        return self.files and self.network and self.processes

    def describe(self) -> str:
        """Return the enforced parts and their mechanisms on one line."""
        if self.complete:
            return f"files by Landlock (version {self.landlock_abi}), network and processes by seccomp"
        enforced = [name for name in ("files", "network", "processes") if getattr(self, name)]
        return f"in part ({', '.join(enforced) or 'limits and environment'})"

    def missing(self) -> str:
        """Return the missing kernel features with advice; empty when none is missing."""
        return describe_missing(self.files, self.network and self.processes)


def probe() -> SandboxSupport:
    """Start a sandboxed child that tries forbidden operations, and return which were refused. Takes 0.1 s."""
    with tempfile.NamedTemporaryFile() as outside:
        command = [sys.executable, "-P", "-c", _CHILD, outside.name]
        env = environment() | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=_PROBE_SECONDS, check=True)
            return SandboxSupport(**json.loads(done.stdout))
        except (OSError, ValueError, TypeError, subprocess.SubprocessError):
            return SandboxSupport()


def try_operations(outside: str) -> None:
    """Enter a sandbox, try forbidden operations, and print a SandboxSupport as JSON. Runs in the child of `probe`.

    `outside` is a readable file outside of the sandbox's paths.
    """
    abi, calls = landlock.abi(), seccomp.offered()
    enter(Policy(read=python_paths(), hidden=(outside,), memory_bytes=1 << 30, cpu_seconds=10))
    support = SandboxSupport(
        files=bool(abi) and _is_refused(Path(outside).read_bytes),
        network=calls and _is_refused(lambda: socket.socket(socket.AF_UNIX).close()),
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


def _start_process() -> None:
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
