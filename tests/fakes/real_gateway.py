"""A real gateway in this process: its sessions, its engines and its link to a run, which may be a fake one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.agent.v1.agent_service_pb2_grpc import add_AgentServiceServicer_to_server
from fourfold.config import Config
from fourfold.coordinator.client import AsyncCoordinatorClient
from fourfold.coordinator.v1 import experience_service_pb2 as experience
from fourfold.coordinator.v1 import experience_service_pb2_grpc as experience_grpc
from fourfold.errors import Unavailable
from fourfold.model.tokenizer import Tokenizer
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
from tests.fakes.stage import until
from tests.fakes.toy import VOCABULARY


class FakeRun(experience_grpc.ExperienceServiceServicer):
    """The coordinator's side: a list of tasks, and a dictionary of trajectories."""

    def __init__(self) -> None:
        self.tasks = [f"t{i}" for i in range(5)]
        self.stored: dict[str, experience.Trajectory] = {}
        self.released: list[tuple[str, str, bool]] = []
        self.released_leases: list[str] = []
        self.leases: dict[str, str] = {}  # the newest of each task
        self.gone: set[str] = set()
        self.refusal = ""
        self.renewed: list[experience.RenewTasksRequest] = []
        self.agents: list[str] = []  # incarnation in each call for tasks
        self.refuses_all = False  # takes no trajectory for now
        self.joined: list[experience.JoinGroupRequest] = []
        self.on_lease: Callable[[float], Any] | None = None  # awaited with the wait before each lease

    async def GetRunInfo(self, request: Any, context: Any) -> experience.GetRunInfoResponse:
        return experience.GetRunInfoResponse(
            run_name="toy",
            run_id="0" * 32,
            has_tasks=True,
            has_own_groups=True,
            group_size=2,
            temperature=0.5,
            stop_token_ids=[7],
            max_new_tokens=6,
            max_segment_count=8,
        )

    def _task(self, task_id: str) -> experience.LeasedTask:
        task = experience.LeasedTask(task_id=task_id, group_id="g", group_size=2, text="3 * 4 =", seed=1)
        task.messages_json, task.lease = '[{"role": "user", "content": "3 * 4 ="}]', self.leases.get(task_id, "")
        task.ttl.FromSeconds(30)
        task.time_left.FromSeconds(60)
        return task

    async def LeaseTasks(self, request: experience.LeaseTasksRequest, context: Any) -> experience.LeaseTasksResponse:
        assert self.renewed, "a task that is leased before would be returned as one that the gateway has lost"
        self.agents.append(request.agent_incarnation)
        if self.on_lease is not None and not await self.on_lease(request.wait.ToNanoseconds() / 1e9):
            return experience.LeaseTasksResponse()
        return experience.LeaseTasksResponse(tasks=[self._task(self.tasks.pop(0))] if self.tasks else [])

    async def JoinGroup(self, request: experience.JoinGroupRequest, context: Any) -> experience.JoinGroupResponse:
        self.joined.append(request)
        return experience.JoinGroupResponse(task=self._task(f"own-{request.attempt_id}"))

    async def RenewTasks(self, request: experience.RenewTasksRequest, context: Any) -> experience.RenewTasksResponse:
        self.renewed.append(request)
        leases = zip(request.task_ids, request.leases, strict=True)
        gone = [task for task, lease in leases if task in self.gone or lease != self.leases.get(task, "")]
        response = experience.RenewTasksResponse(gone_task_ids=gone)
        response.ttl.FromSeconds(1)
        return response

    async def ListTasks(self, request: experience.ListTasksRequest, context: Any) -> experience.ListTasksResponse:
        raise AssertionError("a gateway never calls this")

    async def ReleaseTasks(self, request: experience.ReleaseTasksRequest, context: Any) -> Any:
        self.released += [(t.task_id, t.reason, t.again) for t in request.tasks]
        self.released_leases += [t.lease for t in request.tasks]
        return experience.ReleaseTasksResponse()

    async def PutTrajectories(self, request: experience.PutTrajectoriesRequest, context: Any) -> Any:
        if self.refuses_all:
            raise Unavailable("not now")
        response = experience.PutTrajectoriesResponse()
        for trajectory in request.trajectories:
            if self.refusal:
                response.results.add(task_id=trajectory.task_id, code=5, reason=self.refusal)
                continue
            self.stored[trajectory.task_id] = trajectory
            response.results.add(task_id=trajectory.task_id)
        return response


