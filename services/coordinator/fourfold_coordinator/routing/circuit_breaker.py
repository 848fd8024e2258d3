"""A circuit breaker: when a service that fails is called again, and with how much.

    closed --failure--> closed, after a rest --THRESHOLD failures in a row, or `trip`--> open
      ^                                                                                   |  ^
      |                                                     rest, twice as long each time |  | a call that fails
      |                                                                                   v  |
      '------------------------- a call that works ------------------- half-open: one call at a time

The time is an argument, so that a test needs no sleep.
"""

from __future__ import annotations

from typing import Final

from fourfold.errors import FourfoldError

THRESHOLD: Final = 3
_FIRST_REST_SECONDS: Final = 0.25
_MAX_CLOSED_SECONDS: Final = 5.0
_MAX_OPEN_SECONDS: Final = 30.0


class CircuitBreaker:
    """The breaker of one service. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self.open = False
        """Whether it failed so often that one call at a time must show that it works again."""
        self.failures = 0
        """Failures since the last call that worked; what failed together is one."""
        self.first: FourfoldError | None = None
        """The first of them."""
        self.probing = False
        """Whether the call that must show it is under way."""
        self._retry_at = 0.0

    def resting(self, now: float) -> bool:
        """Whether no call may be made now, because it failed a moment ago."""
        return now < self._retry_at

    def admits(self, now: float) -> bool:
        """Whether a call may be made now."""
        return not self.resting(now) and not self.probing

    def begin_call(self) -> bool:
        """Note that a call begins; return whether it is the one that must show that the service works again.

        That one should be small. `end` must follow it.
        """
        self.probing = self.open
        return self.probing

    def end_call(self) -> None:
        """Note that the call for which `begin` returned True is over, however it ended."""
        self.probing = False

    def record_failure(self, error: FourfoldError, now: float) -> None:
        """Note a call that failed.

        Calls that fail while it rests began before the rest: many that fail together count once. A rest that the
        service asked for counts as far as it is no longer than the longest.

        Args:
            error: of the call.
            now: the time.
        """
        if self.failures and self.resting(now):
            return
        self.first = self.first or error
        self.failures += 1
        self.open = self.open or self.failures >= THRESHOLD
        longest = _MAX_OPEN_SECONDS if self.open else _MAX_CLOSED_SECONDS
        pause = min(_FIRST_REST_SECONDS * 2.0 ** min(self.failures - 1, 20), longest)
        asked = error.retry_after
        self._retry_at = now + (pause if asked is None else min(asked, _MAX_OPEN_SECONDS))

    def trip(self, error: FourfoldError, now: float) -> None:
        """Note a failure that was so expensive that there must be no second one like it: open at once."""
        self.open = True
        self.record_failure(error, now)

    def record_success(self) -> None:
        """Note a call that worked."""
        self.open, self.failures, self.first, self._retry_at = False, 0, None, 0.0
