"""Lets engines that start together on one host compile once: the first starts alone, the others wait and read.

vLLM keeps the output of torch.compile under VLLM_CACHE_ROOT (~/.cache/vllm) by a hash of: its version and code, the
model's folder and configuration, the context, the batched tokens, the CUDA graph sizes, the tensor parallelism, the
layout of the KV cache and the VLLM_* variables. The seed, memory sizes and addresses are not part of it.
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
# An engine that has waited this long compiles by itself: the holder of the lock is alive but stuck.
_WAIT_SECONDS: Final = 600.0
_STEP_SECONDS: Final = 0.1


@contextmanager
def compiled_once(root: Path, key: str, *, wait_seconds: float = _WAIT_SECONDS) -> Iterator[None]:
    """Start an engine inside: alone the first time, in parallel once an engine with the same key has started.

    vLLM writes the index of its cache in place, and an engine that reads a half-written index does not start. `root` is
    the folder of the compiled code, `key` the hash of the engine's configuration.
    """
    folder = root / "fourfold"
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / f"{key}.compiled"
    if done.exists():
        yield
        return
    lock = os.open(folder / f"{key}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _acquire(lock, time.monotonic() + wait_seconds)
        if done.exists():
            fcntl.flock(lock, fcntl.LOCK_UN)
        yield
        done.touch()
    finally:
        # Unlock before the close: the engine's process was forked meanwhile and holds the file open, too.
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


def _acquire(lock: int, end: float) -> None:
    logged = False
    while time.monotonic() < end:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not logged:
                _log.info("Waiting for another engine of this host that compiles the same model")
                logged = True
            time.sleep(_STEP_SECONDS)
        else:
            return
