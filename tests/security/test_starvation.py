"""Attacks that exhaust calls, samples, memory and connections of real servers."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fourfold import errors
from fourfold.config import SecurityConfig
from fourfold.coordinator.client import MembershipClient
from fourfold.coordinator.v1 import membership_service_pb2 as membership
from fourfold.coordinator.v1 import membership_service_pb2_grpc as membership_grpc
from fourfold.coordinator.v1 import run_service_pb2 as run
from fourfold.coordinator.v1 import run_service_pb2_grpc as run_grpc
from fourfold.host.clock import SYSTEM_CLOCK
from fourfold.rollout.client import AsyncRolloutClient
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rpc import connection_limit, interceptors
from fourfold.rpc import server as server_module
from fourfold.rpc.channel import PUBLIC_SERVER_OPTIONS, open_channel
from fourfold.rpc.limits import MAX_WATCHES_PER_AGENT, MAX_WATCHES_PER_PRINCIPAL, Quotas, limits_by_role
from fourfold.rpc.server import Server
from fourfold.security.access import ROLLOUT as ROLLOUT_IDENTITY
from fourfold.security.access import Security
from fourfold.security.principal import CallerLimits, Principal
from fourfold_coordinator.reporting.run_service import RunServicer
from fourfold_coordinator.routing.membership import MembershipServicer
from fourfold_coordinator.routing.registry import Registry
from fourfold_coordinator.state.run_board import RunBoard
from tests.fakes.engine import FakeEngine
from tests.fakes.rollout import SHA256, real_servicers, request, until
from tests.fakes.servicers import Rollout
from tests.security.pki import Pki
from tests.security.raw_http2 import RawConnection, leave_unfinished

MIB = 1 << 20
ROLLOUT_0 = Principal("rollout", "rollout-0")
FOUR_TOKENS = rollout.SamplingParams(max_tokens=4)
GENERATE = "/fourfold.rollout.v1.RolloutService/Generate"
# Our status, and those of gRPC for streams above a connection's limit and for more than 1,000 calls at once.
REFUSED = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


class Ports:
    """A rollout service with an internal and a public port, as in `fourfold_rollout.serve`."""

    def __init__(self, *, samples: int, kv_cache_tokens: int, quotas: Quotas) -> None:
        self.engine = FakeEngine(kv_cache_tokens=kv_cache_tokens)
        shares: dict[str, Any] = {"agent_samples": samples // 4, "agent_token_share": 0.25}
        made = real_servicers(self.engine, max_concurrent_samples=samples, quotas=quotas, stop_token_ids=(), **shares)
        self.weights = made.weights
        self.servers = [
            Server(listen="127.0.0.1:0", security=None, public=public, quotas=quotas) for public in (False, True)
        ]
        for server in self.servers:
            server.add(*made.services()[0])


@asynccontextmanager
async def ports(
    *, samples: int = 80, kv_cache_tokens: int = 100_000, limits: CallerLimits | None = None
) -> AsyncIterator[tuple[FakeEngine, AsyncRolloutClient, AsyncRolloutClient]]:
    """Serve; yield the engine, a client of the internal port and a client of the public port."""
    quotas = Quotas(limits_by_role(limits or CallerLimits()))
    service = Ports(samples=samples, kv_cache_tokens=kv_cache_tokens, quotas=quotas)
    channels = [open_channel(await server.start(), None) for server in service.servers]
    try:
        coordinator, agent = (AsyncRolloutClient(channel, peer="rollout-0") for channel in channels)
        yield service.engine, coordinator, agent
    finally:
        for channel in channels:
            await channel.close()
        for server in service.servers:
            await server.stop(0)
        await service.weights.close()


def generate(client: AsyncRolloutClient, name: str) -> asyncio.Task[Any]:
    return asyncio.create_task(client.complete(request(name, sampling_params=FOUR_TOKENS), timeout=60))


async def attack_and_work(
    engine: FakeEngine, coordinator: AsyncRolloutClient, agent: AsyncRolloutClient, calls: int
) -> int:
    """Make 200 calls as an agent, then some as the coordinator; return the number of the agent's accepted calls."""
    attack = [generate(agent, f"attack-{i}") for i in range(200)]
    await until(lambda: engine.running_count + sum(task.done() for task in attack) == 200)
    accepted = engine.running_count
    work = [generate(coordinator, f"work-{i}") for i in range(calls)]
    await until(lambda: engine.running_count == accepted + calls or any(task.done() for task in work))
    assert not [task for task in work if task.done()], "calls of the coordinator were refused"
    engine.tick(4)
    for task in work:
        assert len(await task) == 1
    refused = [e for e in await asyncio.gather(*attack, return_exceptions=True) if isinstance(e, BaseException)]
    assert len(refused) == 200 - accepted
    assert all(isinstance(e, errors.Overloaded) and e.retry_after for e in refused)
    return accepted


