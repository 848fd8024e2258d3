"""A router, and rollout services whose real servicers have engines that a test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.host.clock import SYSTEM_CLOCK
from fourfold.rollout.client import RolloutControlClient
from fourfold.rpc.channel import open_channel
from fourfold.rpc.server import Server
from fourfold_coordinator.routing.registry import Member, Registry
from fourfold_coordinator.routing.replica import Replica
from fourfold_coordinator.routing.router import Router
from fourfold_rollout.generate.servicer import RolloutServicer
from tests.fakes.engine import FakeEngine
from tests.fakes.rollout import OPEN, SHA256, RealServicers, real_servicers, until


@dataclass(slots=True, kw_only=True)
class Engine:
    """One rollout service of a fleet."""

    name: str
    engine: FakeEngine
    servicers: RealServicers
    server: Server
    control: RolloutControlClient
    token: bytes

    async def update(self, version: int, mode: Any) -> None:
        """Replace the weights."""
        await self.control.open(epoch=version, timeout=5, **OPEN)
        await self.control.begin(epoch=version, policy_version=version, pause_mode=mode, timeout=5)
        await self.control.receive(epoch=version, policy_version=version, timeout=5)
        await self.control.commit(epoch=version, policy_version=version, timeout=5)


class Fleet:
    """A router and its rollout services, whose engines sample a token of each sample in each tick."""

    def __init__(self, *, tick_seconds: float) -> None:
        self.registry = Registry(clock=SYSTEM_CLOCK, tokenizer_sha256=SHA256, ttl=60)
        self.router = Router(
            self.registry, open_channel=lambda member: open_channel(member.target, None), wait_seconds=5
        )
        self.engines: dict[str, Engine] = {}
        self.ticking: set[str] = set()
        """Names of the engines that sample without a word of the test."""
        self._tasks = [asyncio.create_task(self.router.run()), asyncio.create_task(self._tick(tick_seconds))]

    async def add(
        self,
        name: str,
        engine: FakeEngine,
        *,
        ticks: bool = True,
        rollout: Callable[..., RolloutServicer] = RolloutServicer,
    ) -> Engine:
        """Start a service; without `ticks`, it samples only when the test says so."""
        servicers = real_servicers(engine, max_concurrent_samples=1000, rollout=rollout)
        server = Server(listen="127.0.0.1:0", security=None)
        for servicer in servicers.services():
            server.add(*servicer)
        target = await server.start()
        server.set_ready(True)
        token = self.registry.register(
            Member(
                member_id=name, incarnation=name * 32, role=Role.ROLE_ROLLOUT, target=target, tokenizer_sha256=SHA256
            )
        )
        replica = self.replica(name)
        await until(lambda: replica.present)
        replica.version = 0
        self.router.set_unusable_reason(replica, "")
        self.engines[name] = Engine(
            name=name,
            engine=engine,
            servicers=servicers,
            server=server,
            control=RolloutControlClient(replica.channel, peer=name),
            token=token,
        )
        if ticks:
            self.ticking.add(name)
        return self.engines[name]

    def replica(self, name: str) -> Replica:
        return next(r for r in self.router.replicas(Role.ROLE_ROLLOUT) if r.member.member_id == name)

    async def _tick(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            for name in self.ticking:
                self.engines[name].engine.tick()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for engine in self.engines.values():
            await engine.servicers.weights.close()
            await engine.server.stop(0)
