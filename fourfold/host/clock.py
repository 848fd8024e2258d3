"""Provides time as a dependency, so that tests of leases, back-off and deadlines need not sleep."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """A source of time; `SystemClock`, or a fake in tests."""

    def monotonic(self) -> float:
        """Return seconds that never decrease; only differences have a meaning."""

    def now(self) -> float:
        """Return seconds since 1970, for records."""

    async def sleep(self, seconds: float) -> None:
        """Suspend the calling task, not the event loop."""


class SystemClock:
    """The clock of this machine and the event loop."""

    monotonic = staticmethod(time.monotonic)
    now = staticmethod(time.time)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


SYSTEM_CLOCK = SystemClock()


def utc_text(seconds: float) -> str:
    """Return a time in seconds since 1970 as text, such as 2026-11-23T15:25:21.042Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"
