"""How long a run took over all its processes, and how often a part of it came back.

The facts are in the ledger, written every few seconds and after every step: a coordinator that is killed loses a few
seconds of them and no more. `restore` leaves them as they are: time spent on steps that were lost was spent.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from typing import Final

from fourfold.host.clock import SYSTEM_CLOCK, Clock
from fourfold.host.disk import is_full

from ..routing.registry import Member, MemberChange
from ..state.ledger import Ledger
from .memory import MemoryMeter

SECONDS: Final = "seconds"
PEAK_MEMORY: Final = "peak_memory_bytes"
_RESUMES: Final = "resumes"
_RESTARTS: Final = "restarts"
_PERIOD_SECONDS: Final = 5.0
# A name is counted as long as there are not more: names come from other processes.
_MAX_NAMES: Final = 1000


class Lifetime:
    """Keeps the time, peak memory, resumes and restarts of one run. Used on one event loop."""

    def __init__(self, ledger: Ledger, memory: MemoryMeter, *, clock: Clock = SYSTEM_CLOCK) -> None:
        """Go on from what the ledger has.

        Args:
            ledger: of the run.
            memory: measures this process's part of the run.
            clock: time.
        """
        self._ledger, self._memory, self._clock = ledger, memory, clock
        self._began = clock.monotonic()
        known = ledger.get(SECONDS)
        self._before = float(known or 0.0)
        self.resumes = int(ledger.get(_RESUMES) or 0) + bool(known)
        """Coordinator processes that took this run up again."""
        self.restarts: Counter[str] = Counter(json.loads(ledger.get(_RESTARTS) or "{}"))
        """Processes that took another one's place while the run went on, by member id."""
        self._incarnations: dict[str, str] = {}  # seen last, by member id

    @property
    def seconds(self) -> float:
        """Of the run so far, lost work included."""
        return self._before + self._clock.monotonic() - self._began

    def on_member(self, member: Member, change: MemberChange) -> None:
        """Count a process that comes in another one's place; a listener of the registry."""
        if change is not MemberChange.JOINED:
            return
        known = self._incarnations.get(member.member_id)
        if known is None and len(self._incarnations) >= _MAX_NAMES:
            return
        self._incarnations[member.member_id] = member.incarnation
        if known not in (None, member.incarnation):
            self.restarts[member.member_id] += 1

    def save(self) -> None:
        """Write everything to the ledger.

        Raises:
            sqlite3.Error: the disk refuses.
        """
        self._ledger.put(
            {
                SECONDS: repr(self.seconds),
                PEAK_MEMORY: str(self._memory.peak_bytes),
                _RESUMES: str(self.resumes),
                _RESTARTS: json.dumps(self.restarts),
            }
        )

    async def run(self) -> None:
        """Save every few seconds until cancelled. A full disk is left to the writes that the run needs."""
        while True:
            await self._clock.sleep(_PERIOD_SECONDS)
            try:
                self.save()
            except sqlite3.Error as error:
                if not is_full(error):
                    raise
