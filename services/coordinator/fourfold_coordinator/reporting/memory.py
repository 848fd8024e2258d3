"""Peak memory of a run: the sum of the PSS of its processes, sampled every few seconds.

PSS counts a page that k processes share as 1/k in each, so that the sum is what the run really
takes, shared-memory weights included. The processes are those below the launcher, or, without
one, below the coordinator; and every member that listens on this machine, with those below it.
Members that are elsewhere, or not ours to look into, are named in `uncounted`.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import psutil

from fourfold.host.process import PARENT_PID_VARIABLE, descendants
from fourfold.rpc.channel import split_target

from ..routing.registry import Member

_PERIOD_SECONDS: Final = 2.0


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
            await asyncio.sleep(_PERIOD_SECONDS)

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
