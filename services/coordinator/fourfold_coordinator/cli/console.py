"""Prints the events of a run, like `fourfold run`, on the terminal of a coordinator that a user started.

The terminal shows only warnings of the log; the log file in the folder of the run has all lines. Lines about waits are
in the log file, too, with and without a terminal.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Final, TextIO

from fourfold.host.clock import SYSTEM_CLOCK, Clock
from fourfold.text import printable

from ..state.run_board import RunBoard
from .event_lines import EventLines

log = logging.getLogger("fourfold.coordinator")

_PERIOD_SECONDS: Final = 0.5


class RunConsole:
    """Prints the lines of one run."""

    def __init__(self, board: RunBoard, *, out: TextIO | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        """Print what changes on `board` to `out`, a terminal; None: there is none."""
        self._board, self._out, self._clock = board, out, clock
        self._events = EventLines(clock.monotonic(), epoch_seconds=clock.now)

    async def run(self) -> None:
        """Print new lines until cancelled, the last ones then."""
        try:
            while True:
                self.show()
                await self._clock.sleep(_PERIOD_SECONDS)
        finally:
            self.show()

    def show(self) -> None:
        """Print the lines of what changed since the last call."""
        status, now = self._board.status, self._clock.monotonic()
        lines = list(self._events.waits(status, now))
        for line in lines:
            log.info("%s", line)
        if self._out is None:  # writing the other lines would block the event loop of the run
            return
        services = [(member.member_id, "ready") for member in status.members]
        lines += self._events.new(status, services, (), now)
        with suppress(OSError, ValueError):  # the terminal is gone, and the run goes on
            for line in "\n".join(lines).splitlines():
                self._out.write(printable(line) + "\n")
            self._out.flush()
