"""Reads the open descriptors of this process, for tests that check for leaks."""

from __future__ import annotations

import gc
import os
from collections import Counter
from contextlib import suppress


def open_descriptors(*words: str) -> Counter[str]:
    """Return the targets of open descriptors that have one of the words, with the number of descriptors of each.

    Without words, return all. Threads that other tests left may open some meanwhile, so that a test should name its
    own. Garbage is collected first: it would otherwise be collected between two counts.
    """
    gc.collect()
    targets = list[str]()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # it was closed meanwhile, as that of this folder was
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    return Counter(target for target in targets if not words or any(word in target for word in words))
