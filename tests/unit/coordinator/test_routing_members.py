"""Tests that the router watches the load of engines, and releases the calls of a departed member."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fourfold.coordinator.v1 import run_service_pb2 as pb
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import Unavailable
from fourfold.host.clock import SYSTEM_CLOCK, Clock
from fourfold.rollout.load import EngineLoad
from fourfold_coordinator.routing import replica as replica_module
from fourfold_coordinator.routing import router
from fourfold_coordinator.routing.registry import Member, Registry
from fourfold_coordinator.routing.replica import CancelScopes, Replica
from fourfold_coordinator.routing.router import Router
from tests.fakes.clock import FakeClock
from tests.fakes.rollout import until


class Channel:
    """A channel without calls; counts how often it was closed."""

    def __init__(self) -> None:
        self.closed = 0

    async def close(self) -> None:
        self.closed += 1

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class Scene:
    """A router that runs, and whose watches and channels are noted."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self.registry = Registry(clock=clock, tokenizer_sha256=b"t" * 32, ttl=60)
        self.channels: dict[str, Channel] = {}
        self.router = Router(
            self.registry,
            open_channel=self._open,
            wait_seconds=5,
        )
        self.watched: list[EngineLoad] = []
        self.unwatched: list[EngineLoad] = []

    def _open(self, member: Member) -> Any:
        return self.channels.setdefault(member.target, Channel())

    async def watch(self, client: Any, load: EngineLoad, clock: Any) -> None:
        self.watched.append(load)
        try:
            await asyncio.Event().wait()
        finally:
            self.unwatched.append(load)

    def join(self, name: str, role: Role.ValueType, number: int) -> tuple[Replica, bytes]:
        member = Member(
            member_id=name,
            incarnation="a" * 32,
            role=role,
            target=f"127.0.0.1:{number}",
            tokenizer_sha256=b"" if role == Role.ROLE_REWARD else b"t" * 32,
        )
        token = self.registry.register(member)
        (replica,) = [r for r in self.router.replicas(role) if r.member.member_id == name]
        replica.vocabulary_size = 100
        self.router.set_unusable_reason(replica, "")  # as if it had been inspected
        return replica, token


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    scene = Scene()
    monkeypatch.setattr(router, "watch_load", scene.watch)
    running = asyncio.create_task(scene.router.run())
    yield scene
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert all(channel.closed == 1 for channel in scene.channels.values()), "each channel is closed once"


