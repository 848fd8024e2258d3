"""The shared memory in which the engine's workers leave the log-probabilities of sampled tokens for the service.

A row belongs to one running sample; cell i is for its token i. The worker writes a cell before it returns the token;
the service reads it when the token has arrived. The number of the row travels with the request (`SLOT`). No torch here.
The writer is the sampler of `patches/logprobs_v1.py` or `logprobs_v2.py`: `logprobs_open` in `worker_extension.py`
installs it.

Behind the cells is a byte for each: 1 if a grammar forbade any token. The scheduler writes it before the worker samples
the token (`patches/grammars.py`), and only for samples with a grammar.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fourfold.arrays import Float32Array
from fourfold.errors import Internal, Overloaded

SLOT: Final = "fourfold_slot"  # key of `SamplingParams.extra_args`: the number of the request's row
GRAMMAR: Final = "fourfold_grammar"  # key of `extra_args`: kind, text, prefix, and path, slots and width of the table
FIRST: Final = "fourfold_first"  # key of `SamplingParams.extra_args`: the request comes before all that wait
NO_SLOT: Final = -1
Flags = NDArray[np.uint8]
_ITEM_BYTES: Final = 4
_RETRY_SECONDS: Final = 0.5


class LogprobTable:
    """Float32 [slots, width], a row per running sample, in memory that other processes open by `path`. One thread."""

    def __init__(self, slots: int, width: int) -> None:
        """Reserve the memory; a page is allocated when it is first touched."""
        self.slots, self.width = slots, width
        # Not in /dev/shm, which is small in a container: a process that exceeds it is killed.
        self._descriptor = os.memfd_create("fourfold-logprobs")
        os.ftruncate(self._descriptor, self.byte_count)
        self._cells, self._flags = _map(self._descriptor, slots, width)
        self._free = deque(range(slots))

    @property
    def path(self) -> str:
        """The argument of `open_table`, valid in any process of this user while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def byte_count(self) -> int:
        return _byte_count(self.slots, self.width)

    def check_room(self, count: int) -> None:
        """Check that `count` rows are free. Raises Overloaded: too many samples run or are still being ended."""
        if count > self.free_count:
            raise Overloaded(
                f"{self.slots - self.free_count} samples are in the engine, those that are being ended included, and "
                f"{count} more would pass its limit of {self.slots}; try again, or another replica",
                reason="TOO_MANY_SAMPLES",
                retry_after=_RETRY_SECONDS,
            )

    def acquire(self, token_count: int, *, flags: bool = False) -> LogprobRow:
        """Take a row for a sample of at most `token_count` tokens. Raises Internal: no row is free, or it is shorter.

        `flags`: the sample has a grammar.

        A row may be taken again right after its release, although one more step of the old sample may be in progress
        with asynchronous scheduling. Steps end in the order of their start: a late value of the old sample comes before
        the new sample's value, which replaces it before its token is known.
        """
        if token_count > self.width:
            raise Internal(f"a sample of {token_count} tokens; the rows for log-probabilities have {self.width} cells")
        if not self._free:
            raise Internal(f"more than {self.slots} samples run; each needs a row for its log-probabilities")
        slot = self._free.popleft()  # reuse the row that has been free for the longest time
        self._cells[slot, :token_count] = np.nan
        if flags:
            self._flags[slot, :token_count] = 0
        return LogprobRow(self._cells[slot], self._flags[slot] if flags else None, slot, self._free)

    def close(self) -> None:
        """Close the memory to processes that have not mapped it. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class LogprobRow:
    def __init__(self, cells: Float32Array, flags: Flags | None, slot: int, free: deque[int]) -> None:
        self.slot = slot
        self._cells, self._flags, self._free = cells, flags, free
        self._taken = 0

    def take(self, count: int) -> Float32Array:
        """Return a copy of the next `count` values, float32 [count]. Raises Internal: a value is missing or NaN."""
        if self.slot == NO_SLOT:
            raise Internal("the sample has given back its row of log-probabilities")
        start, self._taken = self._taken, self._taken + count
        values = self._cells[start : self._taken].copy()
        if len(values) != count or np.isnan(values).any():
            raise Internal(
                f"the engine gave tokens {start} to {self._taken - 1} of a sample without the log-probability of each: "
                f"its worker did not write it, or the model computes NaN"
            )
        return values

    def taken_flags(self, count: int) -> bytes:
        """Return the flags of the `count` values that were taken last; empty without a grammar."""
        return b"" if self._flags is None else self._flags[self._taken - count : self._taken].tobytes()

    def release(self) -> None:
        """Free the row for another sample. Idempotent."""
        if self.slot != NO_SLOT:
            self._free.append(self.slot)
            self.slot = NO_SLOT


def open_table(path: str, slots: int, width: int) -> Float32Array:
    """Map the table of another process for writing: float32 [slots, width]. Raises OSError: it cannot be opened."""
    return _open(path, slots, width)[0]


def open_flags(path: str, slots: int, width: int) -> Flags:
    """Map the flags of another process's table for writing: uint8 [slots, width]. Raises OSError."""
    return _open(path, slots, width)[1]


def slot_of(params: Any) -> int:
    """Return the row of a request with these `SamplingParams`, or `NO_SLOT`."""
    extra = None if params is None else params.extra_args
    return int(extra.get(SLOT, NO_SLOT)) if extra else NO_SLOT


def _open(path: str, slots: int, width: int) -> tuple[Float32Array, Flags]:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return _map(descriptor, slots, width)
    finally:
        os.close(descriptor)


def _map(descriptor: int, slots: int, width: int) -> tuple[Float32Array, Flags]:
    count = slots * width
    memory = mmap.mmap(descriptor, _byte_count(slots, width))
    cells = np.frombuffer(memory, np.float32, count).reshape(slots, width)
    return cells, np.frombuffer(memory, np.uint8, count, count * _ITEM_BYTES).reshape(slots, width)


def _byte_count(slots: int, width: int) -> int:
    return slots * width * (_ITEM_BYTES + 1)
