"""A real gateway with a toy engine and a fake run, in this process; its servicer may be a faulty one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.agent.v1.agent_service_pb2_grpc import add_AgentServiceServicer_to_server
from fourfold.config import Config
from fourfold.coordinator.v1 import experience_service_pb2 as experience
from fourfold.coordinator.v1 import experience_service_pb2_grpc as experience_grpc
from fourfold.model.tokenizer import Tokenizer
from fourfold.rollout.v1.rollout_service_pb2_grpc import add_RolloutServiceServicer_to_server
from fourfold.rpc.channel import open_channel
from fourfold.rpc.limits import Quotas
from fourfold.rpc.server import Server
from fourfold.security.access import Security
from fourfold.security.principal import UNLIMITED, CallerLimits
from fourfold_gateway.coordinator_link import CoordinatorLink
from fourfold_gateway.core import GatewayCore
from fourfold_gateway.engines import EnginePool
from fourfold_gateway.http.server import serve_http
from fourfold_gateway.servicer import AgentServicer
from fourfold_gateway.store import SessionStore
from tests.conformance.toy_rollout import ToyRollout
from tests.contract.test_gateway import FakeRun
from tests.fakes.stage import until
from tests.fakes.toy import VOCABULARY, make_config

CONTEXT = 256
SESSIONS = 6


class Engine(ToyRollout):
    """The toy engine for the toy model's tokenizer."""

    vocabulary, context, samples = VOCABULARY, CONTEXT, 64


class Run(FakeRun):
    """A run whose tasks are conversations."""

    def _task(self, task_id: str) -> experience.LeasedTask:
        task = super()._task(task_id)
        task.text = ""
        return task


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A running gateway."""

    channel: grpc.aio.Channel
    """To its port, without TLS."""
    target: str
    url: str
    """Of its HTTP API."""


@contextlib.asynccontextmanager
async def gateway(
    root: Path,
    servicer: type[AgentServicer] = AgentServicer,
    *,
    run: bool = True,
    limits: CallerLimits = UNLIMITED,
    security: Security | None = None,
) -> AsyncIterator[Running]:
    """Run a gateway; with `security` on a public port."""
    config = make_config(
        root,
        model={"max_context_tokens": CONTEXT},
        gateway={"max_open_sessions_per_agent": SESSIONS, "http_listen": "127.0.0.1:0"},
    )
    async with contextlib.AsyncExitStack() as stack:
        engine = Engine()
        tokenizer = Tokenizer.load(config.model.source)
        engine.sha256 = tokenizer.sha256
        target, quotas = await _engine(stack, engine), Quotas(lambda _: limits)
        core = await _core(stack, config, tokenizer, root, quotas, target, security, run=run)
        http = await serve_http(core, config.gateway, security)
        stack.push_async_callback(http.stop, 0)
        core.http_url = http.url
        server = Server(listen="127.0.0.1:0", security=security, public=security is not None, quotas=quotas)
        service = pb.DESCRIPTOR.services_by_name["AgentService"]
        server.add(service, add_AgentServiceServicer_to_server, servicer(core))
        target = await server.start()
        channel = open_channel(target, None)
        stack.push_async_callback(server.stop, 0)
        stack.push_async_callback(channel.close)
        server.set_ready(True)
        yield Running(channel=channel, target=target, url=http.url)


async def _engine(stack: contextlib.AsyncExitStack, engine: ToyRollout) -> str:
    server = grpc.aio.server()
    add_RolloutServiceServicer_to_server(engine, server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    for name in ("", "fourfold.rollout.v1.RolloutService"):
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    stack.push_async_callback(server.stop, 0)
    return target


async def _core(
    stack: contextlib.AsyncExitStack,
    config: Config,
    tokenizer: Tokenizer,
    root: Path,
    quotas: Quotas,
    target: str,
    security: Security | None,
    *,
    run: bool,
) -> GatewayCore:
    store = SessionStore(root / "gateway")
    stack.push_async_callback(store.stop)
    engines = EnginePool(tokenizer_sha256=tokenizer.sha256, vocabulary_size=VOCABULARY, security=None)
    stack.push_async_callback(engines.close)
    core = GatewayCore(
        config=config,
        tokenizer=tokenizer,
        engines=engines,
        store=store,
        quotas=quotas,
        security=security,
    )
    tasks: list[asyncio.Task[Any]] = []
    if run:
        server = Server(listen="127.0.0.1:0", security=None)
        service = experience.DESCRIPTOR.services_by_name["ExperienceService"]
        server.add(service, experience_grpc.add_ExperienceServiceServicer_to_server, Run())
        channel = open_channel(await server.start(), None)
        server.set_ready(True)
        stack.push_async_callback(server.stop, 0)
        stack.push_async_callback(channel.close)
        core.link = CoordinatorLink(
            channel, store, peer="coordinator", on_delivered=core.on_delivered, on_gone=core.on_gone
        )
        tasks.append(asyncio.create_task(core.link.run()))
    await core.start()
    engines.set_members({"rollout-0": target})
    tasks.append(asyncio.create_task(core.run()))

    async def stop() -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    stack.push_async_callback(stop)
    await until(lambda: bool(engines.usable) and (not run or (core.link is not None and core.link.info is not None)))
    return core
