"""Measures the CPU time and memory of the descendants of this process."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

from fourfold.host.process_tree import descendants


@dataclass(frozen=True, slots=True)
class ChildUsage:
    """CPU time and memory of the running descendants of a process."""

    count: int = 0
    cpu_seconds: float = 0.0
    resident_bytes: int = 0  # a page that several processes share counts in each


def measure_children() -> ChildUsage:
    """Return the usage of the descendants of this process. Reads /proc for every process of the machine."""
    count, seconds, resident = 0, 0.0, 0
    for pid in descendants({os.getpid()}):
        try:
            process = psutil.Process(pid)
            times, memory = process.cpu_times(), process.memory_info()
        except psutil.Error:  # it has ended, or belongs to another user
            continue
        count, seconds, resident = count + 1, seconds + times.user + times.system, resident + memory.rss
    return ChildUsage(count, seconds, resident)
