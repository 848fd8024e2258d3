"""What this machine enforces, found by trying it in a child process (see `__main__`)."""

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
    """What the kernel refused to a sandboxed process that tried it."""

    files: bool = False
    """Reading a file outside of the policy's paths."""
    network: bool = False
    """Making a socket."""
    processes: bool = False
    """Starting a process."""
    landlock_abi: int = 0
    """The kernel's Landlock version; 0: it has none."""

    @property
    def complete(self) -> bool:
        """Whether a policy is enforced as a whole."""
        return self.files and self.network and self.processes

    def describe(self) -> str:
        """Return one line: what is enforced, and by which means."""
        if self.complete:
            return f"files by Landlock (version {self.landlock_abi}), network and processes by seccomp"
        enforced = [name for name in ("files", "network", "processes") if getattr(self, name)]
        return f"in part ({', '.join(enforced) or 'limits and environment'})"

    def missing(self) -> str:
        """Return what the machine lacks and what to do about it; empty when it lacks nothing."""
        return describe_missing(self.files, self.network and self.processes)


def probe() -> SandboxSupport:
    """Start a sandboxed child, let it try what it must not do, and return what was refused; takes 0.1 s."""
    with tempfile.NamedTemporaryFile() as outside:
        command = [sys.executable, "-P", "-m", "fourfold.sandbox", outside.name]
        env = environment() | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=_PROBE_SECONDS, check=True)
            return SandboxSupport(**json.loads(done.stdout))
        except (OSError, ValueError, TypeError, subprocess.SubprocessError):
            return SandboxSupport()
