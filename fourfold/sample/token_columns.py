"""The token columns of samples: their arrays of one value per token.

`COLUMNS` are those of a finished sample. The codec of the wire, the form on the disk and `Samples` loop over them. A
new one is a row here, a field of `Sample`, and a field of `Experience` with the same name.

`SAMPLED_COLUMNS` are those that an engine returns of the tokens that it samples. A new one is a row here, a field of
`SampledColumns`, and a field of `SampleChunk`; if a column of samples has the same name, it gets the values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fourfold.arrays import BoolArray, Float32Array
from fourfold.rollout.v1.rollout_service_pb2 import SampleChunk
from fourfold.types.v1.experience_pb2 import Experience

Rule = Callable[[NDArray[Any], BoolArray], str]
"""Returns what is wrong with the values of a column, given the action mask of the sample; empty if nothing is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenColumn:
    """One value per token."""

    name: str  # of the field of `Sample` and of `Experience`, or of `SampledColumns`
    number: int  # of the field of the message
    dtype: np.dtype[Any]  # of the bytes on the wire and on the disk; with a shape, if the value is a row
    required: bool = True  # in a message; otherwise a sample may have an array [0]
    absent: float = 0.0  # value of each token of a sample without the column, beside samples that have it
    rule: Rule | None = None

    def fill(self, count: int) -> NDArray[Any]:
        """Return the values of tokens that do not have the column."""
        return np.full(count, self.absent, self.dtype)

    def read(self, data: bytes | memoryview) -> NDArray[Any]:
        """Return the values in some bytes, without a copy where the machine has their byte order."""
        values: NDArray[Any] = np.frombuffer(data, self.dtype)
        return values.astype(values.dtype.newbyteorder("="), copy=False)

    def pack(self, values: NDArray[Any]) -> memoryview:
        """Return the bytes of some values, without a copy where that is possible."""
        return np.ascontiguousarray(values, self.dtype.base).reshape(-1).view(np.uint8).data


class ColumnBuffer:
    """Grows a column, in place. It takes no memory until a token has a value."""

    def __init__(self, column: TokenColumn) -> None:
        self._column = column
        self._data = bytearray()

    def append(self, data: bytes | memoryview, start: int) -> None:
        """Append the bytes of the tokens from `start` on; tokens before it that have no value get `absent`."""
        self._fill_up(start)
        self._data += data

    def array(self, count: int, *, copy: bool) -> NDArray[Any]:
        """Return the values of all `count` tokens, read-only; [0] if none has one. Without a copy, append no more."""
        if self._data:
            self._fill_up(count)
        return self._column.read(bytes(self._data) if copy else memoryview(self._data).toreadonly())

    def _fill_up(self, count: int) -> None:
        if missing := count - len(self._data) // self._column.dtype.itemsize:
            self._data += self._column.fill(missing).tobytes()


def _check_behavior(values: Float32Array, action_mask: BoolArray) -> str:
    # Two passes over the array suffice for a valid sample; only an invalid one needs the search for the wrong value.
    at_most_zero = values <= 0  # False for NaN
    not_numbers = np.count_nonzero(values != values)
    valid = at_most_zero.tobytes() == action_mask.tobytes()
    if valid and not_numbers == len(values) - np.count_nonzero(at_most_zero):
        return ""
    wrong = values[action_mask & ~at_most_zero]
    if len(wrong):
        return f"behavior_logprobs holds {wrong[0]} on a sampled token; it must be at most 0"
    return "behavior_logprobs must be NaN on tokens that were not sampled"


def _check_action_mask(values: BoolArray, action_mask: BoolArray) -> str:
    if values[0]:
        return "action_mask[0] is 1; the first token is never sampled: send a prompt token first"
    return ""


def _check_reference(values: Float32Array, action_mask: BoolArray) -> str:
    return "" if np.isfinite(values[1:]).all() else "reference_logprobs must be finite after the first token"


def _check_rewards(values: Float32Array, action_mask: BoolArray) -> str:
    valid = np.isfinite(values).all() and not values[~action_mask].any()
    return "" if valid else "token_rewards must be finite, and 0 where action_mask is 0"


def _check_loss_mask(values: BoolArray, action_mask: BoolArray) -> str:
    return "loss_mask selects tokens outside action_mask; it must be a subset" if (values & ~action_mask).any() else ""


_INT32: Final = np.dtype("<i4")
_FLOAT32: Final = np.dtype("<f4")
_FLAG: Final = np.dtype(np.bool_)

TOKEN_IDS: Final = TokenColumn(name="token_ids", number=Experience.TOKEN_IDS_FIELD_NUMBER, dtype=_INT32)
ACTION_MASK: Final = TokenColumn(
    name="action_mask", number=Experience.ACTION_MASK_FIELD_NUMBER, dtype=_FLAG, rule=_check_action_mask
)
LOSS_MASK: Final = TokenColumn(
    name="loss_mask",
    number=Experience.LOSS_MASK_FIELD_NUMBER,
    dtype=_FLAG,
    required=False,  # on the wire: an empty one is the action mask
    rule=_check_loss_mask,
)
# In the order of their bytes in an encoded experience, which digests of batches and files have fixed.
COLUMNS: Final = (
    TOKEN_IDS,
    TokenColumn(
        name="behavior_logprobs",
        number=Experience.BEHAVIOR_LOGPROBS_FIELD_NUMBER,
        dtype=_FLOAT32,
        required=False,  # no engine sampled the tokens of data
        absent=np.nan,
        rule=_check_behavior,
    ),
    ACTION_MASK,
    TokenColumn(
        name="reference_logprobs",
        number=Experience.REFERENCE_LOGPROBS_FIELD_NUMBER,
        dtype=_FLOAT32,
        required=False,
        absent=np.nan,
        rule=_check_reference,
    ),
    TokenColumn(
        name="token_rewards",
        number=Experience.TOKEN_REWARDS_FIELD_NUMBER,
        dtype=_FLOAT32,
        required=False,
        rule=_check_rewards,
    ),
    LOSS_MASK,
)
SAMPLED_COLUMNS: Final = (
    TokenColumn(name="token_ids", number=SampleChunk.TOKEN_IDS_FIELD_NUMBER, dtype=_INT32),
    TokenColumn(name="logprobs", number=SampleChunk.LOGPROBS_FIELD_NUMBER, dtype=_FLOAT32),
    TokenColumn(name="constrained", number=SampleChunk.CONSTRAINED_MASK_FIELD_NUMBER, dtype=_FLAG, required=False),
)
