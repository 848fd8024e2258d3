"""Values that are read from files and follow them: a certificate that was renewed, a token that was removed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from fourfold.errors import ConfigError

log = logging.getLogger("fourfold.security.access")

T = TypeVar("T")


class Watched(Generic[T]):
    """The content of some files, read again when one of them changes. From any thread.

    Looking costs one `stat` per file. A change that cannot be read is logged once and the previous
    content stays: a mistake in a file must not end a run.
    """

    def __init__(self, paths: Sequence[Path], read: Callable[[], T]) -> None:
        """Read for the first time.

        Args:
            paths: the files; one that is missing may appear later.
            read: returns their content, or raises ConfigError.

        Raises:
            ConfigError: what `read` raises.
        """
        self._paths: Final = tuple(paths)
        self._read = read
        self._lock = threading.Lock()
        self._stamp = self._look()  # before reading: a change in between is found the next time
        self._value = read()

    def get(self) -> T:
        """Return the present content."""
        stamp = self._look()
        if stamp != self._stamp:
            with self._lock:
                if stamp != self._stamp:
                    try:
                        self._value = self._read()
                    except (ConfigError, OSError) as error:
                        log.error("a changed file is not used, what was read before it stays in force: %s", error)
                    self._stamp = stamp
        return self._value

    def _look(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
