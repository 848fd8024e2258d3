"""Growth of memory as a soak measures it."""

from __future__ import annotations

import random

import pytest

from tests.support.soak_measure import Row, grown

MIB = 1 << 20


def rows(count: int, *, leak: int = 0, every: int = 0, noise: int = 8 * MIB, warm: int = 0) -> list[Row]:
    """Rounds in which memory grows by `leak` bytes each, by `warm` in the first third, and a thread stays each
    `every` rounds."""
    choice = random.Random(0)
    return [
        Row(
            13.0 * n,
            {"service: threads": 12 + (n // every if every else 0)},
            {"engine: own": 1800 * MIB + leak * n + warm * min(n, count // 3) + choice.randrange(noise)},
            {},
        )
        for n in range(count)
    ]


@pytest.mark.parametrize("count", [9, 10, 120])
def test_noise_and_a_warm_up_are_no_growth(count: int) -> None:
    assert grown(rows(count, noise=2 * MIB, warm=40 * MIB)) == []


@pytest.mark.parametrize("count", [9, 10, 120])
def test_memory_that_grows_to_the_end_is(count: int) -> None:
    (found,) = grown(rows(count, leak=3 * MIB, noise=2 * MIB))
    assert found.startswith("engine: own: ")


@pytest.mark.parametrize(("count", "every"), [(9, 1), (120, 30)])
def test_one_thread_more_is(count: int, every: int) -> None:
    (found,) = grown(rows(count, every=every, noise=1))
    assert found.startswith("service: threads: ")


def test_too_few_rounds_say_nothing() -> None:
    with pytest.raises(AssertionError, match="too few"):
        grown(rows(5))
