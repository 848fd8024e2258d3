"""The log of refused calls: the first of its kind at once, the others as a count per interval.

A client that is refused a thousand times a second must not fill the disk. A kind is a method, a reason and a caller.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from fourfold.errors import FourfoldError
from fourfold.host.clock import SYSTEM_CLOCK, Clock
from fourfold.host.logs import shorten
from fourfold.text import clean

log = logging.getLogger("fourfold.rpc.server")

INTERVAL_SECONDS: Final = 60.0
_MAX_KINDS: Final = 1000
_MAX_TEXT: Final = 300

_Kind = tuple[str, str, str]


@dataclass(slots=True)
class _Window:
    """Refusals of one kind since the one that was logged."""

    start: float
    count: int = 0


class RefusalLog:
    """Logs refused calls at a bounded rate and with bounded memory."""

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._windows: dict[_Kind, _Window] = {}

    def add(self, method: str, error: FourfoldError, *, caller: str, peer: str) -> None:
        """Note a refusal.

        Args:
            method: full name of the method.
            error: what the caller is told.
            caller: principal, or the address of a caller without a valid token.
            peer: address and port.
        """
        self.flush(ended_only=True)
        kind = (method, error.reason, caller)
        if kind not in self._windows and len(self._windows) >= _MAX_KINDS:
            kind = ("other methods", "other reasons", "other callers")
        window = self._windows.get(kind)
        if window is not None:
            window.count += 1
            return
        self._windows[kind] = _Window(self._clock.monotonic())
        texts = (clean(shorten(text, _MAX_TEXT)) for text in (caller, peer, error.message))
        log.warning("%s refused to %s at %r: %s", method, *texts)

    def flush(self, *, ended_only: bool = False) -> None:
        """Log the counts, of all kinds or of those whose interval is over, and forget these kinds."""
        now = self._clock.monotonic()
        for kind, window in list(self._windows.items()):
            if ended_only and now - window.start < INTERVAL_SECONDS:
                break  # they are in the order of their start
            del self._windows[kind]
            if window.count:
                method, reason, caller = kind
                log.warning(
                    "%s refused %d more times to %s in %.0f s: %s",
                    method,
                    window.count,
                    clean(shorten(caller, _MAX_TEXT)),
                    now - window.start,
                    reason,
                )
