"""Restricts the files that a process may open, by Landlock."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import py_landlock as landlock
from py_landlock.abi import get_supported_fs, get_supported_net, get_supported_scope
from py_landlock.prctl import set_no_new_privs

from fourfold.sandbox.policy import Policy

_READ: Final = landlock.AccessFs.READ_FILE | landlock.AccessFs.READ_DIR | landlock.AccessFs.EXECUTE
_LIST: Final = landlock.AccessFs.READ_DIR
# The rights that a rule of a single file may have; the kernel rejects rights of folders in it.
_FILE_RIGHTS: Final = (
    landlock.AccessFs.READ_FILE
    | landlock.AccessFs.WRITE_FILE
    | landlock.AccessFs.EXECUTE
    | landlock.AccessFs.TRUNCATE
    | landlock.AccessFs.IOCTL_DEV
)


def abi() -> int:
    """Return the kernel's Landlock ABI version; 0 without Landlock."""
    try:
        return landlock.get_abi_version()
    except landlock.LandlockError:
        return 0


def restrict(policy: Policy) -> bool:
    """Restrict this thread and its children to the policy's paths; return False when the kernel has no Landlock."""
    version = landlock.ABIVersion(abi())
    if version < 1:
        return False
    handled = get_supported_fs(version)
    attributes = landlock.RulesetAttr()
    attributes.handled_access_fs = handled
    attributes.handled_access_net = 0 if policy.network else get_supported_net(version)
    attributes.scoped = get_supported_scope(version)  # no signals to, and no abstract sockets of, processes outside
    rules = landlock.create_ruleset(attributes)
    try:
        for path, access in _rules(policy):
            _allow(rules, path, access & handled)
        set_no_new_privs()
        landlock.restrict_self(rules, None)
    finally:
        os.close(rules)
    return True


def _rules(policy: Policy) -> Iterator[tuple[str, landlock.AccessFs]]:
    hidden = [*map(os.path.realpath, policy.hidden), *_other_processes()]
    everything = get_supported_fs(landlock.ABIVersion(abi()))
    for paths, access in ((policy.read, _READ), (policy.write, everything)):
        for path, whole in visible(map(os.path.realpath, paths), hidden):
            yield path, access if whole else _LIST


def _other_processes() -> Iterator[str]:
    """Yield the /proc folders of other processes: since Linux 6.15 Landlock does not stop root from reading them."""
    with contextlib.suppress(OSError):  # an outer sandbox hides /proc
        for entry in os.scandir("/proc"):
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                yield entry.path


def visible(paths: Iterable[str], hidden: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield paths that together contain everything in `paths` except `hidden`; all paths are absolute and resolved.

    Landlock rules only grant rights, so a folder with a hidden path is replaced by its other entries.

    Yields:
        (path, True), or (path, False) for a folder that contains a hidden path; its other entries follow.
    """
    for path in paths:
        folder = path.rstrip("/") + "/"
        if any(folder.startswith(secret.rstrip("/") + "/") for secret in hidden):
            continue
        inside = [secret for secret in hidden if secret.startswith(folder)]
        yield path, not inside
        if inside:
            with contextlib.suppress(OSError):
                # Symbolic links are skipped: a rule applies to the target, which may contain a hidden path.
                entries = [entry.path for entry in os.scandir(path) if not entry.is_symlink()]
                yield from visible(entries, inside)


def _allow(rules: landlock.RulesetFd, path: str, access: landlock.AccessFs) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # the path does not exist, or no longer
    try:
        rule = landlock.PathBeneathAttr()
        rule.parent_fd = descriptor
        rule.allowed_access = access if stat.S_ISDIR(os.fstat(descriptor).st_mode) else access & _FILE_RIGHTS
        if rule.allowed_access:  # the kernel refuses a rule without rights
            landlock.add_rule(rules, rule)
    finally:
        os.close(descriptor)
