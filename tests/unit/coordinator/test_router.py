"""Tests the choice of a replica, the cost of a failure, and the wait for a replica."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import DeadlinePassed, InvalidInput, Overloaded, PeerFault, PermissionDenied, Unavailable
from fourfold.host.clock import SYSTEM_CLOCK
from fourfold.rpc import circuit_breaker
from fourfold.rpc.channel import open_channel
from fourfold_coordinator.routing import router
from fourfold_coordinator.routing.registry import Member, Registry
from fourfold_coordinator.routing.replica import (
    NOT_INSPECTED,
    FatalRunError,
    Flight,
    GivenUp,
    Interrupted,
    Replica,
    RetryBudget,
    ServiceMissing,
)
from fourfold_coordinator.routing.router import Router
from fourfold_coordinator.routing.scheduling import Demand
from fourfold_coordinator.state.faults import FaultLog

ROLE = Role.ROLE_REWARD


class Bench:
    """A router and members without servers: the work of a call is a function of the test."""

    def __init__(self, *, wait_seconds: float = 0.3) -> None:
        self.waits: list[str] = []
        self.registry = Registry(clock=SYSTEM_CLOCK, tokenizer_sha256=b"t" * 32, ttl=60)
        self.router = Router(
            self.registry,
            open_channel=lambda member: open_channel(member.target, None),
            wait_seconds=wait_seconds,
            on_wait=self.waits.append,
        )
        self.tokens: dict[str, bytes] = {}

    def join(self, name: str, *, incarnation: str = "a", capacity: int = 0, role: Any = ROLE) -> Replica:
        self.tokens[name] = self.registry.register(
            Member(
                member_id=name,
                incarnation=incarnation * 32,
                role=role,
                target="127.0.0.1:9",
                tokenizer_sha256=b"t" * 32 if role != ROLE else b"",
            )
        )
        replica = next(r for r in self.router.replicas(role) if r.member.member_id == name)
        replica.capacity = capacity
        self.router.set_unusable_reason(replica, "")
        return replica

    async def call(
        self,
        work: Callable[[Replica], Any],
        *,
        samples: int = 1,
        infrastructure: int = 5,
        data: int = 1,
        role: Any = ROLE,
        version: int | None = None,
    ) -> Any:
        budget = RetryBudget(infrastructure=infrastructure, data=data)
        async with asyncio.timeout(10):
            return await self.router.call(
                role, work, demand=Demand(samples=samples), spend=budget.spend, version=version
            )


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    for replica in bench.router.replicas(ROLE):
        await replica.channel.close()


async def name(replica: Replica) -> str:
    return replica.member.member_id


async def test_work_goes_to_the_replica_with_the_fewest_samples(bench: Bench) -> None:
    for member in ("a", "b", "c"):
        bench.join(member)
    gate = asyncio.Event()
    begun: list[tuple[str, int]] = []

    def piece(samples: int) -> Any:
        async def work(replica: Replica) -> None:
            begun.append((replica.member.member_id, samples))
            await gate.wait()

        return asyncio.create_task(bench.call(work, samples=samples))

    tasks = [piece(samples) for samples in (4, 2, 1, 1, 1, 2)]
    while len(begun) < 6:
        await asyncio.sleep(0)
    assert begun == [("a", 4), ("b", 2), ("c", 1), ("c", 1), ("b", 1), ("c", 2)]
    gate.set()
    await asyncio.gather(*tasks)
    assert [r.outstanding for r in bench.router.replicas(ROLE)] == [0, 0, 0]


async def test_a_full_replica_is_waited_for_and_work_goes_out_in_its_order(bench: Bench) -> None:
    replica = bench.join("a", capacity=4)
    running: list[int] = []
    order: list[int] = []

    def piece(number: int, samples: int) -> Any:
        async def work(_: Replica) -> None:
            order.append(number)
            running.append(samples)
            assert sum(running) <= 4 and replica.outstanding <= 4
            await asyncio.sleep(0.02)
            running.remove(samples)

        return bench.call(work, samples=samples)

    await asyncio.gather(*(piece(i, samples) for i, samples in enumerate((3, 2, 1, 4, 1, 3))))
    assert order == sorted(order), "no call overtakes another"


async def test_a_dead_replica_costs_one_try_and_another_one_does_the_work(bench: Bench) -> None:
    for member in ("a", "b"):
        bench.join(member)
    tried: list[str] = []

    async def work(replica: Replica) -> str:
        tried.append(replica.member.member_id)
        if replica.member.member_id == "a":
            raise Unavailable("connection refused")
        return "done"

    assert await bench.call(work, infrastructure=1) == "done"
    assert tried == ["a", "b"]
    assert await bench.call(work, infrastructure=0) == "done", "the dead one rests"
    assert tried == ["a", "b", "b"]


async def test_an_interruption_is_no_failure_and_the_rest_goes_elsewhere_with_its_own_demand(bench: Bench) -> None:
    for member in ("a", "b"):
        bench.join(member)
    left, tried, spent = [5], list[tuple[str, int]](), list[str]()

    async def work(replica: Replica) -> str:
        tried.append((replica.member.member_id, replica.outstanding))
        if len(tried) == 1:
            left[0] = 2
            raise Interrupted("the engine gave the request up", reason="ABORTED")
        return "done"

    call = bench.router.call(
        ROLE, work, demand=lambda: Demand(samples=left[0]), spend=lambda error: spent.append(error.reason)
    )
    assert await call == "done"
    assert tried == [("a", 5), ("b", 2)] and spent == ["ABORTED"]
    assert not bench.router.replicas(ROLE)[0].breaker.failures and not bench.router.faults.counts()


async def test_data_failures_have_a_budget_of_their_own(bench: Bench) -> None:
    bench.join("a")
    tries: list[int] = []

    async def work(_: Replica) -> None:
        tries.append(1)
        raise InvalidInput("token 9 is outside the vocabulary", reason="BAD_PROMPT")

    with pytest.raises(GivenUp) as error:
        await bench.call(work, infrastructure=5, data=1)
    assert len(tries) == 2 and error.value.reason == "BAD_PROMPT"


async def test_an_overloaded_replica_rests_as_long_as_it_asks(bench: Bench) -> None:
    bench.join("a")
    times: list[float] = []

    async def work(_: Replica) -> str:
        times.append(asyncio.get_running_loop().time())
        if len(times) == 1:
            raise Overloaded("queue full", retry_after=0.15)
        return "done"

    assert await bench.call(work) == "done"
    assert 0.15 <= times[1] - times[0] < 5


async def test_a_replica_that_is_full_of_our_own_work_costs_no_try(bench: Bench) -> None:
    """It takes two pieces at a time and does not say so beforehand."""
    replica = bench.join("a")
    inside: list[int] = []
    refused: list[int] = []

    def piece(number: int) -> Any:
        async def work(_: Replica) -> int:
            if len(inside) == 2:
                refused.append(number)
                raise Overloaded("too many tokens", retry_after=0.5)
            inside.append(number)
            await asyncio.sleep(0.02)
            inside.remove(number)
            return number

        return bench.call(work, samples=4, infrastructure=0)

    assert await asyncio.gather(*(piece(i) for i in range(6))) == list(range(6))
    assert refused and replica.outstanding == 0


async def test_one_replica_that_refuses_us_says_nothing_of_the_others(bench: Bench) -> None:
    for member in ("a", "b"):
        bench.join(member)

    async def work(replica: Replica) -> str:
        if replica.member.member_id == "a":
            raise PermissionDenied("coordinator may not call Score")
        return "done"

    assert await bench.call(work, infrastructure=1) == "done"


async def test_an_error_that_ends_the_run_is_not_tried_again(bench: Bench) -> None:
    bench.join("a")
    tries: list[int] = []

    async def work(_: Replica) -> None:
        tries.append(1)
        raise FatalRunError("the recipe says stop")

    with pytest.raises(FatalRunError):
        await bench.call(work)
    assert tries == [1]


async def test_failures_are_counted_and_shown_until_a_call_works(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_breaker, "_FIRST_REST_SECONDS", 0.001)
    shown: dict[str, str] = {}
    bench.router.faults = FaultLog(report=shown.__setitem__, resolve=shown.__delitem__)
    bench.join("a").scorer = "mine@1"
    seen: list[str] = []

    async def work(_: Replica) -> str:
        seen.append(shown.get("a (mine@1)", ""))
        if len(seen) <= 4:
            raise PeerFault("a at 127.0.0.1:9", "WRONG_COUNT", f"Score: answered {len(seen)} scores")
        return "done"

    assert await bench.call(work) == "done"
    text = "its calls fail and are tried again; the first with WRONG_COUNT: a at 127.0.0.1:9: Score: answered 1 scores"
    assert seen == ["", "", "", text, text] and shown == {}
    assert bench.router.faults.rows() == [
        {"peer": "a", "kind": "WRONG_COUNT", "count": 4, "first": "a at 127.0.0.1:9: Score: answered 1 scores"}
    ]


async def test_a_replica_that_failed_often_gets_one_call_until_that_one_works(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(circuit_breaker, "_FIRST_REST_SECONDS", 0.001)
    replica = bench.join("a")
    for number in range(circuit_breaker.THRESHOLD):
        replica.breaker.record_failure(Unavailable("away"), float(number))
    probed = asyncio.Event()
    begun: list[bool] = []

    async def work(one: Replica) -> None:
        begun.append(one.breaker.probing)
        if len(begun) == 1:
            await probed.wait()

    calls = [asyncio.create_task(bench.call(work)) for _ in range(3)]
    while not begun:
        await asyncio.sleep(0)
    await bench.router.wait_for_change(timeout=0.05)
    assert begun == [True]
    probed.set()
    await asyncio.gather(*calls)
    assert begun == [True, False, False]


async def test_what_is_shown_of_a_member_goes_with_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: dict[str, str] = {}
    bench.router.faults = FaultLog(report=shown.__setitem__, resolve=shown.__delitem__)
    replica = bench.join("a")
    bench.router.record_failure(replica, DeadlinePassed("a: Score took longer than 3 s"))
    assert "Score took longer" in shown["a"], "one that hangs is shown at once"
    bench.registry.deregister(bench.tokens["a"])
    assert shown == {}


async def test_a_role_without_services_is_named_after_the_wait(bench: Bench) -> None:
    with pytest.raises(ServiceMissing, match=r"no usable reward service for 0.3 s \(none has registered\)") as error:
        await bench.call(name)
    assert error.value.reason == "NO_REWARD_SERVICE"
    assert bench.waits[0] == "a reward service (none has registered)"


async def test_an_unusable_replica_gets_no_call_and_the_error_has_the_reason(bench: Bench) -> None:
    replica = bench.join("a")
    bench.router.set_unusable_reason(replica, "its weight update failed")
    with pytest.raises(ServiceMissing, match="a: its weight update failed"):
        await bench.call(name)


async def test_a_replica_that_comes_late_gets_the_waiting_work(bench: Bench) -> None:
    waiting = asyncio.create_task(bench.call(name))
    await asyncio.sleep(0.05)
    bench.join("late")
    assert await waiting == "late"
    assert bench.waits[-1] == ""


async def test_an_engine_with_older_weights_is_not_used(bench: Bench) -> None:
    old, new = (bench.join(member, role=Role.ROLE_ROLLOUT) for member in ("old", "new"))
    old.version, new.version = 3, 4
    assert await bench.call(name, role=Role.ROLE_ROLLOUT, version=4) == "new"
    new.version = 3
    with pytest.raises(ServiceMissing):
        await bench.call(name, role=Role.ROLE_ROLLOUT, version=4)


async def test_work_of_a_replaced_process_is_cut_off_and_done_by_the_new_one(bench: Bench) -> None:
    bench.join("a", incarnation="a")
    begun = asyncio.Event()

    async def work(replica: Replica) -> str:
        begun.set()
        if replica.member.incarnation.startswith("a"):
            await asyncio.sleep(60)
        return replica.member.incarnation[0]

    task = asyncio.create_task(bench.call(work, infrastructure=1))
    await begun.wait()
    bench.join("a", incarnation="b")
    assert await task == "b"


async def test_work_of_a_member_that_leaves_may_end(bench: Bench) -> None:
    bench.join("a")
    begun, gate = asyncio.Event(), asyncio.Event()

    async def work(_: Replica) -> str:
        begun.set()
        await gate.wait()
        return "finished while it drained"

    task = asyncio.create_task(bench.call(work, infrastructure=0))
    await begun.wait()
    bench.registry.deregister(bench.tokens["a"])
    assert bench.router.replicas(ROLE) == []
    gate.set()
    assert await task == "finished while it drained"


async def test_waiting_for_services_says_what_is_missing(bench: Bench) -> None:
    bench.join("a")
    await bench.router.wait_for({ROLE: 1})
    await bench.router.wait_for({ROLE: 2}, seconds=0.05)  # one is enough after a while
    with pytest.raises(ServiceMissing, match=r"no usable trainer service for 0.05 s"):
        await bench.router.wait_for({ROLE: 1, Role.ROLE_TRAINER: 1}, seconds=0.05)
    assert "trainer 0 of 1 (none has registered)" in bench.waits


async def test_a_service_that_was_there_is_named_with_the_time_and_the_way_it_left(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        bench.join(name)
    bench.registry.deregister(bench.tokens["a"])
    bench.registry.ttl = 0.0
    bench.registry.expire()
    assert re.fullmatch(
        r"a left at \d\d:\d\d:\d\d; b left at \d\d:\d\d:\d\d: lease expired", bench.router.explain(ROLE)
    )
    assert "connection to b lost: lease expired; its process was killed, hangs, or cannot reach" in caplog.text
    assert bench.router.explain(Role.ROLE_TRAINER) == "none has registered"
    bench.registry.ttl = 60
    bench.join("a")
    assert re.fullmatch(r"a: ready; b left at .*: lease expired", bench.router.explain(ROLE)), "it is back"
    for index in range(20):
        bench.join(f"c{index}")
        bench.registry.deregister(bench.tokens[f"c{index}"])
    assert "b left" not in bench.router.explain(ROLE) and "c4 left" in bench.router.explain(ROLE), "the last 16"


async def test_what_was_refused_beside_other_work_is_asked_again_when_that_work_has_failed() -> None:
    bench = Bench(wait_seconds=0.3)
    bench.join("a")
    gate, tries = asyncio.Event(), {"small": 0, "large": 0}

    async def small(_: Replica) -> str:
        tries["small"] += 1
        if tries["small"] == 1:
            await gate.wait()
            raise Unavailable("lost")
        return "small"

    async def large(_: Replica) -> str:
        tries["large"] += 1
        if tries["large"] == 1:
            raise Overloaded("too many tokens", retry_after=0.01)
        return "large"

    one = asyncio.create_task(
        bench.router.call(ROLE, small, demand=Demand(samples=1), spend=RetryBudget(infrastructure=5, data=1).spend)
    )
    await asyncio.sleep(0.05)
    other = asyncio.create_task(
        bench.router.call(ROLE, large, demand=Demand(samples=8), spend=RetryBudget(infrastructure=5, data=1).spend)
    )
    await asyncio.sleep(0.05)
    gate.set()
    found = await asyncio.wait_for(asyncio.gather(one, other), 5)
    assert tuple(found) == ("small", "large")


async def test_more_samples_than_anybody_takes_at_once_are_an_error_and_no_endless_wait() -> None:
    bench = Bench(wait_seconds=0.1)
    bench.join("a", capacity=4)

    async def never(_: Replica) -> str:
        raise AssertionError("it has no room")

    with pytest.raises(ServiceMissing, match="takes the 8 samples of one prompt at once; the largest takes 4"):
        await asyncio.wait_for(
            bench.router.call(ROLE, never, demand=Demand(samples=8), spend=RetryBudget(infrastructure=5, data=1).spend),
            5,
        )


async def test_finished_samples_of_a_call_make_room_for_the_next_one(bench: Bench) -> None:
    replica = bench.join("a", capacity=4)
    flights: list[Flight] = []
    begun, gate = asyncio.Event(), asyncio.Event()

    async def first(_: Replica) -> None:
        begun.set()
        await gate.wait()

    budget = RetryBudget(infrastructure=5, data=1)
    demand = Demand(samples=4, tokens=40)
    call = bench.router.call(ROLE, first, demand=demand, spend=budget.spend, on_flight=flights.append)
    task = asyncio.create_task(call)
    await begun.wait()
    other = asyncio.create_task(bench.call(name, samples=2))
    await asyncio.sleep(0.02)
    flights[0].finish_sample(5)
    await asyncio.sleep(0.02)
    assert not other.done() and (replica.outstanding, replica.outstanding_size) == (3, 30)
    flights[0].finish_sample(5)
    assert await asyncio.wait_for(other, 0.2) == "a", "not only after the next tick"
    gate.set()
    await task
    assert (replica.outstanding, replica.outstanding_size) == (0, 0)
    flights[0].finish_sample(5)
    assert replica.outstanding == 0, "a late sample releases nothing"


async def test_the_speed_is_measured_with_finished_samples_and_an_engine_is_on_trial_before(bench: Bench) -> None:
    engines = [bench.join(name, capacity=16, role=Role.ROLE_ROLLOUT) for name in ("a", "b")]
    flights: list[Flight] = []
    gate = asyncio.Event()

    async def work(_: Replica) -> None:
        await gate.wait()

    def call() -> asyncio.Task[None]:
        budget, demand = RetryBudget(infrastructure=5, data=1), Demand(samples=2, tokens=20)
        role = Role.ROLE_ROLLOUT
        return asyncio.create_task(
            bench.router.call(role, work, demand=demand, spend=budget.spend, on_flight=flights.append)
        )

    tasks = [call() for _ in range(9)]
    await asyncio.sleep(0.05)
    assert [engine.outstanding for engine in engines] == [4, 4], "a quarter of the capacity each"
    flights[0].finish_sample(10)
    assert engines[0].speed(0.0) is not None and engines[1].speed(0.0) is None
    await asyncio.sleep(0.3)
    assert [engine.outstanding for engine in engines] == [3 + 2 * 5, 4]
    gate.set()
    await asyncio.gather(*tasks)


def measure_speed(engine: Replica, tokens_per_second: int) -> None:
    """Let one sample, alone on the engine, have had this speed."""
    engine.measure(tokens_per_second, since=SYSTEM_CLOCK.monotonic() - 1, area=-1.0)


async def test_calls_that_fill_all_engines_begin_at_once_although_one_engine_is_a_little_faster(bench: Bench) -> None:
    engines = [bench.join(name, capacity=64, role=Role.ROLE_ROLLOUT) for name in ("a", "b")]
    measure_speed(engines[0], 1200)
    measure_speed(engines[1], 1000)
    gate = asyncio.Event()

    async def work(_: Replica) -> None:
        await gate.wait()

    budget, demand = RetryBudget(infrastructure=5, data=1), Demand(samples=2, tokens=1000)
    tasks = [
        asyncio.create_task(bench.router.call(Role.ROLE_ROLLOUT, work, demand=demand, spend=budget.spend))
        for _ in range(64)
    ]
    await asyncio.sleep(0.05)
    assert [engine.outstanding for engine in engines] == [64, 64], "a second round of the faster one would end later"
    gate.set()
    await asyncio.gather(*tasks)


async def test_a_full_engine_has_room_when_its_oldest_samples_have_had_their_time(bench: Bench) -> None:
    engine = bench.join("a", capacity=4, role=Role.ROLE_ROLLOUT)
    now = SYSTEM_CLOCK.monotonic
    demand = Demand(samples=2, tokens=300)
    with engine.in_flight(demand), engine.in_flight(demand):
        assert engine.seconds_until_room(2, now()) == 0, "nothing is known of its speed"
    measure_speed(engine, 100)
    with engine.in_flight(demand) as oldest:
        assert engine.seconds_until_room(2, now()) == 0
        await asyncio.sleep(0.5)
        with engine.in_flight(demand):
            assert engine.seconds_until_room(2, now()) == pytest.approx(600 / 100 - 0.5, abs=0.2)
            assert engine.seconds_until_room(4, now()) == pytest.approx(600 / 100, abs=0.2)
            assert engine.seconds_until_room(2, now() + 9) == 0, "they are late, and may end at any time"
            oldest.end()
            assert engine.seconds_until_room(2, now()) == 0


async def test_many_changes_that_follow_each_other_are_one_notice(bench: Bench) -> None:
    wakes = 0

    async def count() -> None:
        nonlocal wakes
        while True:
            await bench.router.wait_for_change(timeout=5)
            wakes += 1

    task = asyncio.create_task(count())
    await asyncio.sleep(0)
    for _ in range(100):
        bench.router.notify()
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    task.cancel()
    assert 2 <= wakes < 10, "one at once, and one after each pause"


async def test_a_call_that_failed_goes_to_another_replica_also_if_the_failed_one_does_not_rest(bench: Bench) -> None:
    for member in ("a", "b"):
        bench.join(member)
    tried: list[str] = []

    async def work(replica: Replica) -> str:
        tried.append(replica.member.member_id)
        if len(tried) == 1:
            raise InvalidInput("no replica rests for such a request")
        return "done"

    assert await bench.call(work) == "done"
    assert tried == ["a", "b"]


async def test_a_replica_that_did_not_answer_is_inspected_again_after_its_rest(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, asked = bench.join("a"), list[str]()
    bench.router.set_unusable_reason(replica, NOT_INSPECTED)

    async def inspect(found: Replica, _sha256: bytes) -> str:
        asked.append(found.member.member_id)
        raise Unavailable("connection refused")

    async def look() -> int:
        async with asyncio.TaskGroup() as tasks:
            await bench.router._watch_members(tasks)
        return len(asked)

    monkeypatch.setattr(router, "inspect_replica", inspect)
    assert await look() == 1
    replica.breaker.retry_at = math.inf
    assert await look() == 1, "it rests"
    replica.breaker.retry_at = 0.0
    assert await look() == 2


async def test_room_that_comes_without_a_notice_is_found(bench: Bench) -> None:
    replica, end = bench.join("a", capacity=1), asyncio.Event()
    begun: list[int] = []

    async def work(_: Replica) -> None:
        begun.append(1)
        await end.wait()

    async with asyncio.TaskGroup() as tasks:
        for number in (1, 2):
            tasks.create_task(bench.call(work))
            await asyncio.sleep(0.05)
            assert len(begun) == 1, number
        replica.capacity = 2  # nothing tells the router
        async with asyncio.timeout(5):
            while len(begun) < 2:
                await asyncio.sleep(0.01)
        end.set()
