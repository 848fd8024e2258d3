"""A word of memory that ends transfers from outside: the service raises it, the engine's workers look at it.

A worker does nothing else while it receives, so no call reaches it; this does. The word holds the
highest epoch that was given up, and only grows. It lies in a file of the service's own folder,
which the workers map. No torch here.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Final, Self

from fourfold.errors import Unavailable

_BYTES: Final = 8
_NONE: Final = -1


class StopFlag:
    """The word, mapped into this process."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._word = memoryview(memory).cast("q")

    @classmethod
    def create(cls, path: Path) -> Self:
        """Make the file; no epoch is given up yet."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, _NONE.to_bytes(_BYTES, "little", signed=True))
            return cls(mmap.mmap(descriptor, _BYTES))
        finally:
            os.close(descriptor)

    @classmethod
    def attach(cls, path: Path) -> Self:
        """Map a file that `create` made.

        Raises:
            Unavailable: it is not there: the service has ended.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise Unavailable(f"the service's stop flag is gone ({error.strerror}); has it ended?") from None
        try:
            return cls(mmap.mmap(descriptor, _BYTES))
        finally:
            os.close(descriptor)

    def give_up(self, epoch: int) -> None:
        """End transfers of `epoch` and of all before it, wherever they wait."""
        self._word[0] = max(self._word[0], epoch)

    def given_up(self, epoch: int) -> bool:
        """Whether `epoch` was given up."""
        return epoch <= self._word[0]
