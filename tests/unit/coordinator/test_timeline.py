"""Tests the record of when members work."""

from __future__ import annotations

import itertools
import json

import pytest

from fourfold_coordinator.state.timeline import Timeline, parse_line
from tests.fakes.clock import FakeClock


async def test_calls_that_overlap_are_one_interval_and_one_that_runs_is_cut() -> None:
    clock = FakeClock()
    timeline = Timeline(clock)
    timeline.begin("rollout-0", "generate")
    await clock.advance(1.0)
    timeline.begin("rollout-0", "generate")
    timeline.end("rollout-0", "generate")
    await clock.advance(1.0)
    timeline.end("rollout-0", "generate")
    await clock.advance(1.0)
    with timeline.during("rollout-0", "generate"):
        await clock.advance(0.5)
        timeline.begin("trainer-0", "train")
    await clock.advance(0.5)
    line = parse_line(json.dumps(timeline.take(1)))
    assert line.step == 1 and line.seconds == 4.0
    assert line.members == {"rollout-0": {"generate": [(0, 2), (3, 3.5)]}, "trainer-0": {"train": [(3.5, 4)]}}
    await clock.advance(2.0)
    timeline.end("trainer-0", "train")
    line = parse_line(json.dumps(timeline.take(2)))
    assert line.members == {"trainer-0": {"train": [(0, 2)]}}


async def test_many_intervals_are_joined_at_their_smallest_gaps() -> None:
    clock = FakeClock()
    timeline = Timeline(clock)
    for gap in range(1, 30):
        with timeline.during("reward-0", "score"):
            await clock.advance(0.1)
        await clock.advance(gap)
    line = parse_line(json.dumps(timeline.take(1)))
    intervals = line.members["reward-0"]["score"]
    assert len(intervals) == 12 and intervals[0][0] == 0
    gaps = [later[0] - earlier[1] for earlier, later in itertools.pairwise(intervals)]
    assert min(gaps) > 17, "the gaps of 1 to 17 s are gone"


async def test_an_engine_takes_about_75_bytes_of_a_line() -> None:
    clock = FakeClock()
    timeline = Timeline(clock)
    for phase in ("generate", "update"):
        await clock.advance(6.031)
        for name in (names := [f"rollout-{index}" for index in range(1000)]):
            timeline.begin(name, phase)
        await clock.advance(6.031)
        for name in names:
            timeline.end(name, phase)
    assert 70_000 < len(json.dumps(timeline.take(1))) < 80_000


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "Expecting value"),
        ("[]", "it is \\[\\]"),
        ("[" * 100_000, "nested too deeply"),
        ('{"step": 1, "start": NaN, "end": 1, "members": {}}', "start is nan"),
        ('{"step": 1, "start": 1, "end": 1e999, "members": {}}', "end is inf"),
        ('{"step": 1, "start": 1, "end": 2, "members": {"a": {"train": [[1]]}}}', r"members.a.train.0.1 is \[1\]"),
        ('{"step": 1}', "start is .*Field required"),
    ],
)
def test_a_damaged_line_is_an_error_with_the_place_and_the_value(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_line(text)
