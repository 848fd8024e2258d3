"""Runs untrusted programs (of users and models) in child processes with few rights.

    service: environment(), Policy(...)  --start-->  child: enter(policy), then the program

`enter` permanently removes rights from the calling process and from everything that it starts:

- limits (rlimits) on memory, CPU time, open files, file size and processes; no core dumps
- files by Landlock: only the policy's paths can be read or written
- network, new processes, other processes and kernel administration by seccomp

Landlock and seccomp need no privileges. `probe` starts such a child, which tries forbidden operations, and reports
which of them the kernel refused. The caller decides what to do on a machine that does not enforce everything.
"""

from __future__ import annotations

from fourfold.sandbox.enter import allow_cpu as allow_cpu
from fourfold.sandbox.enter import enter as enter
from fourfold.sandbox.policy import Policy as Policy
from fourfold.sandbox.policy import SandboxUnavailable as SandboxUnavailable
from fourfold.sandbox.policy import environment as environment
from fourfold.sandbox.policy import interpreter_paths as interpreter_paths
from fourfold.sandbox.policy import python_paths as python_paths
from fourfold.sandbox.support import SandboxSupport as SandboxSupport
from fourfold.sandbox.support import probe as probe
