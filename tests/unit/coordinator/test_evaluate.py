"""The clustered interval, against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from fourfold_coordinator.training.evaluate import clustered_interval, student_t


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
