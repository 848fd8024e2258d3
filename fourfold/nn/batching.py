"""Samples of any length as padded batches under a token budget. No torch here.

Samples are sorted by length, so that a batch pads little, and padded on the right: in a
causal model no real token then sees a padding token, and no attention mask is needed.

Legend: b samples in a batch, t padded length, k rows (tokens whose log-probability is asked).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fourfold.errors import InvalidInput
from fourfold.wire import Float32Array, Int32Array

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenBatch:
    """One forward pass. The logits of a token are made at the position before it: that is the shift in `rows`."""

    token_ids: Int32Array  # [b, t], padded with 0 on the right
    rows: Int64Array  # [k], index into the flattened [b * t] hidden states that predict `targets`
    targets: Int32Array  # [k], token ids
    temperatures: Float32Array  # [k], divide the logits

    @property
    def padded_tokens(self) -> int:
        """b * t: what the pass costs."""
        return self.token_ids.size


def split_by_length(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Return indices of samples in batches of similar length, the longest first.

    Args:
        lengths: tokens of each sample.
        max_tokens: most padded tokens in one batch.

    Raises:
        InvalidInput: one sample alone is longer.
    """
    batches: list[list[int]] = []
    width = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[index] > max_tokens:
            raise InvalidInput(
                f"a sample of {lengths[index]} tokens does not fit a batch of {max_tokens}; "
                f"raise batch.tokens_per_micro_batch"
            )
        if not batches or (len(batches[-1]) + 1) * width > max_tokens:
            batches.append([])
            width = lengths[index]
        batches[-1].append(index)
    return batches


def pad(token_ids: Sequence[Int32Array], positions: Sequence[Int64Array], temperatures: Sequence[float]) -> TokenBatch:
    """Make one batch.

    Args:
        token_ids: of each sample, int32 [n].
        positions: of each sample, the tokens whose log-probability is asked, each in [1, n).
        temperatures: of each sample.

    Returns:
        A batch whose rows are in the order of `positions`, sample by sample.
    """
    width = max(len(ids) for ids in token_ids)
    padded = np.zeros((len(token_ids), width), np.int32)
    for row, ids in zip(padded, token_ids, strict=True):
        row[: len(ids)] = ids
    return TokenBatch(
        token_ids=padded,
        rows=np.concatenate([i * width + p - 1 for i, p in enumerate(positions)]).astype(np.int64, copy=False),
        targets=np.concatenate([ids[p] for ids, p in zip(token_ids, positions, strict=True)]),
        temperatures=np.repeat(np.asarray(temperatures, np.float32), [len(p) for p in positions]),
    )
