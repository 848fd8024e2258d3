"""Samples as micro-batches for every rank.

Samples are dealt to the ranks so that each gets about the same number of tokens; each rank's
part is packed under the token budget. Collectives run inside a forward pass under ZeRO-3, so
all ranks must run the same number of passes: a rank with fewer gets dummies, two tokens whose
weight is 0. With sequence parallelism, "rank" is a group of ranks that share every pass.

Legend: k loss tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from fourfold.arrays import EMPTY_FLOATS, Sample
from fourfold.nn.batching import Int64Array, TokenBatch, pack, split_by_tokens
from fourfold_trainer.batches import PolicyBatch, ValueBatch, WeightedBatch

Array = NDArray[Any]
Batch: TypeAlias = "TokenBatch | PolicyBatch | ValueBatch | WeightedBatch"
T = TypeVar("T")

_DUMMY_TOKENS: Final = np.zeros(2, np.int32)
_DUMMY_POSITIONS: Final = np.ones(1, np.int64)


def to_arrays(batch: Batch) -> list[Array]:
    """Return the arrays of a batch, in the order of its fields; those of its tokens first."""
    arrays: list[Array] = []
    for name in batch.__slots__:
        value = getattr(batch, name)
        arrays += to_arrays(value) if isinstance(value, TokenBatch) else [value]
    return arrays


def token_batches(arrays: Sequence[Array]) -> list[TokenBatch]:
    """Return the batches that `to_arrays` took apart."""
    return _assemble(arrays, len(TokenBatch.__slots__), _tokens)


def policy_batches(arrays: Sequence[Array]) -> list[PolicyBatch]:
    """Return the batches that `to_arrays` took apart."""
    return _with_columns(PolicyBatch, PolicyBatch.__slots__[1:], arrays)


def value_batches(arrays: Sequence[Array]) -> list[ValueBatch]:
    """Return the batches that `to_arrays` took apart."""
    return _with_columns(ValueBatch, ValueBatch.__slots__[1:], arrays)


def weighted_batches(arrays: Sequence[Array]) -> list[WeightedBatch]:
    """Return the batches that `to_arrays` took apart."""
    return _with_columns(WeightedBatch, WeightedBatch.__slots__[1:], arrays)


def split(lengths: Sequence[int], *, rank_count: int, max_tokens: int) -> list[list[list[int]]]:
    """Return for each rank its passes, and for each pass its samples; none: a dummy pass.

    Args:
        lengths: tokens of each sample.
        rank_count: number of ranks.
        max_tokens: most tokens in one pass.

    Returns:
        As many passes for every rank; every sample is in one of them.

    Raises:
        InvalidInput: a sample is longer than a pass.
    """
    shares = []
    for share in deal(lengths, rank_count):
        parts = split_by_tokens([lengths[i] for i in share], max_tokens=max_tokens)
        shares.append([[share[i] for i in part] for part in parts])
    passes = max(len(share) for share in shares)
    return [[*share, *[list[int]()] * (passes - len(share))] for share in shares]


def deal(lengths: Sequence[int], rank_count: int) -> list[list[int]]:
    """Return the samples of each rank: the longest first, each to the rank that has the fewest tokens."""
    shares: list[list[int]] = [[] for _ in range(rank_count)]
    tokens = [0] * rank_count
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = tokens.index(min(tokens))
        shares[rank].append(index)
        tokens[rank] += lengths[index]
    return shares


def fill(shares: Sequence[Sequence[Sequence[int]]], make: Callable[[Sequence[int]], T], dummy: T) -> list[list[T]]:
    """Return the passes of `split` as batches."""
    return [[make(members) if members else dummy for members in share] for share in shares]


def pack_tokens(samples: Sequence[Sample], positions: Sequence[Int64Array]) -> TokenBatch:
    """Return one pass over `samples` that asks for the tokens at `positions`, each in [1, n)."""
    return pack([s.token_ids for s in samples], positions, [s.temperature for s in samples])


def dummy_tokens() -> TokenBatch:
    """Return the cheapest pass there is."""
    return pack([_DUMMY_TOKENS], [_DUMMY_POSITIONS], [1.0])


def dummy_policy_batch(*, with_old: bool, with_reference: bool) -> PolicyBatch:
    """Return a dummy with the columns that the real ones have."""
    zero = np.zeros(1, np.float32)
    return PolicyBatch(
        tokens=dummy_tokens(),
        segments=np.zeros(1, np.int32),
        weights=zero,
        advantages=zero,
        behavior_logprobs=zero,
        old_logprobs=zero if with_old else EMPTY_FLOATS,
        reference_logprobs=zero if with_reference else EMPTY_FLOATS,
    )


def dummy_value_batch() -> ValueBatch:
    """Return a dummy."""
    zero = np.zeros(1, np.float32)
    return ValueBatch(tokens=dummy_tokens(), weights=zero, returns=zero, old_values=zero)


def dummy_weighted_batch() -> WeightedBatch:
    """Return a dummy."""
    return WeightedBatch(tokens=dummy_tokens(), weights=np.zeros(1, np.float32))


def _tokens(arrays: Sequence[Array]) -> TokenBatch:
    return TokenBatch(**dict(zip(TokenBatch.__slots__, arrays, strict=True)))


def _with_columns(make: Callable[..., T], names: Sequence[str], arrays: Sequence[Array]) -> list[T]:
    """Return batches whose first field is a TokenBatch, and whose others have `names`."""
    count = len(TokenBatch.__slots__)

    def one(part: Sequence[Array]) -> T:
        return make(tokens=_tokens(part[:count]), **dict(zip(names, part[count:], strict=True)))

    return _assemble(arrays, count + len(names), one)


def _assemble(arrays: Sequence[Array], size: int, make: Callable[[Sequence[Array]], T]) -> list[T]:
    return [make(arrays[i : i + size]) for i in range(0, len(arrays), size)]
