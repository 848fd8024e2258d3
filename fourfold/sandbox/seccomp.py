"""Refuses system calls of a process with EPERM, by seccomp; all calls that the filter does not name stay allowed."""

from __future__ import annotations

import errno
import os
import resource
from functools import cache
from types import ModuleType
from typing import Any, Final

from fourfold.sandbox.policy import Policy

# System calls by name. Always refused: these change the machine, read other processes, or bypass the rules for files
# and sockets (io_uring creates sockets and opens files without the filtered calls).
_ALWAYS: Final = """
    mount umount2 pivot_root chroot move_mount open_tree fsopen fsconfig fsmount fspick mount_setattr unshare setns
    swapon swapoff reboot kexec_load kexec_file_load acct init_module finit_module delete_module bpf perf_event_open
    quotactl syslog iopl ioperm settimeofday clock_settime clock_adjtime adjtimex sethostname setdomainname
    ptrace process_vm_readv process_vm_writev process_madvise pidfd_getfd kcmp userfaultfd
    keyctl add_key request_key open_by_handle_at io_uring_setup io_uring_enter io_uring_register
"""
# `socketpair` stays allowed: it only connects the process to itself, and event loops need it.
_NETWORK: Final = "socket"
_START: Final = "fork vfork execve execveat"
# Calls that affect other processes of the user, allocate memory that no limit counts, or bring back the user whose
# threads no limit counts.
_OTHERS: Final = """
    tkill pidfd_send_signal rt_sigqueueinfo rt_tgsigqueueinfo setpgid setsid setpriority ioprio_set
    sched_setaffinity sched_setscheduler sched_setparam sched_setattr migrate_pages move_pages
    shmget shmat semget msgget mq_open memfd_create memfd_secret
    setuid setreuid setresuid
"""
# Landlock does not cover file attributes: `chmod` could make a key file unreadable for its service, or public.
_ATTRIBUTES: Final = """
    chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utimensat truncate setxattr lsetxattr fsetxattr
    setxattrat removexattr lremovexattr fremovexattr removexattrat file_setattr
"""
# Calls that older versions of libseccomp do not know. Their numbers are the same on every architecture.
_NUMBERS: Final = {"fchmodat2": 452, "setxattrat": 463, "removexattrat": 466, "file_setattr": 469, "memfd_secret": 447}
_UNKNOWN: Final = -1
_CLONE_THREAD: Final = 0x00010000
_PR_SET_PDEATHSIG: Final = 1
_MAP_SHARED_ANONYMOUS: Final = 0x21
_MAP_KIND: Final = 0x23  # private, shared or both; anonymous


@cache
def _library() -> ModuleType | None:
    try:
        import pyseccomp
    except (ImportError, RuntimeError, OSError):  # RuntimeError: libseccomp itself is missing
        return None
    return pyseccomp  # type: ignore[no-any-return]


def offered() -> bool:
    """Return whether libseccomp is installed. Only `restrict` finds out whether the kernel accepts a filter."""
    return _library() is not None


def restrict(policy: Policy) -> bool:
    """Refuse the calls that the policy excludes, for all threads and children; return whether the filter is active."""
    library = _library()
    if library is None:
        return False
    try:
        rules = library.SyscallFilter(library.ALLOW)
        rules.set_attr(library.Attr.CTL_TSYNC, 1)  # also for threads that libraries have already started
        for name in _refused(policy):
            _refuse(library, rules, name)
        _refuse(library, rules, "prlimit64", library.Arg(0, library.NE, 0))  # limits of another process
        if not policy.processes:
            _refuse_others(library, rules)
        rules.load()
    except OSError:
        return False
    return True


def _refused(policy: Policy) -> list[str]:
    names = [_ALWAYS]
    if not policy.network:
        names.append(_NETWORK)
    if not policy.processes:
        names += [_START, _OTHERS]
    if "/" not in policy.write:
        names.append(_ATTRIBUTES)
    return " ".join(names).split()


def _refuse_others(library: ModuleType, rules: Any) -> None:
    """Refuse new processes, signals to other processes, and higher limits."""
    new_process = library.Arg(0, library.MASKED_EQ, _CLONE_THREAD, 0)
    _refuse(library, rules, "clone", new_process)
    # A filter cannot read the flags of clone3, which are in memory. With ENOSYS glibc falls back to `clone`.
    _refuse(library, rules, "clone3", code=errno.ENOSYS)
    for name in ("kill", "tgkill"):
        _refuse(library, rules, name, library.Arg(0, library.NE, os.getpid()))
    # The limit of memory counts private memory alone.
    _refuse(library, rules, "mmap", library.Arg(3, library.MASKED_EQ, _MAP_KIND, _MAP_SHARED_ANONYMOUS))
    # The process must still die with its parent, if the service asked the kernel for that.
    _refuse(library, rules, "prctl", library.Arg(0, library.EQ, _PR_SET_PDEATHSIG))
    # Root could raise its limits again. The CPU limit stays adjustable because `allow_cpu` sets it for each request.
    other_kind = library.Arg(1, library.NE, resource.RLIMIT_CPU)
    _refuse(library, rules, "prlimit64", other_kind, library.Arg(2, library.NE, 0))
    _refuse(library, rules, "setrlimit", library.Arg(0, library.NE, resource.RLIMIT_CPU))


def _refuse(library: ModuleType, rules: Any, name: str, *arguments: Any, code: int = errno.EPERM) -> None:
    number = library.resolve_syscall(library.Arch.NATIVE, name)
    if number == _UNKNOWN:
        number = _NUMBERS.get(name, _UNKNOWN)
    if number >= 0:  # negative: this architecture lacks the call
        rules.add_rule(library.ERRNO(code), number, *arguments)
