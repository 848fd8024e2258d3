"""The load report: free KV cache, and a token rate that counts only the seconds in which samples ran."""

from __future__ import annotations

import pytest

from fourfold_rollout.engine import EngineLoad
from fourfold_rollout.load import LoadMeter
from tests.fakes.clock import FakeClock
from tests.fakes.engine import FakeEngine


class LoadedEngine(FakeEngine):
    """An engine whose load the test sets."""

    def __init__(self) -> None:
        super().__init__(kv_cache_tokens=1000)
        self.running_samples = self.sampled = self.held = 0

    def load(self) -> EngineLoad:
        return EngineLoad(running_samples=self.running_samples, sampled_tokens=self.sampled, held_tokens=self.held)


class Watched:
    """A meter that is read every second."""

    def __init__(self) -> None:
        self.engine, self.clock = LoadedEngine(), FakeClock()
        self.meter = LoadMeter(self.engine, self.clock)
        self.meter.read(updating=False)

    async def seconds(self, count: int, *, tokens: int, running: int = 4, updating: bool = False) -> float:
        """Let so many seconds pass with `tokens` in each; return the rate at the end."""
        rate = 0.0
        for _ in range(count):
            self.engine.running_samples = running
            self.meter.read(updating=updating)
            await self.clock.advance(1.0)
            self.engine.sampled += tokens
            rate = self.meter.read(updating=updating).token_rate
        return rate


async def test_rate_is_an_average_of_the_last_ten_seconds() -> None:
    watched = Watched()
    assert watched.meter.read(updating=False).token_rate == 0
    assert await watched.seconds(3, tokens=100) == pytest.approx(100)
    assert await watched.seconds(5, tokens=300) == pytest.approx((300 + 1500) / 8)
    assert await watched.seconds(20, tokens=50) == pytest.approx(50, rel=0.05)


async def test_time_in_which_nobody_asked_and_little_ran_does_not_slow_it_down() -> None:
    watched = Watched()
    assert await watched.seconds(5, tokens=200, running=0) == pytest.approx(200)
    await watched.clock.advance(300.0)
    watched.engine.sampled += 1000
    assert watched.meter.read(updating=False).token_rate == pytest.approx(200)
    assert await watched.seconds(10, tokens=500) == pytest.approx(500)


async def test_seconds_without_samples_say_nothing_and_those_of_a_stuck_engine_do() -> None:
    watched = Watched()
    assert await watched.seconds(5, tokens=200) == pytest.approx(200)
    idle = await watched.seconds(30, tokens=0, running=0)
    assert idle == pytest.approx(200 * 5 / 6), "the first second began with samples"
    assert await watched.seconds(30, tokens=0, running=4, updating=True) == pytest.approx(idle)
    assert await watched.seconds(11, tokens=0, running=4) == 0


async def test_several_watchers_share_one_measurement() -> None:
    watched = Watched()
    for _ in range(500):
        watched.engine.running_samples = 1
        watched.engine.sampled += 1
        await watched.clock.advance(0.01)
        rate = watched.meter.read(updating=False).token_rate
        assert watched.meter.read(updating=False).token_rate == rate
    assert rate == pytest.approx(100, rel=0.1)


def test_the_count_never_falls_when_samples_are_dropped() -> None:
    watched = Watched()
    counts = []
    for sampled in (10, 4, 6):
        watched.engine.sampled = sampled
        counts.append(watched.meter.read(updating=False).sampled_tokens)
    assert counts == [10, 10, 12]


def test_room_is_what_no_sample_holds_and_never_below_none() -> None:
    watched = Watched()
    for held, free in ((0, 1000), (400, 600), (1500, 0)):
        watched.engine.held = held
        assert watched.meter.read(updating=False).free_kv_cache_tokens == free
