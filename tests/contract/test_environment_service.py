"""The environment service as a process: it finds a gateway, runs an episode, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf.duration_pb2 import Duration

from fourfold.coordinator.v1 import membership_service_pb2 as membership
from fourfold.coordinator.v1 import membership_service_pb2_grpc as membership_grpc
from fourfold.coordinator.v1 import run_service_pb2 as run
from fourfold.coordinator.v1 import run_service_pb2_grpc as run_grpc
from fourfold.rpc.server import Server
from tests.fakes.agent import FakeGateway

ROOT = Path(__file__).parents[2]
START = """
import sys
from pathlib import Path
from fourfold import config
from fourfold.errors import ConfigError
from fourfold.service.lifecycle import ServeOptions
from fourfold_reward.environment.serve import main
recipe = Path(sys.argv[1])
options = dict(zip(("gateway", "coordinator"), sys.argv[2:]))
try:
    settings = config.load(recipe)
    member = {"role": "environment", "member_id": "environment-0"}
    sys.exit(main(ServeOptions(recipe=recipe, config=settings, **member, **options)))
except ConfigError as error:
    sys.exit(error.message)
"""
Context = grpc.aio.ServicerContext[Any, Any]
Start = Callable[..., Awaitable[Process]]


class Coordinator(run_grpc.RunServiceServicer, membership_grpc.MembershipServiceServicer):
    """Names one gateway, and takes every member."""

    def __init__(self, gateway: str) -> None:
        self.members = [
            run.Member(member_id="rollout-0", role="rollout", target="127.0.0.1:1"),
            run.Member(member_id="gateway-1", role="gateway", target="far.example:5"),
            run.Member(member_id="gateway-0", role="gateway", target=gateway),
        ]
        self.registered: list[membership.RegisterRequest] = []

    async def WatchRun(self, request: run.WatchRunRequest, context: Context) -> AsyncIterator[run.WatchRunResponse]:
        yield run.WatchRunResponse(status=run.RunStatus(members=self.members))
        await asyncio.sleep(1000)

    async def Register(self, request: membership.RegisterRequest, context: Context) -> membership.RegisterResponse:
        self.registered.append(request)
        return membership.RegisterResponse(lease_token=b"x", ttl=Duration(seconds=60))

    async def KeepAlive(self, request: membership.KeepAliveRequest, context: Context) -> membership.KeepAliveResponse:
        return membership.KeepAliveResponse(ttl=Duration(seconds=60))

    async def Deregister(
        self, request: membership.DeregisterRequest, context: Context
    ) -> membership.DeregisterResponse:
        return membership.DeregisterResponse()

    async def GetRun(self, request: run.GetRunRequest, context: Context) -> run.GetRunResponse:
        raise AssertionError("the environment service never calls this")

    async def GetWeightPlane(self, request: run.GetWeightPlaneRequest, context: Context) -> run.GetWeightPlaneResponse:
        raise AssertionError("the environment service never calls this")


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    processes: list[Process] = []

    async def launch(*arguments: str) -> Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", START, *arguments), stdout=PIPE, stderr=PIPE, cwd=ROOT
        )
        processes.append(process)
        return process

    yield launch
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("by", ["gateway", "coordinator"])
async def test_a_service_finds_its_gateway_and_plays(start: Start, by: str) -> None:
    gateway = FakeGateway(lambda _: "3")
    server = Server(listen="127.0.0.1:0", security=None)
    server.add(*gateway.servicer())
    target = await server.start()
    server.set_ready(True)
    coordinator = Coordinator(target)
    second = Server(listen="127.0.0.1:0", security=None)
    second.add(run.DESCRIPTOR.services_by_name["RunService"], run_grpc.add_RunServiceServicer_to_server, coordinator)
    name = membership.DESCRIPTOR.services_by_name["MembershipService"]
    second.add(name, membership_grpc.add_MembershipServiceServicer_to_server, coordinator)
    address = await second.start()
    try:
        gateway.add(text="x", answer="2")
        arguments = ("", address) if by == "coordinator" else (target,)
        process = await start("recipes/agents_guessing.toml", *arguments)
        (outcome,) = await gateway.wait()
        assert outcome.reward == 1 and outcome.metrics["guesses"] == 1
        assert [r.role for r in coordinator.registered] == [membership.ROLE_ENVIRONMENT] * (by == "coordinator")
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        # A killed service leaves no process behind, and one that is asked to stop ends by itself.
        process.send_signal(signal.SIGKILL if by == "gateway" else signal.SIGTERM)
        async with asyncio.timeout(20):
            await process.wait()
            while any(psutil.pid_exists(child.pid) and child.status() != "zombie" for child in children):
                await asyncio.sleep(0.05)
    finally:
        await server.stop(0)
        await second.stop(0)


@pytest.mark.parametrize(
    ("change", "arguments", "text"),
    [
        ("", (), "--gateway HOST:PORT"),
        ('source = "tasks"|source = "none"', ("127.0.0.1:1",), 'set it to "tasks"'),
        ("examples/environments/guessing.py:Guessing|", ("127.0.0.1:1",), "names no environment"),
    ],
)
async def test_a_recipe_without_an_environment_is_refused(
    start: Start, tmp_path: Path, change: str, arguments: tuple[str, ...], text: str
) -> None:
    recipe = (ROOT / "recipes/agents_guessing.toml").read_text().replace("replicas = 1", "replicas = 0")
    old, _, new = change.partition("|")
    (tmp_path / "recipe.toml").write_text(recipe.replace(old, new) if change else recipe)
    process = await start(str(tmp_path / "recipe.toml"), *arguments)
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1 and text in err.decode().splitlines()[-1]