async def serve_run(run: FakeRun, listen: str = "127.0.0.1:0") -> tuple[Server, str]:
    """Serve a fake run; return its server and its address."""
    server = Server(listen=listen, security=None)
    service = experience.DESCRIPTOR.services_by_name["ExperienceService"]
    server.add(service, experience_grpc.add_ExperienceServiceServicer_to_server, run)
    target = await server.start()
    server.set_ready(True)
    return server, target


@dataclass(frozen=True, slots=True, kw_only=True)
class RealGateway:
    """A gateway that runs."""

    core: GatewayCore
    store: SessionStore
    engines: EnginePool
    target: str
    channel: grpc.aio.Channel
    """To its AgentService, without TLS."""
    url: str
    """Of its HTTP API; empty without one."""


@asynccontextmanager
async def real_gateway(
    config: Config,
    folder: Path,
    *,
    run: str = "",
    members: Mapping[str, str] | None = None,
    http: bool = False,
    servicer: type[AgentServicer] = AgentServicer,
    limits: CallerLimits = UNLIMITED,
    security: Security | None = None,
) -> AsyncIterator[RealGateway]:
    """Run a gateway.

    Args:
        config: Its recipe.
        folder: Of its store.
        run: Address of the run; empty for a gateway without one.
        members: Addresses of the engines by name. None: those of the run, whose coordinator must serve RunService.
        http: Serve the HTTP API, too.
        servicer: Class of its AgentService.
        limits: Of each caller.
        security: With it, the AgentService is on a public port.
    """
    async with AsyncExitStack() as stack:
        tokenizer, store = Tokenizer.load(config.model.source), SessionStore(folder)
        stack.push_async_callback(store.stop)
        engines = EnginePool(tokenizer_sha256=tokenizer.sha256, vocabulary_size=VOCABULARY, security=None)
        stack.push_async_callback(engines.close)
        quotas = Quotas(lambda _: limits)
        core = GatewayCore(
            config=config, tokenizer=tokenizer, engines=engines, store=store, quotas=quotas, security=security
        )
        work = [core.run()]
        if run:
            to_run = open_channel(run, None)
            stack.push_async_callback(to_run.close)
            core.link = _link(core, store, to_run)
            work.append(core.link.run())
            if members is None:
                work.append(engines.follow(AsyncCoordinatorClient(to_run, peer="coordinator")))
        await core.start()
        if members is not None:
            engines.set_members(dict(members))
        stack.push_async_callback(_cancel, [asyncio.create_task(each) for each in work])
        url = ""
        if http:
            served = await serve_http(core, config.gateway, security)
            stack.push_async_callback(served.stop, 0.1)
            core.http_url = url = served.url
        server = Server(listen="127.0.0.1:0", security=security, public=security is not None, quotas=quotas)
        service = pb.DESCRIPTOR.services_by_name["AgentService"]
        server.add(service, add_AgentServiceServicer_to_server, servicer(core))
        target = await server.start()
        stack.push_async_callback(server.stop, 0)
        server.set_ready(True)
        channel = open_channel(target, None)
        stack.push_async_callback(channel.close)
        if members is not None:
            await until(lambda: engines.usable and (core.link is None or core.link.info))
        yield RealGateway(core=core, store=store, engines=engines, target=target, channel=channel, url=url)


def _link(core: GatewayCore, store: SessionStore, to_run: grpc.aio.Channel) -> CoordinatorLink:
    return CoordinatorLink(
        to_run,
        store,
        peer="coordinator",
        on_delivered=core.on_delivered,
        on_gone=core.on_gone,
        gateway="gateway-0",
        sessions=core.task_sessions,
    )


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
