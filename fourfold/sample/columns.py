"""Samples as columns: one array for each token column of all samples, and one list for each other field of `Sample`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, overload

import numpy as np
from numpy.typing import NDArray

from fourfold.arrays import BoolArray, Int64Array
from fourfold.sample.sample import Sample
from fourfold.sample.token_columns import COLUMNS, ColumnBuffer

_COLUMNS: Final = {column.name: column for column in COLUMNS}
_VALUES: Final = tuple(field.name for field in fields(Sample) if field.name not in _COLUMNS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples(Sequence[Sample]):
    """S samples of N tokens in total: those of a group, or of a step.

    An index gives a `Sample` whose arrays are views of the columns, for errors and other slow paths.
    """

    starts: Int64Array  # [S + 1]: sample i has the tokens starts[i] to starts[i + 1] - 1
    tokens: Mapping[str, NDArray[Any]]  # [N] by token column, read-only; [0] if no sample has the column
    present: Mapping[str, BoolArray]  # [S] by token column: the samples that have it
    values: Mapping[str, Sequence[Any]]  # [S] by other field of `Sample`

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> Samples:
        """Return samples as columns; those that are columns already are returned as they are."""
        if isinstance(samples, Samples):
            return samples
        builder = SamplesBuilder()
        for sample in samples:
            builder.add(sample)
        return builder.build()

    def __len__(self) -> int:
        return len(self.starts) - 1

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]  # also of a negative index; IndexError ends an iteration
        found: dict[str, Any] = {name: self.values[name][index] for name in _VALUES}
        for name, present in self.present.items():
            found[name] = self.array(name, index) if present[index] else self.tokens[name][:0]
        return Sample(**found)

    @property
    def lengths(self) -> Int64Array:
        """The number of tokens of each sample, [S]."""
        return np.diff(self.starts)

    @property
    def trajectories(self) -> list[str]:
        """The id of the trajectory of each sample, [S]."""
        pairs = zip(self.values["trajectory_id"], self.values["sample_id"], strict=True)
        return [trajectory_id or sample_id for trajectory_id, sample_id in pairs]

    def array(self, name: str, index: int) -> NDArray[Any]:
        """Return the token column `name` of a sample, [n]; the column's value `absent` if the sample has none."""
        start, stop, column = self.starts[index], self.starts[index + 1], self.tokens[name]
        return column[start:stop] if len(column) else _COLUMNS[name].fill(stop - start)

    def with_values(self, **values: Sequence[Any]) -> Samples:
        """Return the samples with other values, [S], of some fields."""
        return replace(self, values={**self.values, **values})

    def with_last_tokens(self, *names: str) -> Samples:
        """Return the samples with other columns of flags, which are set for the last token of each sample alone."""
        flags = np.zeros(int(self.starts[-1]), np.bool_)
        flags[self.starts[1:] - 1] = True
        has = np.ones(len(self), np.bool_)
        columns = dict.fromkeys(names, flags), dict.fromkeys(names, has)
        return replace(self, tokens={**self.tokens, **columns[0]}, present={**self.present, **columns[1]})


class SamplesBuilder:
    """Joins samples. A column takes no memory until a sample has it."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._tokens = {name: ColumnBuffer(column) for name, column in _COLUMNS.items()}
        self._present: dict[str, list[bool]] = {name: [] for name in _COLUMNS}
        self._values: dict[str, list[Any]] = {name: [] for name in _VALUES}
        self._count = 0  # tokens

    def add(self, sample: Sample) -> None:
        """Add a sample: its arrays are copied."""
        for name, column in _COLUMNS.items():
            array = getattr(sample, name)
            self._present[name].append(len(array) > 0)
            if len(array):
                self._tokens[name].append(column.pack(array), self._count)
        for name, values in self._values.items():
            values.append(getattr(sample, name))
        self._lengths.append(len(sample.token_ids))
        self._count += len(sample.token_ids)

    def build(self) -> Samples:
        """Return the samples, in the order in which they were added. Add none afterwards."""
        return Samples(
            starts=np.cumsum([0, *self._lengths], dtype=np.int64),
            tokens={name: buffer.array(self._count, copy=False) for name, buffer in self._tokens.items()},
            present={name: np.array(flags, np.bool_) for name, flags in self._present.items()},
            values=self._values,
        )
