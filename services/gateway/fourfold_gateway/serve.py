"""Runs a gateway: `fourfold serve gateway RECIPE`. Needs neither vLLM nor torch."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Coroutine
from typing import Any, Final

import uvloop

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.agent.v1.agent_service_pb2_grpc import add_AgentServiceServicer_to_server
from fourfold.coordinator.client import AsyncCoordinatorClient
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import ConfigError
from fourfold.model import folder as model_folder
from fourfold.model.tokenizer import Tokenizer
from fourfold.rpc.channel import open_channel
from fourfold.security.access import COORDINATOR
from fourfold.service.lifecycle import ServeOptions, ServiceHost
from fourfold_gateway.coordinator_link import CoordinatorLink
from fourfold_gateway.core import GatewayCore
from fourfold_gateway.engines import EnginePool
from fourfold_gateway.http.server import serve_http
from fourfold_gateway.metrics_source import gateway_source
from fourfold_gateway.servicer import AgentServicer
from fourfold_gateway.store import SessionStore

_SERVICE: Final = pb.DESCRIPTOR.services_by_name["AgentService"]
_GRACE_SECONDS: Final = 1.0
_log = logging.getLogger("fourfold.gateway.serve")


def main(options: ServeOptions) -> int:
    """Serve until a signal or a fatal error; return the exit code."""
    config = options.config
    host = ServiceHost(options, role=Role.ROLE_GATEWAY)
    if not options.coordinator and not options.engines:
        raise ConfigError(
            "a gateway needs engines: give --coordinator HOST:PORT of a run, or --engine HOST:PORT for each engine"
        )
    folder = model_folder.resolve(config.model.source, config.data.chat_template)
    tokenizer = Tokenizer.load(folder, date=config.data.date)
    host.tokenizer_sha256 = tokenizer.sha256
    # uvloop takes a quarter less CPU time for a request over HTTP than asyncio's own loop.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(host, tokenizer))


async def _serve(host: ServiceHost, tokenizer: Tokenizer) -> int:
    options, config = host.options, host.options.config
    store = SessionStore(options.make_folder() / "gateway" / options.member_id)
    _log.info("gateway started: folder=%s sqlite=%s", store.folder, sqlite3.sqlite_version)
    engines = EnginePool(
        tokenizer_sha256=tokenizer.sha256, vocabulary_size=tokenizer.vocabulary_size, security=host.security
    )
    core = GatewayCore(
        config=config, tokenizer=tokenizer, engines=engines, store=store, quotas=host.quotas, security=host.security
    )
    tasks: list[asyncio.Task[None]] = []

    def keep(work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(lambda done: _report_end(done, host))
        tasks.append(task)

    async def start() -> None:
        if options.coordinator:
            channel = open_channel(options.coordinator, host.security, server=COORDINATOR)
            host.on_drain.append(channel.close)
            peer = f"coordinator at {options.coordinator}"
            core.link = CoordinatorLink(
                channel,
                store,
                peer=peer,
                on_delivered=core.on_delivered,
                on_gone=core.on_gone,
                gateway=options.member_id,
                sessions=core.task_sessions,
            )
            await core.start()
            keep(core.link.run())
            keep(engines.follow(AsyncCoordinatorClient(channel, peer=peer)))
        else:
            await core.start()
            engines.set_members({target: target for target in options.engines})
        keep(core.run())
        if config.gateway.http_listen:
            http = await serve_http(core, config.gateway, host.security, config.security.http_names)
            host.on_drain.append(lambda: http.stop(_GRACE_SECONDS))
            core.http_url = http.url_by(options.host)

    async def end_tasks() -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    host.on_drain.append(end_tasks)  # added before `start` adds the channel: tasks must end before it closes
    servicer = AgentServicer(core)
    host.server.add(_SERVICE, add_AgentServiceServicer_to_server, servicer)
    if config.gateway.public_listen:
        public = host.public_server(config.gateway.public_listen, "gateway.public_listen")
        public.add(_SERVICE, add_AgentServiceServicer_to_server, servicer)
    host.exporter.add(gateway_source(core, engines))
    try:
        return await host.run(start=start)
    finally:
        await engines.close()
        await store.stop()


def _report_end(task: asyncio.Task[None], host: ServiceHost) -> None:
    """End the process when a background task has failed: otherwise trajectories would wait for ever."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a background task failed", exc_info=error)
        host.fatal("a background task of the gateway failed; its traceback is in the log")
