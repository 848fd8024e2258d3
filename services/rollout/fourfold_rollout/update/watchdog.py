"""Calls again and again until it is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Watchdog:
    """Belongs to one event loop. What it calls may fail to help, so that once is not enough."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def start(self, seconds: float, bark: Callable[[], None]) -> None:
        """Call `bark` after each `seconds` seconds, from now on."""

        def run() -> None:
            self._timer = loop.call_later(seconds, run)
            bark()

        self.stop()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, run)

    def stop(self) -> None:
        """Call no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
