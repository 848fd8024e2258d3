"""A real gateway with a toy engine and a fake run, in this process; its servicer may be a faulty one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from fourfold.coordinator.v1 import experience_service_pb2 as experience
from fourfold.model.tokenizer import Tokenizer
from fourfold.security.access import Security
from fourfold.security.principal import UNLIMITED, CallerLimits
from fourfold_gateway.servicer import AgentServicer
from tests.conformance.toy_rollout import ToyRollout, served
from tests.fakes.real_gateway import FakeRun, RealGateway, real_gateway, serve_run
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


@contextlib.asynccontextmanager
async def gateway(
    root: Path,
    servicer: type[AgentServicer] = AgentServicer,
    *,
    run: bool = True,
    limits: CallerLimits = UNLIMITED,
    security: Security | None = None,
) -> AsyncIterator[RealGateway]:
    """Run a gateway; with `security` on a public port."""
    config = make_config(
        root,
        model={"max_context_tokens": CONTEXT},
        gateway={"max_open_sessions_per_agent": SESSIONS, "http_listen": "127.0.0.1:0"},
    )
    async with contextlib.AsyncExitStack() as stack:
        engine, address = Engine(), ""
        engine.sha256 = Tokenizer.load(config.model.source).sha256
        members = {"rollout-0": await stack.enter_async_context(served(engine))}
        if run:
            server, address = await serve_run(Run())
            stack.push_async_callback(server.stop, 0)
        yield await stack.enter_async_context(
            real_gateway(
                config,
                root / "gateway",
                run=address,
                members=members,
                http=True,
                servicer=servicer,
                limits=limits,
                security=security,
            )
        )
