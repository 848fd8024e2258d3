"""The tokens that engines sampled for one sample: as chunks come, and joined from parts of several engines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

import numpy as np

from fourfold.arrays import BoolArray, Float32Array, Int32Array
from fourfold.rollout.v1.rollout_service_pb2 import SampleChunk
from fourfold.sample.sample import VersionSpan
from fourfold.sample.token_columns import SAMPLED_COLUMNS, ColumnBuffer

NO_MASK: Final[BoolArray] = np.empty(0, np.bool_)
_COLUMNS: Final = {column.name: column for column in SAMPLED_COLUMNS}
_MESSAGE_FIELDS: Final = {c.name: SampleChunk.DESCRIPTOR.fields_by_number[c.number].name for c in SAMPLED_COLUMNS}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledTokens:
    """Tokens that were sampled one after another, n of them."""

    token_ids: Int32Array  # [n]
    logprobs: Float32Array  # [n], natural log, at most 0
    version_spans: tuple[VersionSpan, ...]  # consecutive; their token counts add up to n
    constrained: BoolArray = field(default_factory=lambda: NO_MASK)
    """[n] or [0], whether a grammar changed the distribution of a token, which is not for training; [0]: of none."""


class TokenDraft:
    """The chunks of one sample as they come."""

    __slots__ = ("_buffers", "_spans", "token_count")

    def __init__(self) -> None:
        self.token_count = 0
        self._buffers = {name: ColumnBuffer(column) for name, column in _COLUMNS.items()}
        self._spans: list[tuple[int, int]] = []  # (policy version, tokens)

    def append(self, chunk: SampleChunk, count: int) -> None:
        """Append the first `count` tokens of a checked chunk."""
        if not count:
            return
        for name, buffer in self._buffers.items():
            if data := getattr(chunk, _MESSAGE_FIELDS[name]):
                buffer.append(data[: count * _COLUMNS[name].dtype.itemsize], self.token_count)
        self.token_count += count
        version = chunk.policy_version
        if self._spans and self._spans[-1][0] == version:
            self._spans[-1] = (version, self._spans[-1][1] + count)
        else:
            self._spans.append((version, count))

    def fields(self) -> dict[str, Any]:
        """Return the fields of `SampledTokens` of the tokens so far."""
        arrays = {name: buffer.array(self.token_count, copy=True) for name, buffer in self._buffers.items()}
        return {**arrays, "version_spans": tuple(VersionSpan(policy_version=v, token_count=n) for v, n in self._spans)}


def join_fields(parts: Sequence[SampledTokens]) -> dict[str, Any]:
    """Return the fields of `SampledTokens` of some parts together; every token keeps the version that sampled it."""
    fields: dict[str, Any] = {"version_spans": join_spans(span for part in parts for span in part.version_spans)}
    for name, column in _COLUMNS.items():
        arrays = [getattr(part, name) for part in parts]
        if not any(map(len, arrays)):
            fields[name] = arrays[0]
            continue
        filled = (a if len(a) else column.fill(len(part.token_ids)) for a, part in zip(arrays, parts, strict=True))
        fields[name] = np.concatenate(list(filled))
    return fields


def join_spans(spans: Iterable[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Return the spans, with equal neighbours as one."""
    joined: list[VersionSpan] = []
    for version, run in groupby(spans, key=lambda span: span.policy_version):
        joined.append(VersionSpan(policy_version=version, token_count=sum(span.token_count for span in run)))
    return tuple(joined)
