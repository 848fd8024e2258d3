"""Finds the token of a text after which a reward model reads its score. Needs no torch."""

from __future__ import annotations

import numpy as np

from fourfold.arrays import Int32Array, Int64Array


def scored_rows(token_ids: Int32Array, lengths: Int32Array | Int64Array, pad_id: int | None) -> Int64Array:
    """Return the index of the token after which each packed sample is scored, int64 [s].

    It is the last token that is not `pad_id`, as the ...ForSequenceClassification of transformers finds it; the first
    token of a sample that has no other. None: the last token.

    Args:
        token_ids: int32 [t], all samples one after another.
        lengths: tokens of each sample, [s], each at least 1.
        pad_id: token that fills up batches.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - lengths
    places = np.arange(len(token_ids), dtype=np.int64)
    last = np.maximum.accumulate(np.where(token_ids == pad_id, 0, places))
    rows: Int64Array = np.maximum(last[ends - 1], starts)
    return rows
