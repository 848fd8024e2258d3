"""Totals of a run over all its processes: duration, peak memory, resumes, restarts and recoveries.

The ledger stores the totals every few seconds and after every step, so a killed coordinator loses a few seconds of
them. A restored checkpoint does not reset them, because lost steps took time, too.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from fourfold.host.clock import SYSTEM_CLOCK, Clock
from fourfold.host.disk import is_full
from fourfold.host.process_tree import PARENT_PID_VARIABLE, descendants
from fourfold.rpc.channel import split_target

from ..routing.registry import Member, MemberChange
from ..state.ledger import RESUMES_KEY, Ledger

# Keys in the ledger.
_SECONDS: Final = "seconds"
_PEAK_MEMORY: Final = "peak_memory_bytes"
_RESTARTS: Final = "restarts"
_RECOVERIES: Final = "recoveries"

_SAVE_SECONDS: Final = 5.0
_SAMPLE_SECONDS: Final = 2.0
# The meter sleeps for this multiple of its last duration, because the kernel walks all pages of each process.
_REST_SHARE: Final = 49
# Member ids come from other processes, so their number must be limited.
_MAX_NAMES: Final = 1000
_MAX_RECOVERIES: Final = 100


class RunTotals:
    """Keeps the duration, peak memory, resumes, restarts and recoveries of one run. Used on one event loop."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        members: Callable[[], Sequence[Member]] = tuple,
        clock: Clock = SYSTEM_CLOCK,
        coordinator: str = "coordinator",
        death: str = "",
    ) -> None:
        """Continue from the ledger.

        Args:
            members: Returns the present members of the run.
            clock: Of all times.
            coordinator: Name of this process.
            death: The death of the coordinator before this one; empty if unknown.
        """
        self.memory = MemoryMeter(peak_bytes=int(ledger.get(_PEAK_MEMORY) or 0), members=members)
        self._ledger, self._clock = ledger, clock
        self._began = clock.monotonic()
        stored = ledger.get(_SECONDS)
        self._seconds_before = float(stored or 0.0)
        self.continued = bool(stored)  # an earlier coordinator process began the run
        self.resumes = int(ledger.get(RESUMES_KEY) or 0)
        self.recoveries: list[dict[str, Any]] = json.loads(ledger.get(_RECOVERIES) or "[]")  # the newest 100
        self._coordinator, self._death = coordinator, death
        # Processes that replaced another one while the run continued, by member id.
        self.restarts: Counter[str] = Counter(json.loads(ledger.get(_RESTARTS) or "{}"))
        self._incarnations: dict[str, str] = {}  # last incarnation of each member id

    @property
    def seconds(self) -> float:
        """Return the duration of the run so far, lost work included."""
        return self._seconds_before + self._clock.monotonic() - self._began

    def on_member(self, member: Member, change: MemberChange) -> None:
        """Count a process that replaces another one; a listener of the registry."""
        if change is not MemberChange.JOINED:
            return
        known = self._incarnations.get(member.member_id)
        if known is None and len(self._incarnations) >= _MAX_NAMES:
            return
        self._incarnations[member.member_id] = member.incarnation
        if known not in (None, member.incarnation):
            self.restarts[member.member_id] += 1

    def add_recovery(self, step: int, reason: str, *, trainer_kept: bool) -> str:
        """Record that the run continues after `step` steps; return the reason.

        An empty `reason` means that this process replaced a dead coordinator or resumed the run.
        """
        if not reason and (trainer_kept or self._death):
            self.restarts[self._coordinator] += 1
            reason = f"{self._coordinator} died ({self._death})" if self._death else "a new coordinator took over"
        elif not reason:
            self.resumes += 1
        row = {"time": self._clock.now(), "step": step, "reason": reason, "trainer_kept": trainer_kept}
        self.recoveries = [*self.recoveries, row][-_MAX_RECOVERIES:]
        return reason

    def save(self) -> None:
        """Write the totals to the ledger; raise sqlite3.Error when that fails."""
        self._ledger.put(
            {
                _SECONDS: repr(self.seconds),
                _PEAK_MEMORY: str(self.memory.peak_bytes),
                RESUMES_KEY: str(self.resumes),
                _RESTARTS: json.dumps(self.restarts),
                _RECOVERIES: json.dumps(self.recoveries),
            }
        )

    async def run(self) -> None:
        while True:
            await self._clock.sleep(_SAVE_SECONDS)
            try:
                self.save()
            except sqlite3.Error as error:
                if not is_full(error):  # on a full disk the run waits at a write that it needs, not at this one
                    raise


class MemoryMeter:
    """Samples the sum of the PSS of the run's processes, and keeps its maximum.

    PSS counts a page that k processes share as 1/k in each, so the sum is the memory that the run occupies, weights in
    shared memory included. It covers the launcher's descendants (without a launcher: the coordinator's), and each
    member that listens on this machine with its descendants.
    """

    def __init__(
        self,
        *,
        peak_bytes: int = 0,
        members: Callable[[], Sequence[Member]] = tuple,
        pss: Callable[[int], int] | None = None,
    ) -> None:
        """Continue from `peak_bytes`; `members` returns the present members, `pss` the bytes of a process."""
        self.peak_bytes = peak_bytes
        self._members = members
        self._pss = pss or pss_bytes
        launcher = os.environ.get(PARENT_PID_VARIABLE, "")
        self._root = int(launcher) if launcher.isdecimal() else os.getpid()
        self._lock = asyncio.Lock()
        self._pids: dict[Member, int] = {}  # 0: on another machine, or not readable by this user
        self._counted: dict[str, bool] = {}  # by member id

    @property
    def uncounted(self) -> list[str]:
        """Return the members whose memory was never measured."""
        return sorted(name for name, counted in self._counted.items() if not counted)

    async def run(self) -> None:
        while True:
            began = time.perf_counter()
            await self.update()
            await asyncio.sleep(max(_SAMPLE_SECONDS, _REST_SHARE * (time.perf_counter() - began)))

    async def update(self) -> None:
        async with self._lock:
            self.peak_bytes = max(self.peak_bytes, await asyncio.to_thread(self.sample, self._members()))

    def sample(self, members: Sequence[Member] = ()) -> int:
        """Return the present sum, in bytes."""
        self._find_processes(members)
        roots = {self._root, *self._pids.values()} - {0}
        return sum(self._pss(pid) for pid in roots | descendants(roots))

    def _find_processes(self, members: Sequence[Member]) -> None:
        # Forget members that left: their pids may belong to other processes soon.
        self._pids = {member: self._pids[member] for member in members if member in self._pids}
        new = [member for member in members if member not in self._pids]
        if not new:
            return
        listening = _listeners()
        own_hosts = {"localhost", socket.gethostname()}
        own_hosts |= {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
        for member in new:
            host, port = split_target(member.target)
            self._pids[member] = listening.get(port, 0) if host in own_hosts else 0
            self._counted[member.member_id] = self._pids[member] > 0 or self._counted.get(member.member_id, False)


def _listeners() -> dict[int, int]:
    """Return the pid of the process that listens on each port, for the processes that this user may see."""
    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):  # a failed measurement must not end the run
        return {}
    return {c.laddr.port: c.pid for c in connections if c.laddr and c.pid and c.status == psutil.CONN_LISTEN}


def pss_bytes(pid: int) -> int:
    """Return the PSS of a process; 0 when it is gone or not readable by this user."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
