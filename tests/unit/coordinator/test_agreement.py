"""The comparison of a shadow's scores with the live ones, against values by hand."""

from __future__ import annotations

import math

import pytest

from fourfold_coordinator.rewards.agreement import AgreementMeter


def of(*groups: tuple[list[float], list[float]]) -> AgreementMeter:
    meter = AgreementMeter()
    for live, shadow in groups:
        meter.add_group(live, shadow)
    return meter


def test_equal_ranks_share_their_mean_rank() -> None:
    # Live ranks 1.5 1.5 3 4, shadow ranks 1 2 3.5 3.5; centred -1 -1 .5 1.5 and -1.5 -.5 1 1
    meter = of(([0.0, 0.0, 1.0, 2.0], [-5.0, 0.0, 7.0, 7.0]))
    assert meter.rank_correlation() == pytest.approx((1.5 + 0.5 + 0.5 + 1.5) / math.sqrt(4.5 * 4.5))
    assert meter.mean_shift() == pytest.approx((-5 + 0 + 6 + 5) / 4)


def test_a_monotone_change_agrees_in_ranks_and_its_opposite_does_not() -> None:
    values = [0.1, 0.7, 0.3, 0.9]
    assert of((values, [math.exp(9 * v) for v in values])).rank_correlation() == pytest.approx(1.0)
    assert of((values, [-v for v in values])).rank_correlation() == pytest.approx(-1.0)


def test_without_a_spread_there_is_no_correlation() -> None:
    assert of(([1.0, 1.0], [0.0, 2.0])).rank_correlation() is None
    assert of(([0.0, 2.0], [1.0, 1.0])).rank_correlation() is None
    assert AgreementMeter().rank_correlation() is None and AgreementMeter().to_proto() is None


def test_signs_are_those_of_the_distance_to_the_mean_of_the_group() -> None:
    # Means 1/2 and 11: the same signs, whatever the shift. In the second group two of four change sides.
    assert of(([0.0, 1.0], [10.0, 12.0])).flip_share() == 0
    assert of(([0.0, 1.0], [10.0, 12.0]), ([0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 1.0, 1.0])).flip_share() == 2 / 6
    # An advantage of exactly 0 has no sign: equal scores against different ones are flips, also for sums like 0.1 * 3.
    assert of(([0.1, 0.1, 0.1], [0.1, 0.1, 0.1])).flip_share() == 0
    assert of(([0.1, 0.1, 0.1], [0.0, 0.0, 1.0])).flip_share() == 1
