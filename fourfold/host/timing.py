"""Accumulates durations: a histogram of their lengths, and the time spent in each phase."""

from __future__ import annotations

import threading
from bisect import bisect_left
from enum import Enum
from typing import Final, Generic, TypeVar

from fourfold.host.clock import SYSTEM_CLOCK, Clock

BUCKETS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper limits of the buckets of a histogram in seconds; the last bucket has no limit."""

PhaseT = TypeVar("PhaseT", bound=Enum)


class Histogram:
    """Counts durations by length. Use it from one thread."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)  # a limit belongs to the bucket below it
        self.sum = 0.0  # seconds

    def add(self, seconds: float, count: int = 1) -> None:
        """Add `count` durations of `seconds` each."""
        self.counts[bisect_left(BUCKETS, seconds)] += count
        self.sum += seconds * count


class PhaseSeconds(Generic[PhaseT]):
    """Adds up the time in each phase of something that is in one phase at any time. Thread-safe."""

    def __init__(self, phase: PhaseT, *, clock: Clock = SYSTEM_CLOCK) -> None:
        """Begin in `phase`."""
        self._clock, self._lock = clock, threading.Lock()
        self._phase, self._since = phase, clock.monotonic()
        self._totals = dict.fromkeys(type(phase), 0.0)

    def enter(self, phase: PhaseT) -> None:
        with self._lock:
            now = self._clock.monotonic()
            self._totals[self._phase] += now - self._since
            self._phase, self._since = phase, now

    def totals(self) -> dict[PhaseT, float]:
        """Return the seconds in every phase so far, with the present one."""
        with self._lock:
            elapsed = self._clock.monotonic() - self._since
            return {phase: total + elapsed * (phase is self._phase) for phase, total in self._totals.items()}
