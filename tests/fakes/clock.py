"""A clock that moves when a test says so."""

from __future__ import annotations

import asyncio


class FakeClock:
    """Implements `fourfold.host.clock.Clock`; sleepers wake in order when `advance` passes their time."""

    def __init__(self, start: float = 1_000.0) -> None:
        self._time = start
        self._sleepers: list[tuple[float, asyncio.Event]] = []
        self.slept: list[float] = []
        """Every wait that was asked for, in order."""

    def monotonic(self) -> float:
        """The fake time."""
        return self._time

    def now(self) -> float:
        """The fake time."""
        return self._time

    async def sleep(self, seconds: float) -> None:
        """Wait until `advance` has passed."""
        self.slept.append(seconds)
        event = asyncio.Event()
        self._sleepers.append((self._time + seconds, event))
        await event.wait()

    async def advance(self, seconds: float) -> None:
        """Move time on, and let everything that wakes run until it waits again."""
        self._time += seconds
        due = sorted((s for s in self._sleepers if s[0] <= self._time), key=lambda s: s[0])
        self._sleepers = [s for s in self._sleepers if s[0] > self._time]
        for _, event in due:
            event.set()
        for _ in range(20):
            await asyncio.sleep(0)