async def test_200_calls_of_an_agent_leave_the_coordinator_its_samples() -> None:
    async with ports(samples=80) as (engine, coordinator, agent):
        assert await attack_and_work(engine, coordinator, agent, 60) == 20


async def test_200_calls_of_an_agent_leave_the_coordinator_its_tokens() -> None:
    tokens = len(request("x").prompt_token_ids) + 4
    # 80 calls need twice the cache; the limit of samples is not reached.
    async with ports(samples=800, kv_cache_tokens=40 * tokens) as (engine, coordinator, agent):
        assert await attack_and_work(engine, coordinator, agent, 60) == 20


async def test_calls_of_one_agent_are_limited_in_number_and_rate() -> None:
    async with ports(samples=800, limits=CallerLimits(concurrent_calls=10)) as (engine, coordinator, agent):
        assert await attack_and_work(engine, coordinator, agent, 60) == 10
    async with ports(samples=800, limits=CallerLimits(calls_per_second=5)) as (_, _, agent):
        asked = [agent.get_info(timeout=10) for _ in range(100)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        reasons = {e.reason for e in answers if isinstance(e, errors.Overloaded)}
        assert reasons == {"TOO_MANY_CALLS_PER_SECOND"}


async def test_an_agent_cannot_cancel_a_call_of_the_coordinator_by_its_id() -> None:
    async with ports() as (engine, coordinator, agent):
        work = generate(coordinator, "step-7-prompt-3")
        await until(lambda: engine.running_count == 1)
        stub: Any = agent._stub
        call = stub.Generate(
            request("step-7-prompt-3", sampling_params=FOUR_TOKENS),
            timeout=60,
            metadata=(("grpc-previous-rpc-attempts", "1"),),
        )
        attack = asyncio.create_task(call.read())
        await until(lambda: engine.running_count == 2 or work.done())
        engine.tick(4)
        assert len(await work) == 1
        assert (await attack).chunks
        call.cancel()


async def test_the_period_of_load_reports_is_bounded_for_agents() -> None:
    async with ports() as (_, coordinator, agent):
        async with aclosing(coordinator.watch_load(period=0.05)) as loads:
            await anext(loads)
        with pytest.raises(errors.InvalidInput, match=r"period is 0.05 s; it must be in \[0.1, 60\] s"):
            await anext(agent.watch_load(period=0.05))


async def watch(stack: AsyncExitStack, method: Any, message: Any, count: int) -> list[grpc.StatusCode | None]:
    """Begin watches and keep them open; return None for each served one and the status of each refused one."""

    async def first(call: Any) -> grpc.StatusCode | None:
        try:
            answer = await call.read()
        except grpc.aio.AioRpcError as error:
            return error.code()
        return (await call.code()) if answer is grpc.aio.EOF else None

    calls = [method(message) for _ in range(count)]
    for call in calls:
        stack.callback(call.cancel)
    return list(await asyncio.gather(*(first(call) for call in calls)))


async def test_1024_watches_do_not_keep_a_lease_from_being_renewed() -> None:
    registry = Registry(clock=SYSTEM_CLOCK, tokenizer_sha256=SHA256)
    server = Server(listen="127.0.0.1:0", security=None)
    server.add(
        membership.DESCRIPTOR.services_by_name["MembershipService"],
        membership_grpc.add_MembershipServiceServicer_to_server,
        MembershipServicer(registry),
    )
    server.add(
        run.DESCRIPTOR.services_by_name["RunService"],
        run_grpc.add_RunServiceServicer_to_server,
        RunServicer(RunBoard(name="r", step_count=1)),
    )
    target = await server.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, 0)
        attacker, member = (open_channel(target, None) for _ in range(2))
        stack.push_async_callback(attacker.close)
        stack.push_async_callback(member.close)
        client = MembershipClient(member, peer="coordinator-0")
        lease = await client.register(
            member_id="reward-0",
            incarnation="1" * 32,
            role=membership.Role.ROLE_REWARD,
            target="127.0.0.1:5000",
            tokenizer_sha256=b"",
            timeout=10,
        )
        codes = await watch(stack, run_grpc.RunServiceStub(attacker).WatchRun, run.WatchRunRequest(), 1024)
        health = health_pb2_grpc.HealthStub(attacker).Watch
        codes += await watch(stack, health, health_pb2.HealthCheckRequest(), 1024)
        assert codes.count(None) == MAX_WATCHES_PER_PRINCIPAL
        assert set(codes) <= {None, *REFUSED}
        await client.keep_alive(lease.token, timeout=10)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Make a folder of certificates and a token."""
    folder = tmp_path_factory.mktemp("starvation") / "pki"
    return folder, Pki(folder).token


@asynccontextmanager
async def public_port(pki: tuple[Path, str]) -> AsyncIterator[str]:
    """Serve a public port with TLS and tokens; yield its target."""
    folder = str(pki[0])
    security = Security.load(SecurityConfig(directory=folder, tokens_file=f"{folder}/tokens.txt"), ROLLOUT_0)
    server = Server(listen="127.0.0.1:0", security=security, public=True)
    server.add(*Rollout().servicer())
    try:
        yield await server.start()
    finally:
        await server.stop(0)


@asynccontextmanager
async def agent_at(target: str, pki: tuple[Path, str], token: str = "") -> AsyncIterator[grpc.aio.Channel]:
    channel = open_channel(target, Security.for_agent(pki[0] / "ca.pem"), server=ROLLOUT_IDENTITY, token=token)
    try:
        yield channel
    finally:
        await channel.close()


async def test_1024_watches_without_a_token_do_not_lock_out_an_agent(pki: tuple[Path, str]) -> None:
    async with public_port(pki) as target, AsyncExitStack() as stack:
        channel = await stack.enter_async_context(agent_at(target, pki))
        codes = await watch(stack, health_pb2_grpc.HealthStub(channel).Watch, health_pb2.HealthCheckRequest(), 1024)
        assert codes.count(None) == MAX_WATCHES_PER_AGENT
        assert set(codes) <= {None, *REFUSED}
        async with agent_at(target, pki, pki[1]) as legitimate:
            client = AsyncRolloutClient(legitimate, peer="rollout-0")
            await client.get_info(timeout=10)
            assert [load.policy_version async for load in client.watch_load()] == [7]
        async with agent_at(target, pki) as anybody:
            check = health_pb2_grpc.HealthStub(anybody).Check
            assert (await check(health_pb2.HealthCheckRequest(), timeout=10)).status == 1


@pytest.fixture
def process(pki: tuple[Path, str]) -> Iterator[tuple[str, psutil.Process]]:
    """Start a process with a public port."""
    argv = [sys.executable, "-m", "tests.security.public_server", str(pki[0])]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert child.stdin and child.stdout
    yield child.stdout.readline().split()[1], psutil.Process(child.pid)
    child.stdin.close()
    child.wait(20)
    child.stdout.close()


@pytest.mark.slow
def test_unfinished_messages_hold_no_memory(pki: tuple[Path, str], process: tuple[str, psutil.Process]) -> None:
    target, server = process

    def attack(size: int, headers: dict[str, str]) -> float:
        """Return the growth of the server's memory in MiB."""
        before = server.memory_info().rss
        raw = [RawConnection(target, pki[0] / "ca.pem") for _ in range(2)]
        timeout = {"grpc-timeout": "100S"}
        for connection in raw:
            leave_unfinished(connection, GENERATE, calls=20, size=size, headers={**headers, **timeout})
        grown = (server.memory_info().rss - before) / MIB
        for connection in raw:
            connection.close()
        return grown

    token = {"authorization": f"Bearer {pki[1]}"}
    assert attack(16 * MIB, {}) < 32, "without a token nothing is read"
    assert attack(16 * MIB, token) < 32, "larger than a message may be"
    assert attack(MIB, token) < 80, "40 messages of the largest size, and what surrounds them"


