"""The clustered interval, pass@k and maj@k, against values worked out by hand and against all subsets."""

from __future__ import annotations

import itertools
import math
from statistics import fmean

import pytest

from fourfold_coordinator.training.evaluation.estimators import (
    clustered_interval,
    majority_at_k,
    mean_of_sets,
    pass_at_k,
    sample_sizes,
    student_t,
)


def test_two_clusters_by_hand() -> None:
    # mean 0.75; residual sums a: +0.25 + 0.25 = 0.5, b: +0.25 - 0.75 = -0.5
    # variance 2 / 1 * (0.25 + 0.25) / 16 = 0.0625, standard error 0.25, t(1) = 12.706
    mean, half_width = clustered_interval([1, 1, 1, 0], ["a", "a", "b", "b"])
    assert mean == 0.75
    assert half_width == pytest.approx(12.706205 * 0.25)


def test_answers_that_are_alone_in_their_cluster_give_the_plain_interval() -> None:
    # sample variance of 0, 1, 2, 3, 4: 2.5; standard error sqrt(2.5 / 5); t(4) = 2.776
    _, half_width = clustered_interval([0, 1, 2, 3, 4], list("abcde"))
    assert half_width == pytest.approx(2.776445 * math.sqrt(0.5))


def test_copies_of_an_answer_add_no_certainty() -> None:
    mean, once = clustered_interval([0, 1, 1], list("abc"))
    same_mean, often = clustered_interval([0] * 8 + [1] * 16, ["a"] * 8 + ["b"] * 8 + ["c"] * 8)
    assert often == pytest.approx(once)
    assert same_mean == mean


def test_clusters_of_unequal_size_weigh_by_their_answers() -> None:
    # mean 2/3; residual sums a: 1/3, b: 1/3 - 2/3 = -1/3; variance 2 * (2/9) / 9
    mean, half_width = clustered_interval([1, 1, 0], ["a", "b", "b"])
    assert mean == pytest.approx(2 / 3)
    assert half_width == pytest.approx(12.706205 * math.sqrt(4 / 81))


def test_one_cluster_tells_nothing_of_the_spread() -> None:
    assert clustered_interval([1, 0], ["a", "a"])[1] is None


def test_equal_clusters_have_no_spread() -> None:
    assert clustered_interval([1, 0, 1, 0], ["a", "a", "b", "b"])[1] == 0


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


def test_majority_at_k_is_unbiased() -> None:
    # All orders of 4 answers: the mean over the orders is that over all ordered draws of 2.
    pool = [("3", False), ("4", True), ("4", True), ("5", False)]
    means = [
        fmean(majority_at_k([text for text, _ in each], [passed for _, passed in each], 2) for each in all_orders)
        for all_orders in (itertools.permutations(pool), itertools.permutations(pool, 2))
    ]
    assert means[0] == pytest.approx(means[1])


def test_sizes_double_and_end_at_the_number_of_answers() -> None:
    assert [sample_sizes(n) for n in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8]]


def test_the_mean_of_sets_is_unweighted() -> None:
    mean, half_width = mean_of_sets([(0.2, 0.3), (0.6, 0.4)])
    assert mean == pytest.approx(0.4) and half_width == pytest.approx(0.25)
    assert mean_of_sets([(0.2, 0.3), (0.6, None)])[1] is None
    assert mean_of_sets([(0.2, 0.3)]) == (0.2, 0.3)
