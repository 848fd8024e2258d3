"""One rank of many starts alone and takes the memory of its part; a loader that reads everything is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sharded_start import Start, measure

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("start", "fits"),
    [
        pytest.param(Start(shape="7b", world=16, rank=15), True, marks=pytest.mark.soak),
        (Start(shape="1.5b", world=16, fault=True), False),
        (Start(shape="1.5b", world=16, engine=True), True),
    ],
    ids=["reads its part", "reads everything", "with its engine"],
)
def test_a_rank_takes_its_part_the_largest_parameter_and_one_gigabyte(start: Start, fits: bool, tmp_path: Path) -> None:
    memory = measure(start, tmp_path)
    assert memory.disk < 1 << 20, "the files are sparse"
    assert (memory.peak <= memory.limit) == fits, memory
