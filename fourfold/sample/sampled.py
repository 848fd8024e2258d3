"""The tokens that engines sampled for one sample: as chunks come, and joined from parts of several engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

import numpy as np

from fourfold.arrays import BoolArray, Float32Array, Int32Array
from fourfold.rollout.v1.rollout_service_pb2 import SampleChunk
from fourfold.sample.sample import VersionSpan
from fourfold.sample.token_columns import COLUMNS, SAMPLED_COLUMNS, ColumnBuffer

_COLUMNS: Final = {column.name: column for column in SAMPLED_COLUMNS}
CHUNK_FIELDS: Final = {c.name: SampleChunk.DESCRIPTOR.fields_by_number[c.number].name for c in SAMPLED_COLUMNS}
"""The field of `SampleChunk` that has a column, by name of the column."""
_NO_MASK: Final[BoolArray] = np.empty(0, np.bool_)
_NOT_SAMPLED: Final = -1  # version of tokens that the policy did not sample
_RENAMED: Final = {"logprobs": "behavior_logprobs"}
_OF_SAMPLES: Final = {column.name: column for column in COLUMNS}
_TARGETS: Final = {
    name: _OF_SAMPLES.get(_RENAMED.get(name, name), column) for name, column in _COLUMNS.items() if name != "token_ids"
}
"""The column of a sample that gets the values of an engine's column, by name of the latter."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledColumns:
    """What an engine returns of n tokens that it sampled for one sample."""

    token_ids: Int32Array  # [n]
    logprobs: Float32Array  # [n], natural log, at most 0, of the distribution after temperature, top-p and top-k
    constrained: BoolArray = field(default_factory=lambda: _NO_MASK)
    """[n] or [0], whether a grammar changed the distribution of a token, which is not for training; [0]: of none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledTokens(SampledColumns):
    """Tokens that were sampled one after another, n of them."""

    version_spans: tuple[VersionSpan, ...]  # consecutive; their token counts add up to n


def pack_columns(tokens: SampledColumns) -> dict[str, bytes]:
    """Return the bytes of each column, by name; none if no token has a value of a column that is not required."""
    packed: dict[str, bytes] = {}
    for name, column in _COLUMNS.items():
        values = getattr(tokens, name)
        has_values = column.required or (len(values) and (values != column.absent).any())
        packed[name] = bytes(column.pack(values)) if has_values else b""
    return packed


def read_columns(packed: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the fields of `SampledColumns` from the bytes of each column, by name."""
    return {name: column.read(packed[name]) for name, column in _COLUMNS.items()}


def cut_columns(tokens: SampledColumns, part: slice) -> dict[str, Any]:
    """Return the fields of `SampledColumns` of some neighbours of the tokens."""
    return {name: getattr(tokens, name)[part] for name in _COLUMNS}


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
            if data := getattr(chunk, CHUNK_FIELDS[name]):
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


def sample_columns(turns: Sequence[tuple[Int32Array, SampledTokens]]) -> dict[str, Any]:
    """Return the token columns and version spans of a `Sample`, in which observed and sampled tokens alternate.

    Args:
        turns: The observed tokens, which are the prompt in the first turn, and what was sampled after them.
    """
    token_ids = np.concatenate([ids for observed, sampled in turns for ids in (observed, sampled.token_ids)])
    action_mask = np.zeros(len(token_ids), np.bool_)
    columns: dict[str, Any] = {"token_ids": token_ids, "action_mask": action_mask, "loss_mask": action_mask}
    spans = list[VersionSpan]()
    end = 0
    for observed, sampled in turns:
        begin = end + len(observed)
        end = begin + len(sampled.token_ids)
        action_mask[begin:end] = True
        if len(observed):
            spans.append(VersionSpan(policy_version=_NOT_SAMPLED, token_count=len(observed)))
        spans += sampled.version_spans
        for name, target in _TARGETS.items():
            if len(values := getattr(sampled, name)):
                if target.name not in columns:
                    columns[target.name] = target.fill(len(token_ids))
                columns[target.name][begin:end] = values
    if "constrained" in columns:
        columns["loss_mask"] = action_mask & ~columns.pop("constrained")
    return {**columns, "version_spans": tuple(spans) if len(turns) == 1 else join_spans(spans)}
