"""Work over two rollout services of different speed: real servers and clients, engines that a test moves."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.host.clock import SYSTEM_CLOCK
from fourfold.rollout import load
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rollout.v1.rollout_service_pb2_grpc import add_RolloutServiceServicer_to_server
from fourfold.rpc.channel import open_channel
from fourfold.rpc.server import Server
from fourfold_coordinator.routing.registry import Member, Registry
from fourfold_coordinator.routing.replica import Replica, RetryBudget
from fourfold_coordinator.routing.router import Router
from fourfold_coordinator.routing.scheduling import Demand, prefix_keys
from fourfold_rollout.generate.admission import GenerateLimits
from fourfold_rollout.generate.servicer import RolloutServicer, ServedModel
from fourfold_rollout.update.controller import WeightController
from tests.fakes.engine import CONTEXT, VOCABULARY, FakeEngine, FakeSample
from tests.fakes.rollout import NO_QUOTAS, SHA256, request, until

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


class Fleet:
    """A router and its rollout services."""

    def __init__(self) -> None:
        self.registry = Registry(clock=SYSTEM_CLOCK, tokenizer_sha256=SHA256, ttl=60)
        self.router = Router(
            self.registry,
            open_channel=lambda member: open_channel(member.target, None),
            wait_seconds=5,
        )
        self.servers: dict[str, Server] = {}
        self.servicers: dict[str, Reporting] = {}
        self.tokens: dict[str, bytes] = {}
        self.done: Counter[str] = Counter()
        self._tasks = [asyncio.create_task(self.router.run())]
        self._weights: list[WeightController] = []
        self._calls = 0

    async def start(self, name: str, *, width: int, **said: Any) -> Replica:
        """Start a service that samples `width` tokens a tick, and says that of its load."""
        engine = Narrow(width)
        weights = WeightController(engine, update_timeout=5)
        limits = GenerateLimits(
            max_context_tokens=CONTEXT,
            vocabulary_size=VOCABULARY,
            max_concurrent_samples=1000,
            kv_cache_tokens=0,
            stop_token_ids=(),
        )
        model = ServedModel(name="tiny", tokenizer_sha256=SHA256, limits=limits)
        servicer = Reporting(model, engine, weights, NO_QUOTAS)
        servicer.said = pb.WatchLoadResponse(running_sample_count=1, **said)
        server = Server(listen="127.0.0.1:0", security=None)
        server.add(pb.DESCRIPTOR.services_by_name["RolloutService"], add_RolloutServiceServicer_to_server, servicer)
        target = await server.start()
        server.set_ready(True)
        self.servers[name], self.servicers[name] = server, servicer
        self._weights.append(weights)
        self._tasks.append(asyncio.create_task(_move(engine)))
        self.tokens[name] = self.registry.register(
            Member(
                member_id=name,
                incarnation=name * 32,
                role=Role.ROLE_ROLLOUT,
                target=target,
                tokenizer_sha256=SHA256,
            )
        )
        replica = self.replica(name)
        await until(lambda: replica.present)
        replica.version = 0
        self.router.set_unusable_reason(replica, "")
        return replica

    def replica(self, name: str) -> Replica:
        return next(r for r in self.router.replicas(Role.ROLE_ROLLOUT) if r.member.member_id == name)

    async def reported(self, *names: str) -> None:
        """Wait for a report of each."""
        now = SYSTEM_CLOCK.monotonic
        await until(lambda: all(self.replica(name).load.room(now()) is not None for name in names))

    async def call(self, demand: Demand, *, tries: int = 5) -> None:
        """Have two samples drawn."""
        self._calls += 1
        message = request(f"c{self._calls}", sample_count=2)

        async def work(replica: Replica) -> str:
            await replica.rollout.complete(message, timeout=10)
            return replica.member.member_id

        budget = RetryBudget(infrastructure=tries, data=0)
        self.done[await self.router.call(Role.ROLE_ROLLOUT, work, demand=demand, spend=budget.spend, version=0)] += 1

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for weights in self._weights:
            await weights.close()
        for server in self.servers.values():
            await server.stop(0)


async def _move(engine: FakeEngine) -> None:
    while True:
        await asyncio.sleep(TICK_SECONDS)
        engine.tick()


@pytest.fixture
async def fleet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    monkeypatch.setattr(load, "PERIOD_SECONDS", 0.02)
    fleet = Fleet()
    yield fleet
    await fleet.close()


WORK = Demand(samples=2, tokens=14)


async def test_a_faster_engine_gets_as_much_more_of_the_work(fleet: Fleet) -> None:
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


async def test_services_that_do_not_tell_their_load_share_evenly(fleet: Fleet) -> None:
    await fleet.start("a", width=1)
    await fleet.start("b", width=3)
    await asyncio.gather(*(fleet.call(WORK) for _ in range(40)))
    assert fleet.done == {"a": 20, "b": 20}
    assert fleet.router.engine_metrics() == {}


async def test_a_full_cache_is_passed_by_until_the_report_is_stale(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.start("a", width=9, token_rate=1e6, kv_cache_token_count=1000, free_kv_cache_token_count=30)
    await fleet.start("b", width=9, token_rate=1.0, kv_cache_token_count=1000, free_kv_cache_token_count=1000)
    await fleet.reported("a", "b")
    for servicer in fleet.servicers.values():
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


async def test_calls_of_one_prompt_meet_in_one_cache(fleet: Fleet) -> None:
    await fleet.start("a", width=9)
    await fleet.start("b", width=9)
    prompt = prefix_keys(np.arange(3000, dtype=np.int32))
    first = asyncio.create_task(fleet.call(WORK))  # a has something to do, so that the prompt goes to b
    await until(lambda: fleet.replica("a").outstanding > 0)
    await fleet.call(Demand(samples=2, tokens=14, prefix=prompt))
    await first
    assert fleet.done == {"a": 1, "b": 1}
    await fleet.call(Demand(samples=2, tokens=14, prefix=prompt))
    assert fleet.done == {"a": 1, "b": 2}
    fleet.replica("b").version = 1  # its cache is of no use to new weights
    await fleet.call(Demand(samples=2, tokens=14, prefix=prompt))
    assert fleet.done == {"a": 2, "b": 2}


async def test_an_engine_that_dies_is_neither_watched_nor_waited_for(fleet: Fleet) -> None:
    await fleet.start("a", width=9, token_rate=1e6, kv_cache_token_count=1000, free_kv_cache_token_count=900)
    await fleet.start("b", width=9, token_rate=1.0, kv_cache_token_count=1000, free_kv_cache_token_count=900)
    await fleet.reported("a", "b")
    replica = fleet.replica("a")
    await fleet.servers["a"].stop(0)
    await asyncio.gather(*(fleet.call(WORK) for _ in range(10)))
    assert fleet.done == {"b": 10}
    assert not replica.unusable_reason, "a watch that fails makes no replica unusable"
    await until(lambda: fleet.servicers["b"].watchers == 1)
    fleet.registry.deregister(fleet.tokens["b"])
    await until(lambda: fleet.servicers["b"].watchers == 0)
    watches = [task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__name__", "") == "watch_load"]
    assert len(watches) == 1, "the one of the dead engine, whose lease has not ended"
