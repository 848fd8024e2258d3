"""The rights, the environment and the Python paths of a sandboxed process."""

from __future__ import annotations

import json
import os
import re
import site
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

# Variables that tell programs and libraries where to find things. The caller sets TMPDIR if a folder is writable.
_KEPT_VARIABLES: Final = re.compile(
    r"PATH|HOME|TZ|LANG|LANGUAGE|LC_[A-Z]+|LD_LIBRARY_PATH|TMPDIR|VIRTUAL_ENV|CUDA_VISIBLE_DEVICES|(OMP|MKL)_NUM_THREADS|"
    # How Python runs, and the tag by which a launcher finds the processes that it must terminate.
    r"PYTHON(HASHSEED|UNBUFFERED|FAULTHANDLER|UTF8|IOENCODING|WARNINGS|DONTWRITEBYTECODE)|FOURFOLD_SUPERVISORS"
)
# The dynamic linker, local time, randomness, and the files from which libraries count cores.
_SYSTEM_PATHS: Final = (
    *("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime"),
    *("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"),
    *("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu"),
)


MAX_THREADS: Final = 256
"""Threads of a process that may start no process."""


class SandboxUnavailable(Exception):
    """This machine cannot enforce a policy with `required`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Rights of a process. Paths are absolute; a folder includes everything in it; missing paths are skipped."""

    read: tuple[str, ...]
    """Paths that may be read and executed."""
    write: tuple[str, ...] = ()
    """Paths that may be read, executed, written and removed."""
    hidden: tuple[str, ...] = ()
    """Paths inside `read` or `write` whose files may not be opened. File names stay visible. New files in a folder that
    contains a hidden path cannot be opened either. Other processes in /proc are always hidden."""
    network: bool = False
    """Allow the process to create sockets."""
    processes: int = 0
    """New processes and threads that the user may have besides those at the start; the kernel does not count those of
    root. With 0 the process can start no process and at most MAX_THREADS threads, has no shared memory, and cannot
    signal or otherwise affect other processes."""
    memory_bytes: int
    """Private memory of one process."""
    address_bytes: int = 0
    """Address space, which includes shared memory; 0: no limit. CUDA and Java reserve much more than they use."""
    cpu_seconds: int
    """CPU time of all threads until `allow_cpu` grants more."""
    open_files: int = 256
    file_bytes: int = 0
    """Size of a written file; 0: no limit."""
    required: bool = False
    """Let `enter` fail when the machine cannot enforce all of this policy."""

    def to_json(self) -> str:
        """Return the policy as JSON. It contains no secrets and may be a command-line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the result of `to_json`."""
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(text).items()}
        return cls(**values)


def environment(keep: Iterable[str] = ()) -> dict[str, str]:
    """Return the environment variables of this process that a sandboxed program may see, and those named in `keep`."""
    kept = frozenset(keep)
    return {name: value for name, value in os.environ.items() if name in kept or _KEPT_VARIABLES.fullmatch(name)}


def interpreter_paths() -> tuple[str, ...]:
    """Return the paths that a program of a model reads: system libraries, this interpreter and installed packages.

    The folders of PYTHONPATH and of a source checkout are not among them.
    """
    return _with_interpreter([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])


def python_paths() -> tuple[str, ...]:
    """Return the paths that a Python program reads: system libraries, this interpreter and its packages.

    An entry of `sys.path` that contains the working directory is left out, because it contains more than packages.
    """
    here = Path.cwd()
    imported = [path for path in sys.path if path and not here.is_relative_to(Path(path).resolve())]
    return _with_interpreter([*imported, str(Path(__file__).parents[1])])


def _with_interpreter(packages: Iterable[str]) -> tuple[str, ...]:
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    return tuple(dict.fromkeys(filter(None, (*_SYSTEM_PATHS, sys.prefix, sys.base_prefix, *packages, *libraries))))
