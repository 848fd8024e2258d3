"""Puts the calling process into a sandbox: rlimits, then Landlock, then seccomp."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import threading
import time
from pathlib import Path
from typing import Final

from fourfold.sandbox import landlock, seccomp
from fourfold.sandbox.policy import MAX_THREADS, Policy, SandboxUnavailable

_FIRST_USER: Final = 1 << 30  # above those of people, services and containers
_CAPABILITY_VERSION: Final = 0x20080522
_PR_SET_SECUREBITS: Final = 28
_NO_SETUID_FIXUP: Final = 1 << 2
_CAP_SYS_ADMIN: Final = 21
_CAP_SYS_RESOURCE: Final = 24


def enter(policy: Policy) -> None:
    """Give up every right that the policy does not grant. This is permanent, and child processes inherit it.

    Call it in the main thread of a new process, before it loads the untrusted program. Open files and memory maps are
    not affected.

    Raises:
        SandboxUnavailable: `policy.required`, and this machine cannot enforce all of it. Then run nothing.
    """
    seccomp.offered()  # loads libseccomp now: on some systems it is outside of the policy's paths
    _limit(policy)
    by_files = landlock.restrict(policy)
    by_calls = seccomp.restrict(policy)
    if policy.required and not (by_files and by_calls):
        raise SandboxUnavailable(describe_missing(by_files, by_calls))


def describe_missing(by_files: bool, by_calls: bool) -> str:
    """Return the missing kernel features with advice; empty when none is missing."""
    missing = []
    if not by_files:
        missing.append("no Landlock (Linux 5.13 or newer with `landlock` in /sys/kernel/security/lsm)")
    if not by_calls:
        missing.append("no seccomp filter (install libseccomp: apt install libseccomp2)")
    return " and ".join(missing)


def allow_cpu(seconds: int) -> None:
    """Allow this process `seconds` more of CPU time; afterwards the kernel ends it with SIGXCPU."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    used = int(time.process_time()) + 1
    _set(resource.RLIMIT_CPU, used + seconds, hard)


def _limit(policy: Policy) -> None:
    """Set the rlimits of the policy, none above the present one."""
    _set(resource.RLIMIT_CORE, 0)
    _set(resource.RLIMIT_DATA, policy.memory_bytes)
    if policy.address_bytes:
        _set(resource.RLIMIT_AS, policy.address_bytes)
    _set(resource.RLIMIT_NOFILE, policy.open_files)
    if policy.file_bytes:
        _set(resource.RLIMIT_FSIZE, policy.file_bytes)
    if policy.processes:
        # RLIMIT_NPROC counts all threads of the user, so it is imprecise. For 0 the seccomp filter is exact.
        _set(resource.RLIMIT_NPROC, _threads_of_user() + policy.processes)
    else:
        _limit_threads()
    allow_cpu(policy.cpu_seconds)


def _limit_threads() -> None:
    """Limit the threads of this process, which starts no process, to MAX_THREADS besides those of its user.

    The kernel counts by real user, and never those of root. So a process of root becomes one with a real user of its
    own, without the capabilities that lift the limit; its effective user and its rights on files stay the same.
    """
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):  # a container without so many users: its root is no root for the kernel
            # access(2) asks for the rights of the real user, and drops the capabilities of one that is not root.
            ctypes.CDLL(None).prctl(_PR_SET_SECUREBITS, _NO_SETUID_FIXUP, 0, 0, 0)
            os.setresuid(_FIRST_USER + os.getpid(), -1, -1)
            _drop_capabilities()
            return _set(resource.RLIMIT_NPROC, threading.active_count() + MAX_THREADS)
    with contextlib.suppress(PermissionError):  # an outer sandbox hides /proc, and has a limit
        _set(resource.RLIMIT_NPROC, _threads_of_user() + MAX_THREADS)


def _drop_capabilities() -> None:
    """Give up CAP_SYS_ADMIN and CAP_SYS_RESOURCE, for good: the process cannot execute a program."""
    library = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable: numbers 0 to 31, then the others
    if library.capget(header, sets):
        raise OSError(ctypes.get_errno(), "capget")
    for index in range(3):
        sets[index] &= ~(1 << _CAP_SYS_ADMIN | 1 << _CAP_SYS_RESOURCE) & 0xFFFFFFFF
    if library.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset")


def _threads_of_user() -> int:
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # the process ended, or /proc hides it
                if entry.stat().st_uid == os.getuid():
                    count += sum(1 for _ in (entry / "task").iterdir())
    return count


def _set(kind: int, soft: int, hard: int | None = None) -> None:
    hard = soft if hard is None else hard
    _, most = resource.getrlimit(kind)
    if most != resource.RLIM_INFINITY:
        soft = min(soft, most)
        hard = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if resource.getrlimit(kind) != (soft, hard):  # inside another sandbox the call may be refused
        resource.setrlimit(kind, (soft, hard))
