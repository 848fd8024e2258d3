"""A step's samples as micro-batches for every rank.

Samples are dealt to the ranks by length, so that each gets about the same number of tokens;
each rank's part is packed into batches under the token budget. Collectives run inside a
forward pass under ZeRO-3, so all ranks must run the same number of passes: a rank with fewer
gets dummies, one short sample that counts for nothing.

Legend: k loss tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fourfold.nn.batching import TokenBatch, pack, split_by_tokens
from fourfold.wire import EMPTY_FLOATS, Float32Array, Sample

_DUMMY_TOKENS: Final = np.zeros(2, np.int32)
_DUMMY_POSITIONS: Final = np.ones(1, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """One forward and backward pass of one rank."""

    tokens: TokenBatch
    advantages: Float32Array  # [k]
    behavior_logprobs: Float32Array  # [k]
    reference_logprobs: Float32Array  # [k], or [0] where the loss needs none
    dummy: bool = False
    """Runs so that the collectives match; its tokens count nowhere."""

    def to_arrays(self) -> list[NDArray[Any]]:
        """Return the arrays of `from_arrays`, in its order."""
        extra = [self.advantages, self.behavior_logprobs, self.reference_logprobs]
        return [*tokens_to_arrays(self.tokens), *extra, np.array([self.dummy], np.uint8)]

    @classmethod
    def from_arrays(cls, arrays: Sequence[NDArray[Any]]) -> MicroBatch:
        """Take what `to_arrays` gave."""
        *tokens, advantages, behavior, reference, dummy = arrays
        return cls(
            tokens=tokens_from_arrays(tokens),
            advantages=advantages,
            behavior_logprobs=behavior,
            reference_logprobs=reference,
            dummy=bool(dummy[0]),
        )


TOKEN_ARRAYS: Final = 5
MICRO_BATCH_ARRAYS: Final = TOKEN_ARRAYS + 4


def tokens_to_arrays(batch: TokenBatch) -> list[NDArray[Any]]:
    """Return the TOKEN_ARRAYS arrays of a batch."""
    return [batch.token_ids, batch.lengths, batch.rows, batch.targets, batch.temperatures]


def tokens_from_arrays(arrays: Sequence[NDArray[Any]]) -> TokenBatch:
    """Take what `tokens_to_arrays` gave."""
    token_ids, lengths, rows, targets, temperatures = arrays
    return TokenBatch(token_ids=token_ids, lengths=lengths, rows=rows, targets=targets, temperatures=temperatures)


def split_step(
    samples: Sequence[Sample], advantages: Sequence[float], *, rank_count: int, max_tokens: int, with_reference: bool
) -> list[list[MicroBatch]]:
    """Return each rank's micro-batches, the same number on every rank.

    Args:
        samples: to train on, each with at least one loss token.
        advantages: of each sample.
        rank_count: number of ranks.
        max_tokens: most tokens in one micro-batch.
        with_reference: carry the reference log-probabilities along.
    """

    def make(members: list[int]) -> MicroBatch:
        chosen = [samples[i] for i in members]
        positions = [np.flatnonzero(s.loss_mask) for s in chosen]
        counts = [len(p) for p in positions]
        return MicroBatch(
            tokens=pack([s.token_ids for s in chosen], positions, [s.temperature for s in chosen]),
            advantages=np.repeat(np.asarray([advantages[i] for i in members], np.float32), counts),
            behavior_logprobs=_gather([s.behavior_logprobs for s in chosen], positions),
            reference_logprobs=_gather([s.reference_logprobs for s in chosen], positions)
            if with_reference
            else EMPTY_FLOATS,
        )

    shares = [
        [make([share[i] for i in part]) for part in split_by_tokens(_lengths(samples, share), max_tokens=max_tokens)]
        for share in deal([len(s.token_ids) for s in samples], rank_count)
    ]
    passes = max(len(share) for share in shares)
    return [[*share, *[_dummy(with_reference)] * (passes - len(share))] for share in shares]


def split_lookup(
    samples: Sequence[Sample], *, rank_count: int, max_tokens: int
) -> tuple[list[list[int]], list[list[TokenBatch]]]:
    """Split samples whose every log-probability is asked.

    Returns:
        For each rank the samples in the order of its rows, and its batches; the same number of
        batches on every rank, dummies last.
    """
    orders: list[list[int]] = []
    shares: list[list[TokenBatch]] = []
    for share in deal([len(s.token_ids) for s in samples], rank_count):
        parts = split_by_tokens(_lengths(samples, share), max_tokens=max_tokens)
        orders.append([share[i] for part in parts for i in part])
        shares.append([_lookup_batch([samples[share[i]] for i in part]) for part in parts])
    passes = max(len(batches) for batches in shares)
    return orders, [[*batches, *[_dummy_tokens()] * (passes - len(batches))] for batches in shares]


def deal(lengths: Sequence[int], rank_count: int) -> list[list[int]]:
    """Return the samples of each rank: sorted by length and dealt back and forth, 0 1 2 2 1 0 0 1 2 ..."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    shares: list[list[int]] = [[] for _ in range(rank_count)]
    for turn, index in enumerate(order):
        lap, seat = divmod(turn, rank_count)
        shares[rank_count - 1 - seat if lap % 2 else seat].append(index)
    return shares


def padding_fraction(shares: Sequence[Sequence[MicroBatch]], real_tokens: int) -> float:
    """Return the share of what the ranks compute that is dummies, in [0, 1]: packed samples have no padding."""
    computed = sum(batch.tokens.token_count for share in shares for batch in share)
    return 1 - real_tokens / computed if computed else 0.0


def _lengths(samples: Sequence[Sample], members: Sequence[int]) -> list[int]:
    return [len(samples[i].token_ids) for i in members]


def _gather(arrays: Sequence[Float32Array], positions: Sequence[NDArray[np.int64]]) -> Float32Array:
    return np.concatenate([a[p] for a, p in zip(arrays, positions, strict=True)]).astype(np.float32, copy=False)


def _lookup_batch(samples: Sequence[Sample]) -> TokenBatch:
    positions = [np.arange(1, len(s.token_ids), dtype=np.int64) for s in samples]
    return pack([s.token_ids for s in samples], positions, [s.temperature for s in samples])


def _dummy_tokens() -> TokenBatch:
    return pack([_DUMMY_TOKENS], [_DUMMY_POSITIONS], [1.0])


def _dummy(with_reference: bool) -> MicroBatch:
    zero = np.zeros(1, np.float32)
    return MicroBatch(
        tokens=_dummy_tokens(),
        advantages=zero,
        behavior_logprobs=zero,
        reference_logprobs=zero if with_reference else EMPTY_FLOATS,
        dummy=True,
    )
