"""Waits for another process until a deadline, an abort, or that process's death."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from typing import Final

from fourfold.errors import TRANSFER_ABORTED, DeadlinePassed, InvalidInput, StaleEpoch

# Seconds between two polls. Even the longest is short, because the engine samples nothing while it waits.
_FIRST_SLEEP: Final = 2e-5
_LONGEST_SLEEP: Final = 5e-4


class Deadline:
    """A point in time that waits must not pass, and a way to end them earlier."""

    def __init__(self, seconds: float, *, stopped: Callable[[], bool] | None = None) -> None:
        """Set a deadline `seconds` from now; `stopped`, called often, returns whether it was aborted from outside."""
        if not 0 < seconds < 1e9:
            raise InvalidInput(f"timeout is {seconds} s; it must be a positive number of seconds")
        self._seconds = seconds
        self._stopped = stopped
        self._end = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        return max(0.0, self._end - time.monotonic())

    @property
    def is_stopped(self) -> bool:
        return self._stopped is not None and self._stopped()

    def check(self, what: str) -> float:
        """Return the seconds left to wait for `what`; raise DeadlinePassed, or StaleEpoch after an abort."""
        if self.is_stopped:
            raise aborted()
        left = self.remaining
        if left <= 0:
            raise DeadlinePassed(f"{what} did not happen within {self._seconds:.1f} s; abort, and open a new epoch")
        return left


def wait_until(done: Callable[[], bool], deadline: Deadline, what: str) -> None:
    """Poll `done` until it returns True: it reads memory that another process or a GPU writes, and no event exists.

    Raises DeadlinePassed, StaleEpoch: see `Deadline.check`.
    """
    sleep = _FIRST_SLEEP
    while not done():
        deadline.check(what)
        time.sleep(sleep)
        sleep = min(2 * sleep, _LONGEST_SLEEP)


class ProcessWatch:
    """Shows without waiting whether a process has ended; a pidfd is immune to recycled pids."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)  # an OSError if it has ended already
        self._poll = select.poll()
        self._poll.register(self._pidfd, select.POLLIN)

    @property
    def ended(self) -> bool:
        return bool(self._poll.poll(0))

    def close(self) -> None:
        os.close(self._pidfd)


def aborted() -> StaleEpoch:
    return StaleEpoch("the weight transfer was aborted; its epoch is closed, open a new one", reason=TRANSFER_ABORTED)
