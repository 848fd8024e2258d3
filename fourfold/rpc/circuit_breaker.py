"""Decides when a service that fails is called again, and with how much work: a circuit breaker.

    closed --failure--> closed, after a rest --THRESHOLD failures in a row, or `trip`--> open
      ^                                                                                   |  ^
      |                                                     rest, twice as long each time |  | a call that fails
      |                                                                                   v  |
      '------------------------- a call that succeeds ------------ half-open: one call at a time

The time is an argument, so that tests need no sleep. A ready-made breaker would not do: none of them counts calls that
fail together as one, or takes the rest that an overloaded service asks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from fourfold.errors import FourfoldError

THRESHOLD: Final = 3
_FIRST_REST_SECONDS: Final = 0.25
_MAX_CLOSED_SECONDS: Final = 5.0
_MAX_OPEN_SECONDS: Final = 30.0


class CircuitBreaker:
    """The breaker of one service. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self.open = False  # one call at a time must show that the service works again
        self.failures = 0  # since the last success; calls that failed together count once
        self.first: FourfoldError | None = None  # of these failures
        self.probing = False  # whether the call that probes it is in flight
        self.retry_at = 0.0  # end of the rest

    def resting(self, now: float) -> bool:
        """Return whether the service failed so recently that it gets no call."""
        return now < self.retry_at

    def admits(self, now: float) -> bool:
        """Return whether the service may get a call now."""
        return not self.resting(now) and not self.probing

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Count a call within the block. If the breaker is open, the call is the probe and should be small."""
        probe = self.probing = self.open
        try:
            yield
        finally:
            if probe:
                self.probing = False

    def record_failure(self, error: FourfoldError, now: float) -> None:
        """Count a failed call and start a rest; the error's `retry_after` sets the rest, up to the longest one."""
        if self.failures and self.resting(now):
            return  # the call began before the rest: calls that fail together count once
        self.first = self.first or error
        self.failures += 1
        self.open = self.open or self.failures >= THRESHOLD
        longest = _MAX_OPEN_SECONDS if self.open else _MAX_CLOSED_SECONDS
        rest = min(_FIRST_REST_SECONDS * 2.0 ** min(self.failures - 1, 20), longest)  # 2.0**1024 would overflow
        self.retry_at = now + (rest if error.retry_after is None else min(error.retry_after, _MAX_OPEN_SECONDS))

    def trip(self, error: FourfoldError, now: float) -> None:
        """Open at once, after a failure that is too expensive to repeat, such as a hang."""
        self.open = True
        self.record_failure(error, now)

    def record_success(self) -> None:
        """Close the breaker; a probe in flight stays one until it ends."""
        self.open, self.failures, self.first, self.retry_at = False, 0, None, 0.0
