"""Who may go to the engine, and who is there: a door that an update closes, and a lease for everybody behind it.

wait_open -> lease: entering ------------------> in the engine ------------> left
             put its samples into the engine     until it is done with them
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class RequestLease:
    """Somebody's right to have samples in the engine."""

    def __init__(self, door: RequestGate, version: int, cache_salt: str) -> None:
        self._door = door
        self.version = version
        """Of the weights at its start."""
        self.cache_salt = cache_salt
        """Of these weights alone, also when their version comes again."""
        self._entering = True

    def mark_in_flight(self) -> None:
        """Know that its samples are in the engine now. Idempotent."""
        if self._entering:
            self._entering = False
            self._door.count(entering=-1)


class RequestGate:
    """Open at first. Belongs to one event loop."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._closes = True
        self._leases, self._entering = 0, 0
        self._nobody = asyncio.Event()
        self._nobody.set()
        self._all_entered = asyncio.Event()
        self._all_entered.set()

    @property
    def leases(self) -> int:
        """How many are behind it."""
        return self._leases

    def open(self) -> None:
        """Let those in who wait."""
        self._open.set()

    def close(self) -> None:
        """Let nobody in."""
        if self._closes:
            self._open.clear()

    def open_for_good(self) -> None:
        """Let nobody wait here any more."""
        self._closes = False
        self._open.set()

    async def wait_open(self, timeout: float) -> bool:
        """Wait until it is open; False: it was not in `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while not self._open.is_set():  # may be closed again before this task runs
                    await self._open.wait()
        except TimeoutError:
            return False
        return True

    async def wait_entered(self) -> None:
        """Return when all behind it have their samples in the engine, or have left."""
        await self._all_entered.wait()

    async def wait_empty(self) -> None:
        """Return when nobody is behind it."""
        await self._nobody.wait()

    @contextmanager
    def lease(self, version: int, cache_salt: str) -> Iterator[RequestLease]:
        """Be behind it. Ask right after `wait_open`, with nothing awaited in between."""
        lease = RequestLease(self, version, cache_salt)
        self.count(leases=1, entering=1)
        try:
            yield lease
        finally:
            lease.mark_in_flight()
            self.count(leases=-1)

    def count(self, *, leases: int = 0, entering: int = 0) -> None:
        """Note that somebody came, entered or left."""
        self._leases += leases
        self._entering += entering
        for number, event in ((self._leases, self._nobody), (self._entering, self._all_entered)):
            if number:
                event.clear()
            else:
                event.set()
