"""Reads the open descriptors of this process, for tests that check for leaks."""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import suppress
from pathlib import Path


def open_descriptors(*words: str) -> Counter[str]:
    """Return the targets of open descriptors that have one of the words, with the number of descriptors of each.

    Without words, return all. Threads that other tests left may open some meanwhile, so that a test should name its
    own. Garbage is collected first: it would otherwise be collected between two counts.
    """
    gc.collect()
    targets = list[str]()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile, as that of this folder was
            targets.append(str(entry.readlink()))
    return Counter(target for target in targets if not words or any(word in target for word in words))
