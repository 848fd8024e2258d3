"""The packed form: arrays over the action tokens of all samples, one sample after another.

    B        samples
    n_i      action tokens of sample i, may be 0
    k        sum of n_i
    lengths  int64 [B]: n_i

A sample without actions takes no place, and nothing is padded.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]
Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


def last_tokens(lengths: Int64Array) -> Int64Array:
    """Return the packed index of the last action of every sample that has one, in the order of the samples."""
    last: Int64Array = (np.cumsum(lengths) - 1)[lengths > 0]
    return last


def last_to_first(lengths: Int64Array) -> Iterator[Int64Array]:
    """Yield packed indices: the last action of every sample, then the last but one, and so on to the first.

    Samples are ordered by length, longest first, so that the samples of an item are the first ones
    of the item before: a recursion keeps its state in an array and cuts it to the length of the item.
    Every packed index comes exactly once.
    """
    order = np.argsort(-lengths, kind="stable")
    last = (np.cumsum(lengths) - 1)[order]
    longest = int(lengths.max(initial=0))
    shorter = np.searchsorted(lengths[order[::-1]], np.arange(longest), side="right")  # samples with n_i <= back
    for back in range(longest):
        yield last[: len(lengths) - shorter[back]] - back
