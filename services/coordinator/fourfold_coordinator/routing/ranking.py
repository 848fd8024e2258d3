"""Orders the replicas of a role by the time at which each is expected to finish its work, for thousands of them.

    load changes --update--> heaps of (seconds, name) <--first-- call: a few of each heap, which scheduling.py compares
                             with room | full

A change adds an entry and makes the old one void, so that each operation takes O(log n). The changes of a replica
between two calls are applied together, because the samples of a call end one by one. The expected time of an idle
replica grows without a change, so an entry is checked when it is the first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Final

from .replica import Replica
from .scheduling import Demand

_LOOK_AT: Final = 8  # number of replicas with room, and of full ones, that are compared exactly for a call
_SIZE_WEIGHT: Final = 1 / 64  # weight of one call in the mean size
_TOLERANCE: Final = 1.1  # an entry that is too early by a smaller factor stays valid
_DRIFT: Final = 1.25  # factor of change of the mean size or speed at which all entries are made again
_VOID_SHARE: Final = 4  # entries per replica, above which the void ones are removed

_Entry = tuple[float, str, int, Replica]  # seconds, name, number


class ReplicaRanking:
    """The replicas of one role that may get calls. Times are those of one monotonic clock."""

    def __init__(self) -> None:
        self._with_room: list[_Entry] = []
        self._full: list[_Entry] = []
        self._resting: list[_Entry] = []  # ordered by the end of the rest
        self._count = 0
        self._numbers: dict[Replica, int] = {}  # number of the valid entry of each replica
        self._changed: dict[Replica, None] = {}  # replicas changed since the last `first`, in order
        self._outstanding: dict[Replica, int] = {}  # sizes at the last `first`
        self._speeds: dict[Replica, float] = {}  # known speeds at the last `first`
        self._outstanding_size, self._speed_sum = 0, 0.0
        self._mean_size = 0.0  # mean size of a call
        # The entries were made with: samples and size of a call, and the speed assumed where it is unknown.
        self._samples, self._size, self._speed = 1, 1.0, 1.0

    def update(self, replica: Replica, now: float) -> None:
        """Note a change of a replica."""
        self._changed[replica] = None
        if replica.gone:
            self._settle(now)  # release all references to the replica

    def backlog_seconds(self, queued: int, now: float) -> float:
        """Return when the replicas of known speed will have done their work and `queued` more; infinite without any."""
        self._settle(now)
        return (self._outstanding_size + queued) / self._speed_sum if self._speed_sum > 0 else math.inf

    def first(
        self, demand: Demand, fits: Callable[[Replica], bool], free: Callable[[Replica], bool], now: float
    ) -> list[Replica]:
        """Return the first compatible replicas: eight with room, or more until one is free, and eight full ones."""
        self._settle(now)
        self._mean_size += _SIZE_WEIGHT * (demand.size - self._mean_size) if self._mean_size else demand.size
        self._follow(demand.samples, now)
        while self._resting and self._resting[0][0] <= now:
            _, _, number, replica = heapq.heappop(self._resting)
            if self._numbers.get(replica) == number:
                self._push(replica, now)
        return self._take(self._with_room, fits, free, now) + self._take(self._full, fits, lambda _full: True, now)

    def _settle(self, now: float) -> None:
        """Apply the changes."""
        changed, self._changed = self._changed, {}
        for replica in changed:
            self._count_in(replica, now)
            if not replica.gone and not replica.unusable_reason:
                self._push(replica, now)
            elif self._numbers.pop(replica, None) is not None and replica.gone:
                self._remove_void()

    def _take(
        self, heap: list[_Entry], fits: Callable[[Replica], bool], enough: Callable[[Replica], bool], now: float
    ) -> list[Replica]:
        """Return the first replicas of a heap that may get the call: eight, or more until one is enough."""
        found, seen, satisfied = list[Replica](), list[_Entry](), False
        while heap and not (satisfied and len(found) >= _LOOK_AT):
            entry = heapq.heappop(heap)
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
                satisfied = satisfied or enough(replica)
        for entry in seen:
            heapq.heappush(heap, entry)
        return found

    def _push(self, replica: Replica, now: float) -> None:
        self._count += 1
        self._numbers[replica] = self._count
        heap = self._with_room if replica.has_room(self._samples) else self._full
        heapq.heappush(heap, (self._seconds(replica, now), replica.member.member_id, self._count, replica))
        if len(heap) > _VOID_SHARE * len(self._numbers) + 64:
            self._remove_void()

    def _remove_void(self) -> None:
        for heap in (self._with_room, self._full, self._resting):
            heap[:] = [entry for entry in heap if self._numbers.get(entry[3]) == entry[2]]
            heapq.heapify(heap)

    def _follow(self, samples: int, now: float) -> None:
        """Make all entries again if calls or speeds differ too much from those of the entries."""
        speed = self._speed_sum / len(self._speeds) if self._speeds else 1.0
        means = (self._mean_size, self._size), (speed, self._speed)
        if samples == self._samples and all(1 / _DRIFT < new / old < _DRIFT for new, old in means):
            return
        self._samples, self._size, self._speed = samples, self._mean_size, speed
        for heap in (self._with_room, self._full, self._resting):
            heap.clear()
        for replica in self._numbers:
            self._push(replica, now)

    def _seconds(self, replica: Replica, now: float) -> float:
        seconds = (replica.outstanding_size + self._size) / self._speeds.get(replica, self._speed)
        return max(seconds, replica.quiet(now))

    def _count_in(self, replica: Replica, now: float) -> None:
        """Add a replica to the sums over all replicas."""
        speed = None if replica.gone else replica.speed(now)
        self._speed_sum -= self._speeds.pop(replica, 0.0)
        self._outstanding_size -= self._outstanding.pop(replica, 0)
        if speed:
            self._speeds[replica] = speed
            self._speed_sum += speed
            self._outstanding[replica] = replica.outstanding_size
            self._outstanding_size += replica.outstanding_size
        elif not self._speeds:
            self._speed_sum = 0.0  # discard the rounding errors of the sum