def closed(connection: socket.socket) -> bool:
    """Return whether the server has closed a connection; discard received data."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def connect(target: str, count: int, source: str = "127.0.0.1") -> list[socket.socket]:
    host, _, port = target.rpartition(":")
    return [socket.create_connection((host, int(port)), 5, source_address=(source, 0)) for _ in range(count)]


def use_options(monkeypatch: pytest.MonkeyPatch, **values: int) -> None:
    """Change some channel options of public ports."""
    changed = {f"grpc.{key}": value for key, value in values.items()}
    assert changed.keys() <= dict(PUBLIC_SERVER_OPTIONS).keys()
    options = tuple((key, changed.get(key, value)) for key, value in PUBLIC_SERVER_OPTIONS)
    monkeypatch.setattr(server_module, "PUBLIC_SERVER_OPTIONS", options)


async def test_silent_connections_are_limited_and_closed(
    pki: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_options(monkeypatch, max_allowed_incoming_connections=20, server_handshake_timeout_ms=1000)
    async with public_port(pki) as target:
        silent = await asyncio.to_thread(connect, target, 60)
        await until(lambda: sum(map(closed, silent)) >= 40)
        await until(lambda: all(map(closed, silent)), seconds=20)
        async with agent_at(target, pki, pki[1]) as legitimate:
            await AsyncRolloutClient(legitimate, peer="rollout-0").get_info(timeout=10)
        for connection in silent:
            connection.close()


async def test_one_address_cannot_hold_all_connections(pki: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limit, "MAX_PER_ADDRESS", 5)
    monkeypatch.setattr(connection_limit, "PERIOD_SECONDS", 0.01)
    use_options(monkeypatch, max_allowed_incoming_connections=20, server_handshake_timeout_ms=600_000)
    async with public_port(pki) as target, agent_at(target, pki, pki[1]) as legitimate:
        client = AsyncRolloutClient(legitimate, peer="rollout-0")
        await client.get_info(timeout=10)
        silent = await asyncio.to_thread(connect, target, 40, "127.0.0.2")
        await until(lambda: sum(map(closed, silent)) == 35)
        async with agent_at(target, pki, pki[1]) as other:
            await AsyncRolloutClient(other, peer="rollout-0").get_info(timeout=10)
        await client.get_info(timeout=10)
        for connection in silent:
            connection.close()


async def test_an_incomplete_request_times_out(pki: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interceptors, "_REQUEST_SECONDS", 0.1)
    monkeypatch.setattr(interceptors, "_PROBE_SECONDS", 0.1)
    headers = {"authorization": f"Bearer {pki[1]}", "grpc-timeout": "100S"}
    async with public_port(pki) as target:
        for method in (GENERATE, "/grpc.health.v1.Health/Check"):
            raw = RawConnection(target, pki[0] / "ca.pem")
            await asyncio.to_thread(leave_unfinished, raw, method, calls=100, size=100, headers=headers)
            async with asyncio.timeout(10):
                while len(raw.ended) < 100:
                    await asyncio.sleep(0.01)
                    raw.receive()
            raw.close()
