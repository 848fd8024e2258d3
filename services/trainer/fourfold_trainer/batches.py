"""Defines the micro-batches of one rank, their dummies, and their form as lists of arrays for the rank channel.

k   loss tokens of a micro-batch, or target tokens where there is no loss
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from fourfold.arrays import EMPTY_FLOATS, Float32Array, Float64Array, Int32Array, Int64Array
from fourfold.nn.batching import TokenBatch, pack

Array = NDArray[Any]
MicroBatch: TypeAlias = "TokenBatch | PolicyBatch | UnitBatch | ValueBatch | WeightedBatch"
UpdateBatch: TypeAlias = "PolicyBatch | UnitBatch"
"""A micro-batch of an update of the policy: its class follows from the loss."""
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_ZERO: Final = np.zeros(1, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyBatch:
    """One forward and backward pass of the policy on one rank."""

    tokens: TokenBatch
    trajectories: Int32Array  # [k], trajectory of each token, 0 for the first
    weights: Float32Array  # [k], weight of each token's loss; 0: a dummy, which counts nowhere
    advantages: Float32Array  # [k]
    behavior_logprobs: Float32Array  # [k], or [0] where no engine sampled the tokens
    old_logprobs: Float32Array  # [k], or [0] before the first update, when they equal the current ones
    reference_logprobs: Float32Array  # [k], or [0] where the loss needs none
    teacher_logprobs: Float32Array = field(default_factory=lambda: EMPTY_FLOATS)
    """[k, m - 1], of the other targets of `tokens`; or [0] where the loss reads no teacher."""

    @property
    def is_dummy(self) -> bool:
        """Return true if no token counts."""
        return not self.weights.any()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitBatch:
    """One forward and backward pass of the policy on one rank, for a loss of whole answers."""

    tokens: TokenBatch  # the k loss tokens of s samples, one sample after another
    counts: Int64Array  # [s], loss tokens of each sample
    labels: Float64Array  # [s]
    unit_weights: Float64Array  # [u], weight of each unit's loss; 0: a dummy
    pairs: Int64Array  # [2 u]: samples of each pair, which may be in several; [0]: samples 2j and 2j + 1 are pair j
    nll_weights: Float64Array  # [s], weight of the negative log-likelihood of each sample's tokens
    reference_logprobs: Float32Array  # [k], or [0] where the loss needs none
    factors: Float32Array  # [k], factor of each token in the sums of the loss, or [0]: all are 1

    @property
    def is_dummy(self) -> bool:
        """Return true if no unit counts."""
        return not self.unit_weights.any()


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


def with_targets(tokens: TokenBatch, ids: Int32Array) -> TokenBatch:
    """Return a batch that asks for more ids, [k, m], at each of its rows."""
    return replace(tokens, targets=np.concatenate([tokens.targets[:, None], ids], axis=1))


def dummy_policy_batch(
    *, with_old: bool, with_reference: bool, with_behavior: bool = True, teacher_tokens: int = 0
) -> PolicyBatch:
    """Return a dummy with the columns of the real batches."""
    tokens, ids = dummy_tokens(), np.zeros((1, teacher_tokens), np.int32)
    return PolicyBatch(
        tokens=with_targets(tokens, ids) if teacher_tokens else tokens,
        teacher_logprobs=ids.astype(np.float32) if teacher_tokens else EMPTY_FLOATS,
        trajectories=np.zeros(1, np.int32),
        weights=_ZERO,
        advantages=_ZERO,
        behavior_logprobs=_ZERO if with_behavior else EMPTY_FLOATS,
        old_logprobs=_ZERO if with_old else EMPTY_FLOATS,
        reference_logprobs=_ZERO if with_reference else EMPTY_FLOATS,
    )


def dummy_unit_batch(*, pairs: bool, with_reference: bool, with_factors: bool) -> UnitBatch:
    """Return a dummy with the columns of the real batches: one sample of a token, and with pairs one without."""
    samples = 2 if pairs else 1
    return UnitBatch(
        tokens=dummy_tokens(),
        counts=np.array([1, 0][:samples], np.int64),
        labels=np.array([1.0, 0.0][:samples], np.float64),
        unit_weights=np.zeros(1, np.float64),
        pairs=np.empty(0, np.int64),
        nll_weights=np.zeros(samples, np.float64),
        reference_logprobs=_ZERO if with_reference else EMPTY_FLOATS,
        factors=_ZERO if with_factors else EMPTY_FLOATS,
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


def from_arrays(make: Callable[..., T], arrays: Sequence[Array]) -> T:
    """Return the batch of the class `make` whose arrays `to_arrays` returned."""
    names: Sequence[str] = make.__slots__  # type: ignore[attr-defined]
    head = len(TokenBatch.__slots__) if names[0] == "tokens" else 0  # the arrays of the field `tokens` come first
    tokens = {"tokens": TokenBatch(**dict(zip(TokenBatch.__slots__, arrays[:head], strict=True)))} if head else {}
    return make(**tokens, **dict(zip(names[bool(head) :], arrays[head:], strict=True)))


class Batches(Protocol[T_co]):
    """The micro-batches of one rank, which are read once, in order."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[T_co]: ...


class ReceivedBatches(Generic[T]):
    """The micro-batches of the class `make`, each made of its arrays when it is read."""

    def __init__(self, make: Callable[..., T], batches: Batches[Sequence[Array]]) -> None:
        self._make, self._batches = make, batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[T]:
        return (from_arrays(self._make, arrays) for arrays in self._batches)
