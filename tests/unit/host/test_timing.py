"""Histograms of durations, and the time spent in each phase."""

from __future__ import annotations

import math
from enum import Enum

from fourfold.host.timing import BUCKETS, Histogram, PhaseSeconds
from tests.fakes.clock import FakeClock


class Light(Enum):
    RED = "red"
    GREEN = "green"
    DARK = "dark"


def test_a_limit_belongs_to_the_bucket_below_it() -> None:
    histogram = Histogram()
    for seconds in (0.0, BUCKETS[0], math.nextafter(BUCKETS[0], 1), BUCKETS[-1], BUCKETS[-1] + 1, math.inf):
        histogram.add(seconds)
    assert histogram.counts == [2, 1, *[0] * (len(BUCKETS) - 3), 1, 2]


async def test_every_second_belongs_to_one_phase(clock: FakeClock) -> None:
    times = PhaseSeconds(Light.RED, clock=clock)
    await clock.advance(2)
    times.enter(Light.GREEN)
    await clock.advance(3)
    times.enter(Light.RED)
    await clock.advance(5)
    assert times.totals() == {Light.RED: 7, Light.GREEN: 3, Light.DARK: 0}
