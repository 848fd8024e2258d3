"""Tests the order of many replicas: it is that of a full comparison, and a call looks at few of them."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from fourfold.errors import Unavailable
from fourfold.rpc.circuit_breaker import CircuitBreaker
from fourfold_coordinator.routing.ranking import ReplicaRanking
from fourfold_coordinator.routing.registry import Member
from fourfold_coordinator.routing.scheduling import Demand

DEMAND = Demand(samples=2, tokens=20)


class _Replica:
    """What a ranking reads of a replica."""

    def __init__(self, index: int, *, capacity: int = 8, speed: float | None = None) -> None:
        self.member = Member(
            member_id=f"rollout-{index:04d}", incarnation="a", role=1, target="x:1", tokenizer_sha256=b""
        )
        self.breaker = CircuitBreaker()
        self.outstanding = self.outstanding_size = 0
        self.capacity, self.known_speed, self.silence = capacity, speed, 0.0
        self.gone = self.unusable_reason = ""

    def speed(self, now: float) -> float | None:
        return self.known_speed

    def quiet(self, now: float) -> float:
        return self.silence

    def has_room(self, samples: int) -> bool:
        return self.outstanding + samples <= self.capacity

    def add(self, samples: int) -> None:
        self.outstanding += samples
        self.outstanding_size += 10 * samples

    def seconds(self) -> float:
        return (self.outstanding_size + DEMAND.size) / (self.known_speed or 1.0)


class Fleet:
    """A ranking of replicas; notes at how many a call looks."""

    def __init__(self, count: int, **options: Any) -> None:
        self.ranking, self.replicas = ReplicaRanking(), [_Replica(index, **options) for index in range(count)]
        self.looks = 0
        for replica in self.replicas:
            self.update(replica)

    def update(self, replica: _Replica, now: float = 0.0) -> None:
        self.ranking.update(cast(Any, replica), now)

    def first(self, now: float = 0.0) -> list[_Replica]:
        def fits(_replica: Any) -> bool:
            self.looks += 1
            return True

        return cast("list[_Replica]", self.ranking.first(DEMAND, fits, lambda replica: replica.has_room(2), now))


def test_the_order_is_that_of_a_full_comparison_whatever_happens() -> None:
    fleet, rng = Fleet(60, speed=5.0), random.Random(7)
    for turn in range(3000):
        replica = rng.choice(fleet.replicas)
        match rng.randrange(5):
            case 0 if replica.has_room(2):
                replica.add(2)
            case 1 if replica.outstanding:
                replica.add(-1)
            case 2:
                replica.known_speed = rng.choice([1.0, 4.0, 20.0])
            case 3:
                replica.unusable_reason = rng.choice(["", "", "away"])
        fleet.update(replica)
        if turn % 10:
            continue
        usable = [r for r in fleet.replicas if not r.unusable_reason]
        for full in (False, True):
            here = [r for r in usable if r.has_room(2) is not full]
            best = min((r.seconds() for r in here), default=0.0)
            found = [r for r in fleet.first() if r.has_room(2) is not full]
            assert len(found) == min(len(here), 8)
            assert min((r.seconds() for r in found), default=0.0) == pytest.approx(best)
    work = sum(replica.outstanding_size for replica in fleet.replicas)
    speed = sum(replica.known_speed or 0.0 for replica in fleet.replicas)
    assert fleet.ranking.backlog_seconds(30, 0.0) == pytest.approx((work + 30) / speed)


def test_a_call_looks_at_few_of_a_thousand_replicas() -> None:
    fleet = Fleet(1000, speed=5.0)
    for replica in fleet.replicas[:-1]:
        replica.add(8)
        fleet.update(replica)
    fleet.first()
    fleet.looks = 0
    found = fleet.first()
    assert found[0] is fleet.replicas[-1] and fleet.looks <= 16


def test_a_replica_comes_back_when_its_rest_is_over() -> None:
    fleet = Fleet(2)
    fleet.replicas[0].breaker.record_failure(Unavailable("away", retry_after=3.0), 10.0)
    assert fleet.first(now=12.9) == [fleet.replicas[1]]
    assert fleet.first(now=13.0) == fleet.replicas


def test_a_replica_that_finishes_nothing_falls_back_without_a_notice() -> None:
    fleet = Fleet(20, speed=5.0)
    fleet.replicas[0].silence = 60.0
    assert fleet.replicas[0] not in fleet.first()
    assert fleet.first()[0] is fleet.replicas[1]


def test_a_replica_that_left_is_forgotten() -> None:
    fleet = Fleet(2, speed=5.0)
    fleet.replicas[0].add(4)
    fleet.update(fleet.replicas[0])
    fleet.replicas[0].gone = fleet.replicas[0].unusable_reason = "left"
    fleet.update(fleet.replicas[0])
    assert fleet.first() == [fleet.replicas[1]]
    assert fleet.ranking.backlog_seconds(30, 0.0) == 6.0


def test_many_changes_of_a_replica_between_two_calls_are_made_once() -> None:
    fleet, counted = Fleet(2, speed=5.0), list[float]()
    fleet.first()
    fleet.replicas[0].speed = lambda now: counted.append(now) or 5.0  # type: ignore[method-assign,func-returns-value]
    for _ in range(8):
        fleet.replicas[0].add(1)
        fleet.update(fleet.replicas[0])
    assert fleet.first() == [fleet.replicas[1], fleet.replicas[0]] and len(counted) == 1
    assert fleet.ranking.backlog_seconds(20, 0.0) == 10.0
