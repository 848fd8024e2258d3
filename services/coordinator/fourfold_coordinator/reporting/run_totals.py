"""How long a run took over all its processes, and how often a part of it came back.

The facts are in the ledger, written every few seconds and after every step: a coordinator that is killed loses a few
seconds of them and no more. `restore` leaves them as they are: time spent on steps that were lost was spent.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import psutil

from fourfold.host.clock import SYSTEM_CLOCK, Clock
from fourfold.host.disk import is_full
from fourfold.host.process_tree import PARENT_PID_VARIABLE, descendants
from fourfold.rpc.channel import split_target

from ..routing.registry import Member, MemberChange
from ..state.ledger import Ledger

SECONDS: Final = "seconds"
PEAK_MEMORY: Final = "peak_memory_bytes"
_RESUMES: Final = "resumes"
_RESTARTS: Final = "restarts"
_PERIOD_SECONDS: Final = 5.0
# A name is counted as long as there are not more: names come from other processes.
_MAX_NAMES: Final = 1000
_MEMORY_PERIOD_SECONDS: Final = 2.0


class RunTotals:
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


class MemoryMeter:
    """Remembers the largest sum that it saw."""

    def __init__(
        self,
        *,
        peak_bytes: int = 0,
        members: Callable[[], Sequence[Member]] = tuple,
        pss: Callable[[int], int] | None = None,
    ) -> None:
        """Start with the peak of earlier lives of the run.

        Args:
            peak_bytes: largest sum so far.
            members: of the run, now; called on the event loop.
            pss: bytes of a process; default: `pss_bytes`.
        """
        self.peak_bytes = peak_bytes
        self._members = members
        self._pss = pss or pss_bytes
        launcher = os.environ.get(PARENT_PID_VARIABLE, "")
        self._root = int(launcher) if launcher.isdecimal() else os.getpid()
        self._turn = asyncio.Lock()
        self._pids: dict[Member, int] = {}
        """Of the members; 0: it is not on this machine, or not ours to look into."""
        self._seen: dict[str, bool] = {}  # by member_id, whether it was counted

    @property
    def uncounted(self) -> list[str]:
        """Names of the members whose memory is in no sum."""
        return sorted(name for name, counted in self._seen.items() if not counted)

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(_MEMORY_PERIOD_SECONDS)

    async def look(self) -> None:
        """Sample once, besides: a run may be over before the next time."""
        async with self._turn:
            self.peak_bytes = max(self.peak_bytes, await asyncio.to_thread(self.sample, self._members()))

    def sample(self, members: Sequence[Member] = ()) -> int:
        """Return the sum now, in bytes."""
        self._find(members)
        roots = {self._root, *self._pids.values()} - {0}
        return sum(self._pss(pid) for pid in roots | descendants(roots))

    def _find(self, members: Sequence[Member]) -> None:
        """Look up the processes of new members, and forget those that are gone: their pids may be another's soon."""
        self._pids = {member: self._pids[member] for member in members if member in self._pids}
        new = [member for member in members if member not in self._pids]
        listening = listeners() if new else {}
        for member in new:
            host, port = split_target(member.target)
            self._pids[member] = listening.get(port, 0) if host in own_hosts() else 0
            self._seen[member.member_id] = self._pids[member] > 0 or self._seen.get(member.member_id, False)


def listeners() -> dict[int, int]:
    """Return the process that listens on a port, by port, of those that we may look into."""
    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):  # a measurement never ends the run
        return {}
    return {c.laddr.port: c.pid for c in connections if c.laddr and c.pid and c.status == psutil.CONN_LISTEN}


def own_hosts() -> set[str]:
    """Return the names and addresses under which this machine is dialled."""
    addresses = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    return {"localhost", socket.gethostname(), *addresses}


def pss_bytes(pid: int) -> int:
    """Return the PSS of a process; 0 when it is gone or not ours to read."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
