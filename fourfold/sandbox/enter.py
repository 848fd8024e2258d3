"""Puts the calling process into a sandbox."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from pathlib import Path

from fourfold.sandbox import landlock, seccomp
from fourfold.sandbox.policy import Policy, SandboxUnavailable


def enter(policy: Policy) -> None:
    """Give up every right that the policy does not name. It cannot be undone, and children inherit it.

    Call it in the main thread of a process that was started for this, before it loads the program: what is open, or
    mapped into memory, stays so.

    Raises:
        SandboxUnavailable: `policy.required`, and this machine cannot enforce all of it. Run nothing then.
    """
    seccomp.offered()  # loads the library, which lies outside of the policy's paths on some systems
    _limit(policy)
    by_files = landlock.restrict(policy)
    by_calls = seccomp.restrict(policy)
    if policy.required and not (by_files and by_calls):
        raise SandboxUnavailable(describe_missing(by_files, by_calls))


def describe_missing(by_files: bool, by_calls: bool) -> str:
    """Return what the machine lacks and what to do about it; empty when it lacks nothing."""
    missing = []
    if not by_files:
        missing.append("no Landlock (Linux 5.13 or newer with `landlock` in /sys/kernel/security/lsm)")
    if not by_calls:
        missing.append("no seccomp filter (install libseccomp: apt install libseccomp2)")
    return " and ".join(missing)


def allow_cpu(seconds: int) -> None:
    """Let this process use so much CPU time from now on; when it is used up, the kernel ends it with SIGXCPU."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    used = int(time.process_time()) + 1
    _set(resource.RLIMIT_CPU, used + seconds, hard)


def _limit(policy: Policy) -> None:
    """Set the limits. None is raised above what this process has."""
    _set_both(resource.RLIMIT_CORE, 0)
    _set_both(resource.RLIMIT_DATA, policy.memory_bytes)
    if policy.address_bytes:
        _set_both(resource.RLIMIT_AS, policy.address_bytes)
    _set_both(resource.RLIMIT_NOFILE, policy.open_files)
    if policy.file_bytes:
        _set_both(resource.RLIMIT_FSIZE, policy.file_bytes)
    if policy.processes:
        # With 0 the filter refuses new processes, exactly. This limit counts all threads of the user.
        _set_both(resource.RLIMIT_NPROC, _threads_of_user() + policy.processes)
    allow_cpu(policy.cpu_seconds)


def _threads_of_user() -> int:
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended, or it is hidden from us
                if entry.stat().st_uid == os.getuid():
                    count += sum(1 for _ in (entry / "task").iterdir())
    return count


def _set_both(kind: int, value: int) -> None:
    _set(kind, value, value)


def _set(kind: int, soft: int, hard: int) -> None:
    _, most = resource.getrlimit(kind)
    if most != resource.RLIM_INFINITY:
        soft = min(soft, most)
        hard = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if resource.getrlimit(kind) != (soft, hard):  # in a sandbox in a sandbox the call may be refused
        resource.setrlimit(kind, (soft, hard))
