"""What a sandboxed process may do."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

# Where programs and libraries look things up. TMPDIR is set by the caller where there is a folder to write to.
_KEPT_VARIABLES: Final = re.compile(
    r"PATH|HOME|TZ|LANG|LANGUAGE|LC_[A-Z]+|LD_LIBRARY_PATH|TMPDIR|VIRTUAL_ENV|CUDA_VISIBLE_DEVICES|(OMP|MKL)_NUM_THREADS|"
    # How Python runs, and the tag by which a launcher finds the processes that it must end.
    r"PYTHON(HASHSEED|UNBUFFERED|FAULTHANDLER|UTF8|IOENCODING|WARNINGS|DONTWRITEBYTECODE)|FOURFOLD_SUPERVISORS"
)
# The dynamic linker, local time, randomness, and what libraries read to count cores.
_SYSTEM_PATHS: Final = (
    *("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime"),
    *("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"),
    *("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu"),
)


class SandboxUnavailable(Exception):
    """This machine cannot enforce a policy that must be enforced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Rights of a process. Paths are absolute, and a folder stands for everything in it. What is absent is skipped."""

    read: tuple[str, ...]
    """Paths that may be read and executed."""
    write: tuple[str, ...] = ()
    """Paths that may be read, executed, written and removed."""
    hidden: tuple[str, ...] = ()
    """Paths whose files may not be opened although they are inside `read` or `write`. Names of files stay visible. In a
    folder that holds a hidden path, files that are made later cannot be opened either. Other processes in /proc are
    always hidden."""
    network: bool = False
    """Whether sockets may be made."""
    processes: int = 0
    """New processes, threads among them, that its user may have besides those at the start. The kernel does not count
    those of root. 0: it can neither start a process nor touch another one (signals, limits, priorities); threads go."""
    memory_bytes: int
    """Most private memory of one process."""
    address_bytes: int = 0
    """Most address space, which includes shared memory; 0: no limit. CUDA and Java reserve much more than they use."""
    cpu_seconds: int
    """CPU time of all its threads until `allow_cpu` gives more."""
    open_files: int = 256
    file_bytes: int = 0
    """Largest file that it may write; 0: no limit."""
    required: bool = False
    """Whether `enter` refuses when the machine cannot enforce all of this."""

    def to_json(self) -> str:
        """Return the text that `from_json` reads; it holds no secrets and may be an argument of a command."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` returned."""
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(text).items()}
        return cls(**values)


def environment(keep: Iterable[str] = ()) -> dict[str, str]:
    """Return this process's environment without anything that a sandboxed program has no need of.

    Args:
        keep: names of further variables to pass on.
    """
    kept = frozenset(keep)
    return {name: value for name, value in os.environ.items() if name in kept or _KEPT_VARIABLES.fullmatch(name)}


def python_paths() -> tuple[str, ...]:
    """Return what a Python program reads: the system's libraries, this interpreter and its packages.

    A folder of `sys.path` that holds the working directory is left out: such a folder holds more than packages.
    """
    here = Path.cwd()
    imported = [path for path in sys.path if path and not here.is_relative_to(Path(path).resolve())]
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    own = str(Path(__file__).parents[1])
    return tuple(dict.fromkeys(filter(None, (*_SYSTEM_PATHS, sys.prefix, sys.base_prefix, *imported, *libraries, own))))
