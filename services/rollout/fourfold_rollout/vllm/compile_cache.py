"""Engines that start together on one host compile once.

vLLM keeps what torch.compile made under VLLM_CACHE_ROOT (~/.cache/vllm) and finds it again by a hash: of its version
and code, the model's folder and configuration, the context, the batched tokens, the sizes of the CUDA graphs, the
tensor parallelism, the KV cache's layout and the VLLM_* variables. Seed, memory, addresses, our worker and our
temporary files are not in it, so that a second start of a recipe compiles nothing; one with another number of
concurrent samples compiles, when that changes the graphs' sizes.

Its index of that folder is written in place: an engine that reads it half written does not start. So of engines with
one hash the first goes ahead alone, and the others, which would compile the same on the same CPU, wait and then read.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_log = logging.getLogger(__name__)
# Who waited that long compiles itself: whoever holds the lock is alive, but stuck.
_WAIT_SECONDS: Final = 600.0
_STEP_SECONDS: Final = 0.1


@contextmanager
def compiled_once(root: Path, key: str, *, wait_seconds: float = _WAIT_SECONDS) -> Iterator[None]:
    """Start an engine within: alone the first time, with all others once one has started.

    Args:
        root: where the compiled code is.
        key: engines with the same one compile the same.
        wait_seconds: longest wait for another one's start.
    """
    folder = root / "fourfold"
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / f"{key}.compiled"
    if done.exists():
        yield
        return
    lock = os.open(folder / f"{key}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _take(lock, time.monotonic() + wait_seconds)
        if done.exists():
            fcntl.flock(lock, fcntl.LOCK_UN)
        yield
        done.touch()
    finally:
        # Closing is not enough: the engine's process was forked meanwhile and holds the file open, too.
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _take(lock: int, end: float) -> None:
    said = False
    while time.monotonic() < end:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not said:
                _log.info("another engine of this host compiles the same model; waiting to read its result")
                said = True
            time.sleep(_STEP_SECONDS)
        else:
            return
