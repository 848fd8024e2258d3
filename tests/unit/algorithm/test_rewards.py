"""From scores to token rewards, against arithmetic by hand."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.algorithm.rewards import overlong_penalty, stop_properly, token_rewards
from fourfold.algorithm.state import RunningMoments
from fourfold.arrays import Float64Array, Int64Array


def f64(values: list[float]) -> Float64Array:
    return np.array(values, np.float64)


def i64(values: list[int]) -> Int64Array:
    return np.array(values, np.int64)


def moments(*batches: list[float]) -> RunningMoments:
    result = RunningMoments()
    for batch in batches:
        result = result.updated(f64(batch))
    return result


# Running normalisation


def test_moments_of_batches_are_those_of_all_scores() -> None:
    # 1 2 3 6 10: mean 22/5, sum of squares 150, m2 = 150 - 22^2/5 = 53.2
    result = moments([1, 2], [], [3, 6, 10])
    assert result.count == 5
    assert result.mean == pytest.approx(4.4, abs=1e-15)
    assert result.m2 == pytest.approx(53.2, abs=1e-13)
    # unbiased: sqrt(53.2 / 4)
    s = math.sqrt(53.2 / 4)
    assert result.normalise(f64([4.4, 0, 10])).tolist() == pytest.approx([0, -4.4 / s, 5.6 / s], abs=1e-14)


@given(st.lists(st.lists(st.floats(-1e6, 1e6), max_size=8), max_size=6))
def test_moments_do_not_depend_on_the_batches(batches: list[list[float]]) -> None:
    scores = [score for batch in batches for score in batch]
    result = moments(*batches)
    assert result.count == len(scores)
    if scores:
        assert result.mean == pytest.approx(statistics.fmean(scores), abs=1e-9)
        assert result.m2 == pytest.approx(len(scores) * statistics.pvariance(scores), rel=1e-9, abs=1e-9)
        assert np.isfinite(result.normalise(f64(scores))).all()


def test_moments_keep_a_small_spread_on_a_large_mean() -> None:
    # E[x^2] - E[x]^2 of numbers near 1e9 has no digits left; the deviations are +-1/2
    result = moments([1e9], [1e9 + 1])
    assert result.mean == 1e9 + 0.5
    assert result.m2 == 0.5


@pytest.mark.parametrize(("value", "count"), [(0.1, 3), (0.7, 7), (0.1, 8), (0.3, 6), (0.7, 16), (-1e6, 3)])
def test_scores_without_spread_are_centred_and_not_divided(value: float, count: int) -> None:
    result = moments([value] * count, [value] * (count + 1), [value])
    assert (result.mean, result.m2) == (value, 0.0)
    assert result.normalise(f64([value, value + 2])).tolist() == [0, value + 2 - value]


def test_one_score_has_no_spread() -> None:
    assert moments([3.0]).normalise(f64([3, 5])).tolist() == [0, 2]
    assert RunningMoments().normalise(f64([3, 5])).tolist() == [3, 5]


# Penalties


def test_overlong_answers_lose_along_a_ramp_that_ends() -> None:
    # max 20, buffer 8: from 12 on; f = 2: 13 loses 2 * 1/8, 16 half, 20 and beyond all
    lengths = i64([0, 11, 12, 13, 16, 20, 21, 1000])
    penalty = overlong_penalty(lengths, max_tokens=20, buffer_tokens=8, factor=2.0)
    assert penalty.tolist() == [0, 0, 0, -0.25, -1, -2, -2, -2]


def test_a_truncated_answer_keeps_a_share_of_its_score() -> None:
    scores, truncated = f64([4, 4, -4, 0]), np.array([True, False, True, True])
    assert stop_properly(scores, truncated, coef=0.25).tolist() == [1, 4, -1, 0]
    assert stop_properly(scores, truncated, coef=0.0).tolist() == [0, 4, 0, 0]
    assert stop_properly(scores, truncated, coef=1.0).tolist() == [4, 4, -4, 0]


def test_below_zero_the_coefficient_is_the_score_of_a_truncated_answer() -> None:
    scores, truncated = f64([4, 4, -4, 0]), np.array([True, False, True, True])
    assert stop_properly(scores, truncated, coef=-0.5).tolist() == [-0.5, 4, -0.5, -0.5]


# Token rewards


def test_the_outcome_sits_on_the_last_action_of_its_sample() -> None:
    # the second and the last sample have no action: their outcomes go nowhere
    rewards = token_rewards(f64([5, 7, 9, 11]), i64([3, 0, 1, 0]), stream=None, kl=None, kl_coef=0.5)
    assert rewards.tolist() == [0, 0, 5, 9]


def test_stream_and_kl_are_added_token_by_token() -> None:
    # R = -0.5 * kl + stream + outcome at the end
    rewards = token_rewards(
        f64([5, 7]), i64([2, 2]), stream=f64([1, 0, 0, 2]), kl=f64([0.2, 0.4, -0.6, 0.8]), kl_coef=0.5
    )
    assert rewards.tolist() == pytest.approx([-0.1 + 1, -0.2 + 5, 0.3, -0.4 + 2 + 7], abs=1e-15)


def test_kl_that_costs_nothing_is_not_looked_at() -> None:
    rewards = token_rewards(f64([5]), i64([2]), stream=None, kl=f64([math.inf, math.nan]), kl_coef=0.0)
    assert rewards.tolist() == [0, 5]


def test_arguments_are_left_as_they_were() -> None:
    stream, outcomes = f64([1, 2]), f64([5])
    token_rewards(outcomes, i64([2]), stream=stream, kl=f64([1, 1]), kl_coef=1.0)
    assert (stream.tolist(), outcomes.tolist()) == ([1, 2], [5])


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_no_actions_no_rewards(lengths: list[int]) -> None:
    outcomes = f64([1.0] * len(lengths))
    assert token_rewards(outcomes, i64(lengths), stream=f64([]), kl=f64([]), kl_coef=1.0).tolist() == []
