"""One rank of many starts alone and takes the memory of its part; a loader that reads everything is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold_bench.harness import BenchmarkRun
from fourfold_bench.sharded_start import StartBenchmark, StartSettings

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("settings", "fits"),
    [
        pytest.param(StartSettings(shape="7b", world=16, rank=15), True, marks=pytest.mark.soak),
        (StartSettings(shape="1.5b", world=16, fault="whole"), False),
        (StartSettings(shape="1.5b", world=16, engine=True), True),
    ],
    ids=["reads its part", "reads everything", "with its engine"],
)
def test_a_rank_takes_its_part_the_largest_parameter_and_one_gigabyte(
    settings: StartSettings, fits: bool, tmp_path: Path
) -> None:
    benchmark = StartBenchmark()
    results = benchmark.measure(settings, BenchmarkRun(folder=tmp_path, profile=None))
    assert results["disk_bytes"] < 1 << 20, "the files are sparse"
    assert (not benchmark.failures({"results": results})) == fits, results
