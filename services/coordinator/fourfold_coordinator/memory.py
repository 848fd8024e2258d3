"""Peak memory of a run: the sum of the PSS of its processes, sampled every few seconds.

PSS counts a page that k processes share as 1/k in each, so that the sum is what the run really
takes, shared-memory weights included. The processes are those below the launcher, or, without
one, below the coordinator alone. Only this machine is seen.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil

from fourfold.process import PARENT_PID_VARIABLE

_PERIOD_SECONDS: Final = 2.0


class MemoryMeter:
    """Remembers the largest sum that it saw."""

    def __init__(self, *, peak_bytes: int = 0, pss: Callable[[int], int] | None = None) -> None:
        """Start with the peak of earlier lives of the run."""
        self.peak_bytes = peak_bytes
        self._pss = pss or pss_bytes
        launcher = os.environ.get(PARENT_PID_VARIABLE, "")
        self._root = int(launcher) if launcher.isdecimal() else os.getpid()

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            self.peak_bytes = max(self.peak_bytes, await asyncio.to_thread(self.sample))
            await asyncio.sleep(_PERIOD_SECONDS)

    def sample(self) -> int:
        """Return the sum now, in bytes."""
        try:
            tree = [self._root, *(child.pid for child in psutil.Process(self._root).children(recursive=True))]
        except psutil.Error:  # it is ending; a measurement never ends the run
            return 0
        return sum(self._pss(pid) for pid in tree)


def pss_bytes(pid: int) -> int:
    """Return the PSS of a process; 0 when it is gone or not ours to read."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
