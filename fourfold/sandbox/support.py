"""Finds out which parts of a sandbox this machine enforces, with a child process that tries (`__main__`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Final

from fourfold.sandbox.enter import describe_missing
from fourfold.sandbox.policy import environment

_PROBE_SECONDS: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSupport:
    """The forbidden operations that the kernel refused to a sandboxed process."""

    files: bool = False
    """Reading a file outside of the policy's paths."""
    network: bool = False
    """Creating a socket."""
    processes: bool = False
    """Starting a process."""
    landlock_abi: int = 0
    """The kernel's Landlock ABI version; 0 without Landlock."""

    @property
    def complete(self) -> bool:
        """Whether this machine enforces every part of a policy."""
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
        command = [sys.executable, "-P", "-m", "fourfold.sandbox", outside.name]
        env = environment() | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=_PROBE_SECONDS, check=True)
            return SandboxSupport(**json.loads(done.stdout))
        except (OSError, ValueError, TypeError, subprocess.SubprocessError):
            return SandboxSupport()
