"""How long an update and its parts take. What many engines do at once counts as long as the slowest of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from fourfold import metrics as m


class Stopwatch:
    """Of one update; runs from the start."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the block as the metric `name`; of several blocks with one name the longest counts."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.longest(name, time.monotonic() - began)

    def stop(self) -> dict[str, float]:
        """Return seconds by metric: of the parts, and of the whole update."""
        return {m.PUBLISH_SECONDS: time.monotonic() - self._began, **self._seconds}

    def longest(self, name: str, seconds: float) -> None:
        """Note seconds that somebody else has measured."""
        self._seconds[name] = max(self._seconds.get(name, 0.0), seconds)
