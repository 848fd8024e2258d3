"""Orders the replicas of a role by the time at which each is expected to finish its work, for thousands of them.

    load changes --update--> heap of (seconds, name) <--first-- call: the few that come first, which scheduling.py compares

A change adds an entry and makes the old one void, so that each operation takes O(log n). The expected time grows while
a replica does nothing, without a notice: entries are checked when they come first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final

from .replica import Replica

_LOOK_AT: Final = 8  # replicas that are compared exactly for a call
_SIZE_WEIGHT: Final = 1 / 64  # of a call in the mean size
_TOLERANCE: Final = 1.1  # an entry that is too early by less stays where it is
_DRIFT: Final = 1.25  # of the mean size or speed, at which all entries are made again
_VOID_SHARE: Final = 4  # entries per replica, above which the void ones are removed


class ReplicaRanking:
    """The replicas of one role that may get calls. Times are those of one monotonic clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str, int, Replica]] = []
        self._numbers: dict[Replica, int] = {}  # of the valid entry of each replica
        self._speeds: dict[Replica, float] = {}  # the known ones, as of their last entry
        self._speed_sum = 0.0
        self._resting: list[tuple[float, str, int, Replica]] = []  # (end of the rest, ...)
        self._count = 0
        self._mean_size = 0.0  # of a call
        self._size = self._speed = 1.0  # what the entries were made with: of a call, and of a replica of unknown speed

    def update(self, replica: Replica, now: float) -> None:
        """Note that something about a replica changed."""
        self._set_speed(replica, None if replica.gone else replica.speed(now))
        if replica.gone or replica.unusable_reason:
            if self._numbers.pop(replica, None) is not None and replica.gone:
                self._remove_void()  # so that nothing keeps the replica
            return
        self._push(replica, now)

    def first(
        self, size: int, fits: Callable[[Replica], bool], acceptable: Callable[[Replica], bool], now: float
    ) -> list[Replica]:
        """Return replicas that fit, beginning with the earliest: eight, or more until one of them is acceptable."""
        self._mean_size += _SIZE_WEIGHT * (size - self._mean_size) if self._mean_size else size
        self._follow_means(now)
        self._wake(now)
        found, seen, accepted = list[Replica](), list[tuple[float, str, int, Replica]](), False
        while self._heap and not (accepted and len(found) >= _LOOK_AT):
            entry = heapq.heappop(self._heap)
            replica = entry[3]
            if self._numbers.get(replica) != entry[2]:
                continue
            if replica.breaker.resting(now):
                heapq.heappush(self._resting, (replica.breaker.retry_at, *entry[1:]))
                continue
            if self._seconds(replica, now) > entry[0] * _TOLERANCE:
                self._push(replica, now)
                continue
            seen.append(entry)
            if fits(replica):
                found.append(replica)
                accepted = accepted or acceptable(replica)
        for entry in seen:
            heapq.heappush(self._heap, entry)
        return found

    def _wake(self, now: float) -> None:
        while self._resting and self._resting[0][0] <= now:
            _, _, number, replica = heapq.heappop(self._resting)
            if self._numbers.get(replica) == number:
                self._push(replica, now)

    def _push(self, replica: Replica, now: float) -> None:
        self._count += 1
        self._numbers[replica] = self._count
        heapq.heappush(self._heap, (self._seconds(replica, now), replica.member.member_id, self._count, replica))
        if len(self._heap) > _VOID_SHARE * len(self._numbers) + 64:
            self._remove_void()

    def _remove_void(self) -> None:
        for name in ("_heap", "_resting"):
            entries = [entry for entry in getattr(self, name) if self._numbers.get(entry[3]) == entry[2]]
            heapq.heapify(entries)
            setattr(self, name, entries)

    def _follow_means(self, now: float) -> None:
        speed = self._speed_sum / len(self._speeds) if self._speeds else 1.0
        if all(1 / _DRIFT < new / old < _DRIFT for new, old in ((self._mean_size, self._size), (speed, self._speed))):
            return
        self._size, self._speed = self._mean_size, speed
        self._heap = []
        for replica in self._numbers:
            self._push(replica, now)

    def _seconds(self, replica: Replica, now: float) -> float:
        seconds = (replica.outstanding_size + self._size) / self._speeds.get(replica, self._speed)
        return max(seconds, replica.quiet(now))

    def _set_speed(self, replica: Replica, speed: float | None) -> None:
        self._speed_sum -= self._speeds.pop(replica, 0.0)
        if speed:
            self._speeds[replica] = speed
            self._speed_sum += speed
        elif not self._speeds:
            self._speed_sum = 0.0  # rounding errors of the sum end here
