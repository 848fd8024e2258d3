"""Blocks new requests during a weight update and counts the requests in flight.

wait_open --> lease: submitting --------------> in flight -----------------> released
              samples on the way to the engine  samples inside the engine
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class RequestLease:
    """The right of one request to have samples in the engine."""

    def __init__(self, gate: RequestGate, version: int, cache_salt: str) -> None:
        self._gate = gate
        self._submitting = True
        self.version = version  # of the weights when the lease began
        self.cache_salt = cache_salt  # unique to one commit of weights, even when a version number is reused

    def mark_in_flight(self) -> None:
        """Note that the samples of the request are in the engine now. Idempotent."""
        if self._submitting:
            self._submitting = False
            self._gate.count(submitting=-1)


class RequestGate:
    """Open at first. Belongs to one event loop."""

    def __init__(self) -> None:
        self._open, self._no_leases, self._none_submitting = (asyncio.Event() for _ in range(3))
        for event in (self._open, self._no_leases, self._none_submitting):
            event.set()
        self._can_close = True
        self._leases, self._submitting = 0, 0

    @property
    def lease_count(self) -> int:
        return self._leases

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        if self._can_close:
            self._open.clear()

    def open_for_good(self) -> None:
        """Open and ignore every later `close`."""
        self._can_close = False
        self._open.set()

    async def wait_open(self, timeout: float) -> bool:
        """Wait until the gate is open; return False if it stays closed for `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while not self._open.is_set():  # the gate may close again before this task runs
                    await self._open.wait()
        except TimeoutError:
            return False
        return True

    async def wait_submitted(self) -> None:
        """Return when no request with a lease is still on its way to the engine."""
        await self._none_submitting.wait()

    async def wait_empty(self) -> None:
        await self._no_leases.wait()

    @contextmanager
    def lease(self, version: int, cache_salt: str) -> Iterator[RequestLease]:
        """Hold a lease. Call it right after `wait_open`, because the gate may close during an await in between."""
        lease = RequestLease(self, version, cache_salt)
        self.count(leases=1, submitting=1)
        try:
            yield lease
        finally:
            lease.mark_in_flight()
            self.count(leases=-1)

    def count(self, *, leases: int = 0, submitting: int = 0) -> None:
        """Add to the counts and wake the tasks that wait for zero."""
        self._leases += leases
        self._submitting += submitting
        for number, event in ((self._leases, self._no_leases), (self._submitting, self._none_submitting)):
            if number:
                event.clear()
            else:
                event.set()