async def test_leases_expire_while_a_pass_over_the_members_takes_long(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(router, "_TICK_SECONDS", 0.01)
    monkeypatch.setattr(Router, "_watch_members", lambda *_: asyncio.sleep(60))
    scene = Scene(clock)
    scene.join("rollout-0", Role.ROLE_ROLLOUT, 1)
    running = asyncio.create_task(scene.router.run())
    for second in range(61):
        assert len(scene.registry.members()) == (second < 60)
        await clock.advance(1)
        await asyncio.sleep(0.02)
    assert "stalled" not in caplog.text
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_departure_of_an_earlier_day_has_its_date(clock: FakeClock) -> None:
    scene, left = Scene(clock), time.localtime(clock.now())
    _, token = scene.join("rollout-0", Role.ROLE_ROLLOUT, 1)
    scene.registry.deregister(token)
    assert scene.router.explain(Role.ROLE_ROLLOUT) == time.strftime("rollout-0 left at %H:%M:%S", left)
    await clock.advance(86_400)
    assert scene.router.explain(Role.ROLE_ROLLOUT) == time.strftime("rollout-0 left at %Y-%m-%d %H:%M", left)


async def test_only_engines_are_watched_for_load(scene: Scene) -> None:
    roles = (Role.ROLE_TRAINER, Role.ROLE_REWARD, Role.ROLE_REFERENCE)
    for number, role in enumerate(roles, 1):
        scene.join(f"{number}-other", role, number)
    engine, _ = scene.join("9-engine", Role.ROLE_ROLLOUT, 9)
    await until(lambda: engine.load in scene.watched)
    late, _ = scene.join("a-engine", Role.ROLE_ROLLOUT, 10)
    await until(lambda: late.load in scene.watched)
    assert scene.watched == [engine.load, late.load], "one watch of each engine, and none of other members"


async def test_an_engine_is_watched_when_it_was_inspected_and_may_get_calls(scene: Scene) -> None:
    first, _ = scene.join("first", Role.ROLE_ROLLOUT, 1)
    first.vocabulary_size = 0
    second, _ = scene.join("second", Role.ROLE_ROLLOUT, 2)
    scene.router.set_unusable_reason(second, "weights not checked yet")
    third, _ = scene.join("third", Role.ROLE_ROLLOUT, 3)
    await until(lambda: third.load in scene.watched)
    assert scene.watched == [third.load]
    first.vocabulary_size = 100
    scene.router.set_unusable_reason(second, "")
    await until(lambda: {first.load, second.load} <= set(scene.watched))


async def test_a_departed_replica_is_released(scene: Scene) -> None:
    replica, token = scene.join("engine", Role.ROLE_ROLLOUT, 1)
    load, channel, left = replica.load, scene.channels["127.0.0.1:1"], weakref.ref(replica)
    await until(lambda: load in scene.watched)
    scene.registry.deregister(token)
    await until(lambda: channel.closed == 1 and load in scene.unwatched)
    assert scene.router.replicas(Role.ROLE_ROLLOUT) == []
    with pytest.raises(Unavailable):
        await replica.call(asyncio.sleep(0))
    del replica
    gc.collect()
    assert left() is None, "a run of many days sees many engines come and go"


async def test_a_departed_member_that_hangs_keeps_no_call(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    replica, token = scene.join("engine", Role.ROLE_ROLLOUT, 1)
    call = asyncio.create_task(replica.call(asyncio.Event().wait()))
    await asyncio.sleep(0)
    scene.registry.deregister(token)
    await asyncio.sleep(0.5)
    assert not call.done(), "it finishes its calls"
    monkeypatch.setattr(replica_module, "STALL_SECONDS", 0.1)
    with pytest.raises(Unavailable) as error:
        await asyncio.wait_for(call, 5)
    assert error.value.reason == "LEASE_ENDED"


async def test_the_channel_of_a_departed_replica_is_closed_after_its_last_call(scene: Scene) -> None:
    replica, token = scene.join("scorer", Role.ROLE_REWARD, 1)
    go = asyncio.Event()
    call = asyncio.create_task(replica.call(go.wait()))
    await asyncio.sleep(0)
    scene.registry.deregister(token)
    other, other_token = scene.join("other", Role.ROLE_REWARD, 2)
    scene.registry.deregister(other_token)
    await until(lambda: scene.channels["127.0.0.1:2"].closed == 1)
    assert scene.channels["127.0.0.1:1"].closed == 0
    go.set()
    await call
    scene.router.notify()
    await until(lambda: scene.channels["127.0.0.1:1"].closed == 1)
    assert other.gone


@pytest.mark.parametrize(("late", "state"), [(False, pb.MEMBER_STATE_LIVE), (True, pb.MEMBER_STATE_SILENT)])
async def test_a_member_is_shown_with_the_state_of_its_lease(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, late: bool, state: int
) -> None:
    scene.join("scorer", Role.ROLE_REWARD, 1)
    monkeypatch.setattr(scene.registry, "overdue", lambda _member_id: (late, 1_795_000_000.0))
    row = scene.router.members()[0].to_proto()
    assert (row.member_id, row.role, row.target) == ("scorer", "reward", "127.0.0.1:1")
    assert (row.policy_version, row.state) == (-1, state)
    assert row.state_since.ToNanoseconds() == 1_795_000_000 * 10**9


async def test_a_run_waits_for_all_the_services_that_it_wants_although_one_is_there(scene: Scene) -> None:
    waits: list[str] = []
    scene.router.on_wait = waits.append
    scene.join("a", Role.ROLE_REWARD, 1)
    waiting = asyncio.create_task(scene.router.wait_for({Role.ROLE_REWARD: 2}))
    await until(lambda: any("reward 1 of 2" in what for what in waits))
    assert not waiting.done()
    scene.join("b", Role.ROLE_REWARD, 2)
    await asyncio.wait_for(waiting, 5)
    assert waits[-1] == ""


async def test_an_await_that_unwinds_is_not_cancelled_again() -> None:
    scopes, unwinds, release = CancelScopes(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            unwinds.set()
            await release.wait()

    first = asyncio.create_task(scopes.run(work()))
    await asyncio.sleep(0)
    scopes.cancel()
    scopes.cancel()
    await unwinds.wait()
    second = asyncio.create_task(scopes.run(asyncio.sleep(60)))
    await asyncio.sleep(0)
    scopes.cancel()
    assert await second is None and not first.done()
    release.set()
    assert await first is None and not scopes
