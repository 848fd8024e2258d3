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


def weights(lengths: list[int], mode: Mode, constant_length: int = 10) -> list[float]:
    return [float(c) for c in sample_weights(i64(lengths), mode=mode, constant_length=constant_length)]


def test_weights_by_hand() -> None:
    # N = 2 + 0 + 6 = 8 tokens, B' = 2 samples that have some, L = 10
    lengths = [2, 0, 6]
    assert weights(lengths, "token-mean") == [1 / 8, 0, 1 / 8]
    assert weights(lengths, "sequence-mean") == [1 / (2 * 2), 0, 1 / (6 * 2)]
    assert weights(lengths, "sequence-sum") == [1 / 2, 0, 1 / 2]
    assert weights(lengths, "constant-length") == [1 / (10 * 2), 0, 1 / (10 * 2)]
    assert weights(lengths, "token-sum") == [1, 0, 1]


def test_only_the_constant_length_mode_reads_the_constant() -> None:
    for mode in MODES:
        same = weights([2, 3], mode, 10) == weights([2, 3], mode, 20)
        assert same == (mode != "constant-length")


@pytest.mark.parametrize("seed", range(20))
def test_the_weights_of_all_tokens_sum_to_what_the_mode_means(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(0, 9, 12)
    lengths[0] = 1
    tokens, alive = sum(lengths.tolist()), sum(1 for n in lengths.tolist() if n)
    sums = {
        mode: sum(n * c for n, c in zip(lengths.tolist(), weights(lengths.tolist(), mode), strict=True))
        for mode in MODES
    }
    assert sums == pytest.approx(
        {
            "token-mean": 1,
            "sequence-mean": 1,
            "sequence-sum": tokens / alive,
            "constant-length": tokens / (10 * alive),
            "token-sum": tokens,
        }
    )


def test_every_sample_has_the_same_part_of_a_sequence_mean() -> None:
    lengths = [1, 7, 0, 100]
    parts = [n * c for n, c in zip(lengths, weights(lengths, "sequence-mean"), strict=True)]
    assert parts == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_without_tokens_all_weights_are_zero(mode: Mode, lengths: list[int]) -> None:
    assert weights(lengths, mode) == [0.0] * len(lengths)


@pytest.mark.parametrize("mode", MODES)
def test_a_sample_without_tokens_changes_no_other(mode: Mode) -> None:
    assert weights([3, 0, 5, 0], mode) == [weights([3, 5], mode)[0], 0, weights([3, 5], mode)[1], 0]
