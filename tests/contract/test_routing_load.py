"""Work over two rollout services of different speed: real servers and clients, engines that a test moves."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.host.clock import SYSTEM_CLOCK
from fourfold.rollout import load
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold_coordinator.routing.replica import Replica, RetryBudget
from fourfold_coordinator.routing.scheduling import Demand
from fourfold_rollout.generate.servicer import RolloutServicer
from tests.fakes.engine import FakeEngine, FakeSample
from tests.fakes.fleet import Fleet
from tests.fakes.rollout import request, until

TICK_SECONDS = 0.005


class Narrow(FakeEngine):
    """Samples `width` tokens a tick, however many samples it has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    @property
    def running(self) -> list[FakeSample]:
        """Those that are next."""
        return super().running[: self.width]


class Reporting(RolloutServicer):
    """Says of its load what a test says, as often as it is asked."""

    said = pb.WatchLoadResponse()
    quiet = False
    watchers = 0

    async def WatchLoad(self, request: pb.WatchLoadRequest, context: Any) -> AsyncIterator[pb.WatchLoadResponse]:
        self.watchers += 1
        try:
            while not self.quiet:
                yield self.said
                await asyncio.sleep(request.period.ToNanoseconds() / 1e9)
            await asyncio.Event().wait()
        finally:
            self.watchers -= 1


class Loads(Fleet):
    """A fleet whose services report what a test says, and the calls that each of them has done."""

    def __init__(self) -> None:
        super().__init__(tick_seconds=TICK_SECONDS)
        self.reports: dict[str, Reporting] = {}
        self.done: Counter[str] = Counter()
        self._calls = 0

    async def start(self, name: str, *, width: int, **said: Any) -> None:
        """Start a service that samples `width` tokens a tick, and says that of its load."""
        engine = await self.add(name, Narrow(width), rollout=Reporting)
        servicer = engine.servicers.rollout
        assert isinstance(servicer, Reporting)
        servicer.said = pb.WatchLoadResponse(running_sample_count=1, **said)
        self.reports[name] = servicer

    async def reported(self, *names: str) -> None:
        """Wait for a report of each."""
        now = SYSTEM_CLOCK.monotonic
        await until(lambda: all(self.replica(name).load.room(now()) is not None for name in names))

    async def call(self, demand: Demand) -> None:
        """Have two samples drawn."""
        self._calls += 1
        message = request(f"c{self._calls}", sample_count=2)

        async def work(replica: Replica) -> str:
            await replica.rollout.complete(message, timeout=10)
            return replica.member.member_id

        budget = RetryBudget(infrastructure=5, data=0)
        self.done[await self.router.call(Role.ROLE_ROLLOUT, work, demand=demand, spend=budget.spend, version=0)] += 1


@pytest.fixture
async def fleet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Loads]:
    monkeypatch.setattr(load, "PERIOD_SECONDS", 0.02)
    fleet = Loads()
    yield fleet
    await fleet.close()


WORK = Demand(samples=2, tokens=14)


async def test_a_faster_engine_gets_as_much_more_of_the_work(fleet: Loads) -> None:
    await fleet.start(
        "a", width=1, token_rate=1 / TICK_SECONDS, kv_cache_token_count=9000, free_kv_cache_token_count=9000
    )
    await fleet.start(
        "b", width=3, token_rate=3 / TICK_SECONDS, kv_cache_token_count=9000, free_kv_cache_token_count=9000
    )
    await fleet.reported("a", "b")
    await asyncio.gather(*(fleet.call(WORK) for _ in range(40)))
    assert fleet.done["a"] + fleet.done["b"] == 40
    assert 29 <= fleet.done["b"] <= 31, fleet.done
    assert fleet.replica("a").outstanding_size == fleet.replica("b").outstanding_size == 0
    metrics = fleet.router.engine_metrics()
    assert metrics["rollout/engine_tokens_per_second_min"] == 1 / TICK_SECONDS
    assert metrics["rollout/engine_tokens_per_second_max"] == 3 / TICK_SECONDS


async def test_a_full_cache_is_passed_by_until_the_report_is_stale(
    fleet: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.start("a", width=9, token_rate=1e6, kv_cache_token_count=1000, free_kv_cache_token_count=30)
    await fleet.start("b", width=9, token_rate=1.0, kv_cache_token_count=1000, free_kv_cache_token_count=1000)
    await fleet.reported("a", "b")
    for servicer in fleet.reports.values():
        servicer.quiet = True  # no report comes while the calls go out
    await asyncio.sleep(0.1)
    # Two calls fit; whatever comes after them would wait in a's queue, however fast it is.
    await asyncio.gather(*(fleet.call(WORK) for _ in range(10)))
    assert fleet.done == {"a": 2, "b": 8}
    await fleet.call(WORK)
    assert fleet.done.pop("a") == 3, "what is over takes no room any more"
    assert fleet.router.engine_metrics()["rollout/kv_cache_use_max"] == 0.97
    monkeypatch.setattr(load, "STALE_SECONDS", -1.0)
    await asyncio.gather(*(fleet.call(WORK) for _ in range(10)))
    assert fleet.done == {"a": 5, "b": 13}


async def test_an_engine_that_dies_is_neither_watched_nor_waited_for(fleet: Loads) -> None:
    await fleet.start("a", width=9, token_rate=1e6, kv_cache_token_count=1000, free_kv_cache_token_count=900)
    await fleet.start("b", width=9, token_rate=1.0, kv_cache_token_count=1000, free_kv_cache_token_count=900)
    await fleet.reported("a", "b")
    replica = fleet.replica("a")
    await fleet.engines["a"].server.stop(0)
    await asyncio.gather(*(fleet.call(WORK) for _ in range(10)))
    assert fleet.done == {"b": 10}
    assert not replica.unusable_reason, "a watch that fails makes no replica unusable"
    await until(lambda: fleet.reports["b"].watchers == 1)
    fleet.registry.deregister(fleet.engines["b"].token)
    await until(lambda: fleet.reports["b"].watchers == 0)
    watches = [task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__name__", "") == "watch_load"]
    assert len(watches) == 1, "the one of the dead engine, whose lease has not ended"
