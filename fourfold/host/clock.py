"""Time as a dependency, so that leases, back-off and deadlines are tested without sleeping."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """What code asks of time."""

    def monotonic(self) -> float:
        """Seconds that never go back; only differences mean anything."""
        ...

    def now(self) -> float:
        """Seconds since 1970, for records that people read."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """Seconds of `time.monotonic`."""
        return time.monotonic()

    def now(self) -> float:
        """Seconds of `time.time`."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Wait on the event loop."""
        await asyncio.sleep(seconds)


SYSTEM_CLOCK = SystemClock()
