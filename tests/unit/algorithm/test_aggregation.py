"""The weight of a token in the loss, in every mode."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from fourfold.algorithm.aggregation import Mode, sample_weights
from fourfold.arrays import Int64Array

MODES: tuple[Mode, ...] = get_args(Mode)


def i64(values: list[int]) -> Int64Array:
    return np.array(values, np.int64)


def weights(lengths: list[int], mode: Mode) -> list[float]:
    return [float(c) for c in sample_weights(i64(lengths), mode=mode, constant_length=10)]


def test_weights_by_hand() -> None:
    # N = 2 + 0 + 6 = 8 tokens, B' = 2 samples that have some, L = 10
    lengths = [2, 0, 6]
    assert weights(lengths, "token-mean") == [1 / 8, 0, 1 / 8]
    assert weights(lengths, "sequence-mean") == [1 / (2 * 2), 0, 1 / (6 * 2)]
    assert weights(lengths, "sequence-sum") == [1 / 2, 0, 1 / 2]
    assert weights(lengths, "constant-length") == [1 / (10 * 2), 0, 1 / (10 * 2)]
    assert weights(lengths, "token-sum") == [1, 0, 1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_without_tokens_all_weights_are_zero(mode: Mode, lengths: list[int]) -> None:
    assert weights(lengths, mode) == [0.0] * len(lengths)
