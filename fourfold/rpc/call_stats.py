"""Counts the calls of a process by method and status, for the metrics endpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from fourfold.host.clock import SYSTEM_CLOCK, Clock
from fourfold.host.timing import Histogram

# Some reasons come from peers of the service. The memory must stay bounded.
_MAX_REASONS: Final = 64
OTHER: Final = "OTHER"


@dataclass(slots=True)
class CallRecord:
    """One call in flight; `code` is the gRPC status with which it ends, unless the block sets another one."""

    code: str = "OK"


class CallStats:
    """The calls that reached a handler. Methods are those of the servicers, so that callers cannot add names.

    Use it from one event loop.
    """

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self.ended: Counter[tuple[str, str]] = Counter()  # by method and code
        self.in_flight: Counter[str] = Counter()
        self.seconds: dict[str, Histogram] = {}
        self.refused: Counter[str] = Counter()  # by reason

    @contextmanager
    def call(self, method: str) -> Iterator[CallRecord]:
        """Count a call to a method, given as "package.Service/Method", while the block runs."""
        record = CallRecord()
        began = self._clock.monotonic()
        self.in_flight[method] += 1
        try:
            yield record
        finally:
            self.in_flight[method] -= 1
            self.ended[method, record.code] += 1
            self.seconds.setdefault(method, Histogram()).add(self._clock.monotonic() - began)

    def refuse(self, reason: str) -> None:
        """Count a call that was refused: its caller is not known, not permitted, or over a limit."""
        known = reason in self.refused or len(self.refused) < _MAX_REASONS
        self.refused[reason if known else OTHER] += 1
