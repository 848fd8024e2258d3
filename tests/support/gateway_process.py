"""`fourfold` with a count of its objects: `python -m tests.support.gateway_process serve gateway RECIPE ...`.

On SIGUSR1 the process writes the count to the file CENSUS: sessions, turns and tasks in memory, descriptors, memory.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

from fourfold.cli.main import main
from fourfold_gateway import sessions, trajectory, turn_sampler

CENSUS_VARIABLE = "FOURFOLD_TEST_CENSUS"
_KINDS = {"sessions": sessions.Session, "trajectories": trajectory.SessionTokens, "turns in flight": turn_sampler._Turn}


def census() -> dict[str, int]:
    """Count what a gateway without sessions must not hold, and what it may."""
    gc.collect()
    kinds = Counter(type(each) for each in gc.get_objects())
    found = {name: kinds[kind] for name, kind in _KINDS.items()}
    tasks = Counter(getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks())
    found |= {f"task {name}": count for name, count in tasks.items()}
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return found | {
        "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "threads": int(status["Threads"]),
        "memory KiB": int(status["RssAnon"].split()[0]),
    }


def _write(_number: int, _frame: FrameType | None) -> None:
    path = Path(os.environ[CENSUS_VARIABLE])
    path.with_suffix(".new").write_text(json.dumps(census()))
    path.with_suffix(".new").rename(path)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _write)
    sys.exit(main())
