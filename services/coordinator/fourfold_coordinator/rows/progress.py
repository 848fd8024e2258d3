"""Prints the progress of the first encoding of a source, at most every 5 s."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TextIO

_FIRST_SECONDS: Final = 1.0  # a short encoding shows nothing
_LINE_SECONDS: Final = 5.0


class EncodingProgress:
    """Rows per second and, if the number of rows is known, the share of them and the time that is left."""

    def __init__(
        self, what: str, total: int | None, out: TextIO, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin; `total` is about the number of rows of `what`, None: unknown."""
        self._what, self._total, self._out, self._clock = what, total, out, clock
        self._began = clock()
        self._next = self._began + _FIRST_SECONDS

    def show(self, rows: int) -> None:
        """Print the number of encoded rows, unless a line was printed a short time ago."""
        if (now := self._clock()) < self._next:
            return
        self._next = now + _LINE_SECONDS
        rate = rows / (now - self._began)
        text = f"encoding {self._what}: {rows:,} rows, {rate:,.0f} rows/s"
        if self._total and rows <= self._total:
            left = (self._total - rows) / rate if rate else 0.0
            text += f", {rows / self._total:.0%}, {left:,.0f} s left"
        try:
            self._out.write(f"{text}\n")
            self._out.flush()
        except OSError:  # the terminal has gone; the rows are encoded without a display
            self._next = float("inf")
