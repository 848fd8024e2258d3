"""The clustered interval, pass@k and maj@k, against values worked out by hand and against all subsets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest

from fourfold_coordinator.reporting.estimators import (
    clustered_interval,
    majority_at_k,
    pass_at_k,
    sample_sizes,
    student_t,
)
from fourfold_coordinator.state.eval_results import half_width, mean_of_sets
from tests.support.eval_results import make_result

DRAWS = 1500


def half_width_of(scores: Sequence[float], clusters: Sequence[str]) -> float:
    found = half_width(clustered_interval(scores, clusters)[1])
    assert found is not None
    return found


def test_two_clusters_by_hand() -> None:
    # mean 3; residual sums a: 1 + 1 = 2, b: 1 - 3 = -2
    # variance 2 / 1 * (4 + 4) / 16 = 1, t(1) = 12.706
    mean, interval = clustered_interval([4, 4, 4, 0], ["a", "a", "b", "b"])
    assert mean == 3 and interval == pytest.approx((3 - 12.706205, 3 + 12.706205))


def test_clusters_of_unequal_size_weigh_by_their_answers() -> None:
    # mean 4/3; residual sums a: 2/3, b: 2/3 - 4/3 = -2/3; variance 2 * (8/9) / 9
    assert half_width_of([2, 2, 0], ["a", "b", "b"]) == pytest.approx(12.706205 * math.sqrt(16 / 81))


def test_one_cluster_tells_nothing_of_the_spread() -> None:
    assert clustered_interval([1, 0], ["a", "a"])[1] is None


@pytest.mark.parametrize("score", [-1.0, 2.0, 0.1 - 10])
def test_equal_scores_of_an_unknown_range_have_no_interval(score: float) -> None:
    assert clustered_interval([score] * 6, list("aabbcc"))[1] is None


def test_wilsons_interval_by_hand() -> None:
    # 8 of 10 answers, each alone: squares 10/9 * 1.6, of a coin 1.6, size 1; t(9) = 2.2622 by the table
    mean, interval = clustered_interval([1] * 8 + [0] * 2, list("abcdefghij"))
    a = 2.2622**2 * (16 / 9 + 0.01) / (1.6 + 0.01) / 10
    center, half = (0.8 + a / 2) / (1 + a), math.sqrt(a * 0.16 + a * a / 4) / (1 + a)
    assert mean == 0.8 and interval is not None and interval == pytest.approx((center - half, center + half), rel=1e-3)
    assert interval[1] < 1 and mean - interval[0] > interval[1] - mean


@pytest.mark.parametrize("score", [0.0, 0.1, 1.0])
def test_equal_scores_tell_as_much_as_a_coin_for_each_cluster(score: float) -> None:
    clusters = [name for name in "abcdefghijk" for _ in range(8)]
    mean, interval = clustered_interval([score] * 88, clusters)
    a = 2.2281**2 / 11
    assert mean == pytest.approx(score) and interval is not None
    low, high = interval
    assert 0 <= low <= mean <= high <= 1 and high - low > 0.2
    if score == 1:
        assert interval == pytest.approx((1 / (1 + a), 1), rel=1e-3)
    # The same successes in each cluster have no variance between clusters, but are no certainty.
    assert half_width_of([1, 0, 1, 0], ["a", "a", "b", "b"]) > 0.4


def test_graded_scores_of_a_small_spread_have_a_narrow_interval() -> None:
    scores = [0.5 + 0.01 * math.sin(i) for i in range(200)]
    assert half_width_of(scores, [str(i) for i in range(200)]) == pytest.approx(0.00099, rel=0.02)


@pytest.mark.parametrize(("groups", "size"), [(11, 8), (50, 4), (200, 1)])
@pytest.mark.parametrize("correlation", [0.0, 0.1, 0.3])
def test_intervals_cover_the_truth_as_often_as_they_say(groups: int, size: int, correlation: float) -> None:
    generator = np.random.default_rng(5)
    clusters = np.repeat(np.arange(groups), size).astype(str).tolist()
    for truth in (0.3, 0.9, 0.97, 0.99):
        # Each prompt has a chance of its own; answers of one prompt have this correlation.
        chances = np.full((DRAWS, groups), truth)
        if correlation:
            shape = (1 - correlation) / correlation
            chances = generator.beta(truth * shape, (1 - truth) * shape, chances.shape)
        passed = generator.binomial(size, chances)
        # The interval depends on how many groups have how many successes alone.
        kinds, counts = np.unique(np.sort(passed, axis=1), axis=0, return_counts=True)
        covered = 0
        for kind, count in zip(kinds, counts.tolist(), strict=True):
            scores = (np.arange(size) < kind[:, None]).astype(float).ravel().tolist()
            _, interval = clustered_interval(scores, clusters)
            assert interval is not None and interval[0] >= 0 and interval[1] <= 1
            covered += count * (interval[0] <= truth <= interval[1])
        assert 0.93 <= covered / DRAWS <= 0.98, (truth, covered)


@pytest.mark.parametrize(
    ("degrees", "table"),
    [
        (1, 12.7062),
        (2, 4.3027),
        (3, 3.1824),
        (4, 2.7764),
        (5, 2.5706),
        (7, 2.3646),
        (10, 2.2281),
        (30, 2.0423),
        (1000, 1.9623),
    ],
)
def test_students_quantiles(degrees: int, table: float) -> None:
    assert student_t(degrees) == pytest.approx(table, abs=2e-3)


@pytest.mark.parametrize(("successes", "answers"), [(0, 5), (1, 5), (2, 5), (4, 5), (5, 5), (3, 8)])
def test_pass_at_k_is_the_share_of_the_subsets_with_a_success(successes: int, answers: int) -> None:
    passed = [True] * successes + [False] * (answers - successes)
    for k in range(1, answers + 1):
        subsets = [any(subset) for subset in itertools.combinations(passed, k)]
        assert pass_at_k(successes, answers, k) == pytest.approx(fmean(subsets), abs=1e-15)


def test_pass_at_k_by_hand() -> None:
    # 1 of 4 answers is a success: 1 - C(3, 2) / C(4, 2) = 1 - 3 / 6
    assert pass_at_k(1, 4, 2) == 0.5
    assert pass_at_k(3, 256, 1) == 3 / 256 and pass_at_k(1, 256, 128) == 0.5


def test_the_majority_of_each_block_counts() -> None:
    answers, passed = ["3", "4", "4", "5", "5", "4"], [False, True, True, False, False, True]
    assert majority_at_k(answers, passed, 3) == 0.5, "4 wins the first block, 5 the second one"
    assert majority_at_k(answers, passed, 6) == 1
    assert majority_at_k(answers, passed, 1) == 0.5, "with one vote it is the success rate"
    assert majority_at_k(answers, passed, 4) == 1, "answers after the last whole block are left out"


def test_of_answers_with_equal_votes_the_first_one_wins() -> None:
    assert majority_at_k(["3", "4"], [False, True], 2) == 0
    assert majority_at_k(["4", "3"], [True, False], 2) == 1


def test_samples_without_an_answer_do_not_vote() -> None:
    assert majority_at_k(["", "", "4"], [False, False, True], 3) == 1
    assert majority_at_k(["", ""], [True, True], 2) == 0


def test_sizes_double_and_end_at_the_number_of_answers() -> None:
    assert [sample_sizes(n) for n in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8]]


def test_the_mean_of_sets_is_unweighted() -> None:
    first, second = (replace(make_result("math", score=score)) for score in (0.2, 0.6))
    assert mean_of_sets([replace(first, interval=(0.1, 0.6)), second])[1] is None, "one has no interval"
    sets = [replace(first, interval=(0.17, 0.5)), replace(second, interval=(0.56, 1.0))]
    mean, interval = mean_of_sets(sets)
    assert mean == pytest.approx(0.4) and interval == pytest.approx((0.4 - 0.05 / 2, 0.4 + 0.5 / 2))
    assert half_width(interval) == pytest.approx(0.1375) and half_width(None) is None
    assert mean_of_sets(sets[:1])[1] == pytest.approx((0.17, 0.5))
