"""Defines the micro-batches of one rank, their dummies, and their form as lists of arrays for the rank channel.

k   loss tokens of a micro-batch, or target tokens where there is no loss
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from fourfold.arrays import EMPTY_FLOATS, Float32Array, Int32Array
from fourfold.nn.batching import TokenBatch, pack

Array = NDArray[Any]
MicroBatch: TypeAlias = "TokenBatch | PolicyBatch | ValueBatch | WeightedBatch"
T = TypeVar("T")

_ZERO: Final = np.zeros(1, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyBatch:
    """One forward and backward pass of the policy on one rank."""

    tokens: TokenBatch
    segments: Int32Array  # [k], sample of each token, 0 for the first
    weights: Float32Array  # [k], weight of each token's loss; 0: a dummy, which counts nowhere
    advantages: Float32Array  # [k]
    behavior_logprobs: Float32Array  # [k]
    old_logprobs: Float32Array  # [k], or [0]: the current ones, because the policy has not moved yet
    reference_logprobs: Float32Array  # [k], or [0] where the loss needs none

    @property
    def is_dummy(self) -> bool:
        """Return true if no token counts."""
        return not self.weights.any()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValueBatch:
    """One forward and backward pass of the critic on one rank."""

    tokens: TokenBatch
    weights: Float32Array  # [k]; 0: a dummy
    returns: Float32Array  # [k]
    old_values: Float32Array  # [k]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightedBatch:
    """One forward and backward pass of the policy on one rank, for a loss given by its derivatives."""

    tokens: TokenBatch
    weights: Float32Array  # [k], derivative of the loss by each log-probability; 0 for a dummy


def dummy_tokens() -> TokenBatch:
    """Return the cheapest forward pass: two tokens."""
    return pack([np.zeros(2, np.int32)], [np.ones(1, np.int64)], [1.0])


def dummy_policy_batch(*, with_old: bool, with_reference: bool) -> PolicyBatch:
    """Return a dummy with the columns of the real batches."""
    return PolicyBatch(
        tokens=dummy_tokens(),
        segments=np.zeros(1, np.int32),
        weights=_ZERO,
        advantages=_ZERO,
        behavior_logprobs=_ZERO,
        old_logprobs=_ZERO if with_old else EMPTY_FLOATS,
        reference_logprobs=_ZERO if with_reference else EMPTY_FLOATS,
    )


def dummy_value_batch() -> ValueBatch:
    """Return a dummy of the critic."""
    return ValueBatch(tokens=dummy_tokens(), weights=_ZERO, returns=_ZERO, old_values=_ZERO)


def dummy_weighted_batch() -> WeightedBatch:
    """Return a dummy of ForwardBackward."""
    return WeightedBatch(tokens=dummy_tokens(), weights=_ZERO)


def to_arrays(batch: MicroBatch) -> list[Array]:
    """Return the arrays of a batch, in the order of its fields; those of its tokens first."""
    arrays: list[Array] = []
    for name in batch.__slots__:
        value = getattr(batch, name)
        arrays += to_arrays(value) if isinstance(value, TokenBatch) else [value]
    return arrays


class BatchArrays(Sequence[Array]):
    """The arrays of some micro-batches, one batch after another; each batch is made when its arrays are read."""

    def __init__(self, share: Sequence[MicroBatch]) -> None:
        self._share = share
        self._size = len(to_arrays(share[0])) if share else 0  # of one batch

    def __len__(self) -> int:
        return len(self._share) * self._size

    @overload
    def __getitem__(self, index: int) -> Array: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Array]: ...
    def __getitem__(self, index: int | slice) -> Array | Sequence[Array]:
        if isinstance(index, int):
            return to_arrays(self._share[index // self._size])[index % self._size]
        numbers = range(len(self))[index]
        made = {number: to_arrays(self._share[number]) for number in {i // self._size for i in numbers}}
        return [made[i // self._size][i % self._size] for i in numbers]

    def __iter__(self) -> Iterator[Array]:
        return (array for batch in self._share for array in to_arrays(batch))


class ReceivedBatches(Sequence[T]):
    """The batches of the class `make` whose arrays, one batch after another, `to_arrays` returned."""

    def __init__(self, make: Callable[..., T], arrays: Sequence[Array]) -> None:
        names: Sequence[str] = make.__slots__  # type: ignore[attr-defined]
        # The arrays of the field `tokens` come first.
        self._head = len(TokenBatch.__slots__) if names[0] == "tokens" else 0
        self._columns = names[1:] if self._head else names
        self._make, self._arrays, self._size = make, arrays, self._head + len(self._columns)

    def __len__(self) -> int:
        return len(self._arrays) // self._size

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        if not 0 <= index < len(self):
            raise IndexError(index)
        part, head = self._arrays[index * self._size : (index + 1) * self._size], self._head
        tokens = {"tokens": TokenBatch(**dict(zip(TokenBatch.__slots__, part[:head], strict=True)))} if head else {}
        return self._make(**tokens, **dict(zip(self._columns, part[head:], strict=True)))
