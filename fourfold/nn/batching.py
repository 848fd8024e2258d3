"""Packs samples of any length into batches under a token budget. Needs no torch.

A packed batch has no padding: its samples are *segments* of one long row. Each segment has its own positions and
attends only to itself (see attention.py), so the results for a sample do not depend on its neighbours.

Legend: s samples in a batch, t tokens of all of them, k target rows (whose predictions are computed).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fourfold.arrays import Float32Array, Int32Array, Int64Array
from fourfold.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenBatch:
    """The input of one forward pass. Position p - 1 predicts token p, so `rows` are shifted by one from the tokens."""

    token_ids: Int32Array  # [t], all samples one after another
    lengths: Int32Array  # [s], tokens of each sample, each at least 1; their sum is t
    rows: Int64Array  # [k], indices of the [t] hidden states that predict `targets`
    targets: Int32Array  # [k], token ids; or [k, m]: the first is the token, the others differ from each other
    temperatures: Float32Array  # [k], the logits are divided by these

    @property
    def token_count(self) -> int:
        """t, which determines the cost of the pass."""
        return self.token_ids.size


def split_by_tokens(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Divide samples into batches of at most `max_tokens`, with about equal numbers of tokens.

    First-fit-decreasing determines the number of batches. The samples are then dealt again, the longest first, each to
    the batch with the fewest tokens (longest-processing-time-first). If that exceeds the budget, which happens only
    with samples of nearly its size, the batches of first-fit stay.

    Args:
        lengths: tokens of each sample, at most `max_tokens`.
        max_tokens: most tokens in one batch.

    Returns:
        Batches of sample indices, the one with the longest sample first; in each the longest sample first.
    """
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise InvalidInput(
            f"a sample of {longest} tokens does not fit a batch of {max_tokens}; raise batch.tokens_per_micro_batch"
        )
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    tight = _first_fit(lengths, order, max_tokens)
    even = _deal(lengths, order, len(tight))
    fits = all(sum(lengths[i] for i in batch) <= max_tokens for batch in even)
    return even if fits else tight


def pack(token_ids: Sequence[Int32Array], positions: Sequence[Int64Array], temperatures: Sequence[float]) -> TokenBatch:
    """Concatenate samples into one batch, whose rows are in the order of `positions`, sample by sample.

    Args:
        token_ids: int32 [n] of each sample.
        positions: int64 [m] of each sample: the tokens whose log-probability is computed, each in [1, n).
        temperatures: one per sample.
    """
    lengths = np.array([len(ids) for ids in token_ids], np.int32)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    return TokenBatch(
        token_ids=np.concatenate(token_ids).astype(np.int32, copy=False),
        lengths=lengths,
        rows=np.concatenate([start + p - 1 for start, p in zip(starts, positions, strict=True)]).astype(
            np.int64, copy=False
        ),
        targets=np.concatenate([ids[p] for ids, p in zip(token_ids, positions, strict=True)]),
        temperatures=np.repeat(np.asarray(temperatures, np.float32), [len(p) for p in positions]),
    )


def _first_fit(lengths: Sequence[int], order: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Put each sample into the first batch that has room for it."""
    batches: list[list[int]] = []
    room: list[int] = []
    for index in order:
        place = next((b for b, left in enumerate(room) if left >= lengths[index]), len(batches))
        if place == len(batches):
            batches.append([])
            room.append(max_tokens)
        batches[place].append(index)
        room[place] -= lengths[index]
    return batches


def _deal(lengths: Sequence[int], order: Sequence[int], count: int) -> list[list[int]]:
    """Put each sample into the batch with the fewest tokens."""
    batches: list[list[int]] = [[] for _ in range(count)]
    lightest = [(0, batch) for batch in range(count)]
    for index in order:
        tokens, batch = lightest[0]
        batches[batch].append(index)
        heapq.heapreplace(lightest, (tokens + lengths[index], batch))
    return batches
