"""Runs programs of users and models with few rights: a child process calls `enter` before it loads such a program.

    service: environment(), Policy(...)  --start-->  child: enter(policy), then the program

`enter` takes rights away from the process that calls it, for good, and from everything that it starts:

- limits (rlimits) on memory, CPU time, open files, file size and processes; no core dumps
- files by Landlock: only the paths of the policy can be read or written
- network, new processes, other processes and the kernel's administration by seccomp

Landlock and seccomp need no privileges. `probe` starts such a child, lets it try what it must not do, and reports what
the kernel refused. The caller decides what to do where the machine does not offer everything.
"""

from __future__ import annotations

from fourfold.sandbox.enter import allow_cpu, enter
from fourfold.sandbox.policy import Policy, SandboxUnavailable, environment, python_paths
from fourfold.sandbox.support import SandboxSupport, probe

__all__ = [
    "Policy",
    "SandboxSupport",
    "SandboxUnavailable",
    "allow_cpu",
    "enter",
    "environment",
    "probe",
    "python_paths",
]
