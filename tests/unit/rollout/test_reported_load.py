"""Tests of an engine's reported load: how long it counts, and that its watch survives every failure."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from fourfold import metrics as m
from fourfold.errors import Unavailable
from fourfold.host.clock import SYSTEM_CLOCK
from fourfold.rollout import load as module
from fourfold.rollout.engine_step import EngineStep
from fourfold.rollout.load import STALE_SECONDS, EngineLoad, summarize_loads, watch_load
from fourfold.rollout.v1.rollout_service_pb2 import WatchLoadResponse


def report(rate: float = 0.0, *, cache: int = 0, free: int = 0, running: int = 1) -> WatchLoadResponse:
    return WatchLoadResponse(
        running_sample_count=running, token_rate=rate, kv_cache_token_count=cache, free_kv_cache_token_count=free
    )


def test_nothing_is_known_before_a_report_and_of_a_service_that_does_not_tell() -> None:
    load = EngineLoad()
    assert (load.speed(5), load.room(5), load.cache_use(5), load.take_fullest()) == (None, None, None, 0)
    load.take(report(), 5)
    assert (load.speed(5), load.room(5), load.cache_use(5), load.take_fullest()) == (None, None, None, 0)


def test_a_report_is_known_until_it_is_stale() -> None:
    load = EngineLoad()
    load.take(report(50.0, cache=100, free=25), 10)
    late = 10 + STALE_SECONDS
    assert (load.speed(late), load.room(late), load.cache_use(late)) == (50, 25, 0.75)
    late += 0.01
    assert (load.speed(late), load.room(late), load.cache_use(late)) == (None, 0, None)


@pytest.mark.parametrize("rate", [math.nan, math.inf, -math.inf, -5.0])
def test_numbers_that_make_no_sense_are_not_known(rate: float) -> None:
    load = EngineLoad()
    load.take(report(rate, cache=-5, free=7), 0)
    assert (load.speed(0), load.room(0)) == (None, None)
    load.take(report(cache=10, free=20), 0)
    assert load.room(0) == 10
    load.take(report(cache=10, free=-20), 0)
    assert (load.room(0), load.cache_use(0)) == (0, 1)


def test_room_is_that_of_the_report_less_what_was_given_since() -> None:
    load = EngineLoad()
    load.take(report(cache=100, free=60), 0)
    early, other = load.in_flight(30), load.in_flight(20)
    early.__enter__()
    other.__enter__()
    assert load.room(0) == 10
    other.__exit__(None, None, None)
    assert load.room(0) == 30
    load.take(report(cache=100, free=40), 1)
    assert load.room(1) == 40
    early.__exit__(None, None, None)
    assert load.room(1) == 40, "the report has counted it; the next one will not"


def test_an_engine_that_runs_empty_is_still_known_to_be_fast() -> None:
    load = EngineLoad()
    load.take(report(800.0), 0)
    load.take(report(20.0), 1)
    assert 780 < (load.speed(1) or 0) < 800
    load.take(report(20.0), 61)
    assert 380 < (load.speed(61) or 0) < 400
    load.take(report(0.0, running=0), 600)
    assert 380 < (load.speed(600) or 0) < 400, "idle time says nothing"
    load.take(report(900.0), 601)
    assert load.speed(601) == 900


def watched(step: EngineStep, numbers: list[tuple[int, float]], *, updating: bool = False) -> EngineLoad:
    """Return the load after reports of a second each, of an engine with so many samples and tokens in its cache."""
    load, sampled, now = EngineLoad(), 0.0, 0.0
    for running, context in numbers:
        for _ in range(2):
            now += 1
            if running:
                sampled += running / step.seconds(running, context)
            load.take(
                WatchLoadResponse(
                    running_sample_count=running,
                    sampled_token_count=round(sampled),
                    kv_cache_token_count=10**6,
                    free_kv_cache_token_count=10**6 - round(context),
                    updating_weights=updating,
                ),
                now,
            )
        now += 1
        load.take(WatchLoadResponse(sampled_token_count=round(sampled)), now)
    return load


def test_the_time_of_an_engine_step_is_fitted_to_the_reports() -> None:
    step = EngineStep(base=2e-3, per_sample=1e-5, per_context_token=2e-8)
    load = watched(step, [(256, 20_000), (0, 0), (128, 100_000), (16, 40_000), (2, 9_000)])
    fitted = load.engine_step()
    assert fitted is not None
    assert fitted.base == pytest.approx(2e-3, rel=0.01)
    assert fitted.per_sample == pytest.approx(1e-5, rel=0.02)
    assert fitted.per_context_token == pytest.approx(2e-8, rel=0.02)
    metrics = summarize_loads([load, EngineLoad()], now=0)
    assert metrics[m.ENGINE_STEP_BASE] == fitted.base
    assert metrics[m.ENGINE_STEP_SAMPLE] == fitted.per_sample
    assert metrics[m.ENGINE_STEP_CONTEXT] == fitted.per_context_token
    assert summarize_loads([EngineLoad()], now=0) == {}


def test_the_time_of_an_engine_step_is_unknown_without_a_variety_of_busy_seconds() -> None:
    step = EngineStep(base=2e-3, per_sample=1e-5)
    assert watched(step, [(256, 20_000), (256, 90_000)]).engine_step() is None
    assert watched(step, [(256, 20_000), (16, 9_000)], updating=True).engine_step() is None
    load = watched(step, [(256, 20_000), (16, 9_000)])
    before = load.engine_step()
    assert before is not None
    load.take(WatchLoadResponse(running_sample_count=5, sampled_token_count=0), 100.0)
    load.take(WatchLoadResponse(running_sample_count=5, sampled_token_count=10**6), 100.1)
    load.take(WatchLoadResponse(running_sample_count=5, sampled_token_count=2 * 10**6), 200.0)
    assert load.engine_step() == before, "no interval has the length of a period"


def test_the_fullest_moment_is_reported_once() -> None:
    load = EngineLoad()
    for free in (80, 10, 50):
        load.take(report(cache=100, free=free), 0)
    assert (load.take_fullest(), load.take_fullest()) == (0.9, 0)


class Streams:
    """A client whose streams do one after the other what a test says."""

    peer = "rollout-0"

    def __init__(self, *ways: str) -> None:
        self.ways, self.opened = list(ways), 0

    def watch_load(self, *, period: float) -> AsyncGenerator[WatchLoadResponse, None]:
        assert period == module.PERIOD_SECONDS
        self.opened += 1
        return self._stream(self.ways.pop(0) if self.ways else "silent", self.opened)

    async def _stream(self, way: str, rate: float) -> AsyncGenerator[WatchLoadResponse, None]:
        if way == "refused":
            raise Unavailable("it does not know WatchLoad")
        yield report(rate)
        if way == "breaks":
            raise Unavailable("connection lost")
        if way == "silent":
            await asyncio.Event().wait()


async def test_a_watch_opens_again_what_ended_broke_or_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD_SECONDS", 0.01)
    monkeypatch.setattr(module, "STALE_SECONDS", 0.05)
    client: Any = Streams("refused", "ends", "breaks", "silent", "refused")
    load = EngineLoad()
    task = asyncio.create_task(watch_load(client, load, SYSTEM_CLOCK))
    async with asyncio.timeout(5):
        while client.opened < 6 or (load.speed(SYSTEM_CLOCK.monotonic()) or 0) < 6:
            await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_an_engine_is_silent_when_its_reports_stopped() -> None:
    load = EngineLoad()
    assert not load.silent(100.0), "a service need not report"
    load.take(report(1.0), 100.0)
    assert not load.silent(100.0 + module.STALE_SECONDS)
    assert load.silent(100.1 + module.STALE_SECONDS)


def test_an_engine_is_stalled_when_it_has_samples_and_its_tokens_do_not_grow() -> None:
    def at(now: float, *, samples: int = 1, tokens: int = 0, updating: bool = False) -> bool:
        load.take(
            WatchLoadResponse(running_sample_count=samples, sampled_token_count=tokens, updating_weights=updating), now
        )
        return load.stalled(now)

    load, limit = EngineLoad(), module.STALL_SECONDS
    assert not load.stalled(1e6), "a service need not report"
    assert not at(100.0, tokens=7), "the time before the first report does not count"
    assert not at(100.0 + limit, tokens=7) and at(101.0 + limit, tokens=7)
    assert not load.stalled(102.0 + limit + module.STALE_SECONDS), "without reports nothing is known"
    load.restart_stall(102.0 + limit)
    assert not at(102.0 + 2 * limit, tokens=7) and at(103.0 + 2 * limit, tokens=7)
    for since, (samples, updating) in enumerate(((1, False), (1, True), (0, False))):
        progress = 103.0 + (3 + 2 * since) * limit
        assert not at(progress, tokens=8, samples=samples, updating=updating), "a token, an update, nothing to do"
        assert not at(progress + limit, tokens=8) and at(progress + limit + 1, tokens=8)


def test_counts_of_tokens_begin_again_when_they_are_taken() -> None:
    counts = module.TokenCounts()
    counts.add(continued=3, lost=0)
    counts.add(continued=4, lost=0)
    assert counts.take() == {"rollout/continued_tokens": 7.0}
    counts.add(continued=0, lost=2)
    assert counts.take() == {"rollout/lost_tokens": 2.0} and counts.take() == {}
