"""Counts the open descriptors of this process, for tests that check for leaks."""

from __future__ import annotations

import gc

import psutil


def count_descriptors() -> int:
    """Return the number of open descriptors, without those of garbage.

    What earlier tests of the process left would otherwise be collected between two counts.
    """
    gc.collect()
    return psutil.Process().num_fds()
