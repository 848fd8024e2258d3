"""The life cycle of a service process, with real processes and signals: start, ready, member of a run, drain, exit."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import textwrap
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fourfold import errors
from fourfold.coordinator.v1 import membership_service_pb2 as pb
from fourfold.coordinator.v1 import membership_service_pb2_grpc as pb_grpc
from fourfold.reward.client import AsyncRewardClient
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.rpc.channel import open_channel
from fourfold.rpc.server import Server
from fourfold.types.v1.experience_pb2 import Experience
from tests.conftest import Servicer

REPOSITORY = Path(__file__).parents[2]
Context = grpc.aio.ServicerContext[Any, Any]
Start = Callable[..., Awaitable[Process]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Start service processes, and kill the remaining ones after the test."""
    processes: list[Process] = []

    async def run(*arguments: str, **environment: str) -> Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.fakes.service", *arguments),
            stdout=PIPE,
            stderr=PIPE,
            cwd=REPOSITORY,
            env={**os.environ, **environment},
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def line(process: Process, begin: str) -> str:
    """Return the next line of stdout without its prefix `begin`."""
    assert process.stdout
    text = (await asyncio.wait_for(process.stdout.readline(), 20)).decode()
    assert text.startswith(begin), text
    return text[len(begin) :].strip()


async def end(process: Process) -> tuple[int, str, str]:
    """Return exit code, remaining stdout, and stderr."""
    out, err = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def item(text: str) -> reward.ScoreItem:
    return reward.ScoreItem(experience=Experience(sample_id="a"), prompt_text=text)


async def test_a_service_drains_on_sigterm_and_running_calls_finish(start: Start) -> None:
    process = await start()
    target = await line(process, "READY ")
    assert target.startswith("127.0.0.1:")
    channel = open_channel(target, None)
    check = health_pb2.HealthCheckRequest(service="fourfold.reward.v1.RewardService")
    response = await health_pb2_grpc.HealthStub(channel).Check(check, timeout=5)
    assert response.status == health_pb2.HealthCheckResponse.SERVING
    client = AsyncRewardClient(channel, peer="reward-0")
    running = asyncio.create_task(client.score([item("0.6")], timeout=5))
    await line(process, "SCORING")
    began = time.monotonic()
    process.terminate()
    (score,) = await running
    assert score.score == 1
    code, out, err = await end(process)
    assert time.monotonic() - began < 20
    assert (code, out) == (0, "DRAINING\nDRAINED\n")
    assert "Traceback" not in err
    await channel.close()


async def test_ctrl_c_ends_a_starting_service(start: Start) -> None:
    process = await start("--slow-start", "30")
    await line(process, "STARTING")
    process.send_signal(signal.SIGINT)
    code, out, err = await end(process)
    assert (code, out) == (0, "DRAINING\nDRAINED\n")
    assert "Traceback" not in err


def signals_wait(pid: int) -> bool:
    return not re.search(r"^ShdPnd:\s*0+$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)


async def test_a_second_signal_ends_a_service_whose_loop_is_stuck(start: Start) -> None:
    process = await start()
    channel = open_channel(await line(process, "READY "), None)
    blocked = asyncio.create_task(AsyncRewardClient(channel, peer="r").score([item("block")], timeout=10))
    await line(process, "BLOCKED")
    process.terminate()
    async with asyncio.timeout(20):  # pending signals of one kind are merged
        while signals_wait(process.pid):
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    assert process.returncode is None
    began = time.monotonic()
    process.terminate()
    code, _, _ = await end(process)
    assert time.monotonic() - began < 20
    assert code == 128 + signal.SIGTERM
    with pytest.raises(errors.Unavailable):
        await blocked
    await channel.close()


async def test_a_slow_drain_and_a_stuck_thread_delay_the_exit_only_briefly(start: Start) -> None:
    process = await start("--slow-drain", "60", "--stuck-thread", "--hasty")
    await line(process, "READY ")
    began = time.monotonic()
    process.terminate()
    code, out, err = await end(process)
    assert time.monotonic() - began < 20
    assert out == "DRAINING\n"
    assert "a step of the drain failed: " in err
    assert "the drain took more than 1.0 s; exiting" in err.splitlines()[-1]
    assert code == 128 + signal.SIGTERM


async def test_an_error_at_the_start_is_one_line(start: Start) -> None:
    code, _, err = await end(await start("--fail", "model.source = 'x': no such folder; give one"))
    assert code == 1
    assert err.splitlines()[-1] == "reward-0: model.source = 'x': no such folder; give one"
    assert "Traceback" not in err


async def test_a_malformed_address_is_refused_before_anything_is_loaded(start: Start) -> None:
    for target, text in (
        ("localhost", "'localhost' is not an address; give HOST:PORT, for example 127.0.0.1:50051"),
        ("10.0.0.1:50050", "10.0.0.1:50050: without TLS a service is only called on this machine"),
    ):
        code, out, err = await end(await start("--coordinator", target, "--slow-start", "60"))
        assert (code, out) == (1, "")
        assert text in err.splitlines()[-1]


async def test_a_fatal_error_from_a_thread_is_the_last_line_and_exit_code_1(start: Start) -> None:
    process = await start()
    channel = open_channel(await line(process, "READY "), None)
    await AsyncRewardClient(channel, peer="r").score([item("fatal")], timeout=5)
    code, out, err = await end(process)
    assert (code, out) == (1, "DRAINING\nDRAINED\n")
    assert err.splitlines()[-1] == "reward-0: the engine died (signal 9)"
    await channel.close()


async def test_the_result_of_until_is_the_exit_code_and_a_signal_cancels_it(start: Start) -> None:
    one, two = await start("--until", "7"), await start("--forever")
    await line(two, "READY ")
    two.terminate()
    assert (await end(one))[0] == 7
    code, _, err = await end(two)
    assert code == 128 + signal.SIGTERM
    assert "Traceback" not in err


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_service_dies_with_its_launcher() -> None:
    script = textwrap.dedent("""
        import os, subprocess, sys, time
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.service"], env={**os.environ, "FOURFOLD_PARENT_PID": str(os.getpid())}
        )
        print("CHILD", child.pid, flush=True)
        time.sleep(60)
    """)
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=PIPE, cwd=REPOSITORY)
    child = int(await line(parent, "CHILD "))
    await line(parent, "READY ")
    parent.kill()
    await parent.wait()
    for _ in range(100):
        if not alive(child):
            return
        await asyncio.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    raise AssertionError("the service outlived its launcher")


class Coordinator(pb_grpc.MembershipServiceServicer):
    """A coordinator that records its calls; a test may delete its leases."""

    def __init__(self, ttl: float = 2.0) -> None:
        self.ttl = Duration()
        self.ttl.FromNanoseconds(int(ttl * 1e9))
        self.registered: list[pb.RegisterRequest] = []
        self.leases: set[bytes] = set()
        self.kept_alive = self.deregistered = 0
        self.drain = False
        self.refuse: Exception | None = None

    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:
        if self.refuse is not None:
            raise self.refuse
        self.registered.append(request)
        self.leases.add(token := os.urandom(16))
        return pb.RegisterResponse(lease_token=token, ttl=self.ttl)

    async def KeepAlive(self, request: pb.KeepAliveRequest, context: Context) -> pb.KeepAliveResponse:
        if request.lease_token not in self.leases:
            raise errors.NotFound("no such lease")
        self.kept_alive += 1
        return pb.KeepAliveResponse(ttl=self.ttl, drain_requested=self.drain)

    async def Deregister(self, request: pb.DeregisterRequest, context: Context) -> pb.DeregisterResponse:
        self.leases.discard(request.lease_token)
        self.deregistered += 1
        return pb.DeregisterResponse()

    async def serve(self, listen: str = "127.0.0.1:0") -> tuple[Server, str]:
        server = Server(listen=listen, security=None)
        server.add(*self.servicer())
        return server, await server.start()

    def servicer(self) -> Servicer:
        service = pb.DESCRIPTOR.services_by_name["MembershipService"]
        return service, pb_grpc.add_MembershipServiceServicer_to_server, self

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(15):
            while not condition():
                await asyncio.sleep(0.02)


async def test_a_member_registers_renews_comes_back_and_leaves(start: Start) -> None:
    coordinator = Coordinator()
    server, address = await coordinator.serve()
    process = await start("--coordinator", address)
    target = await line(process, "READY ")
    await coordinator.until(lambda: coordinator.kept_alive >= 2)
    (first,) = coordinator.registered
    assert (first.member_id, first.role, first.target) == ("reward-0", pb.ROLE_REWARD, target)
    assert first.tokenizer_sha256 == b"t" * 32
    assert len(first.incarnation) == 32
    coordinator.leases.clear()  # expired, or another coordinator took over
    await coordinator.until(lambda: len(coordinator.registered) == 2)
    await server.stop(0)  # the next coordinator starts without state
    await asyncio.sleep(0.4)
    again = Coordinator()
    server, _ = await again.serve(address)
    await again.until(lambda: again.kept_alive >= 1)
    assert again.registered[0].incarnation == first.incarnation
    process.terminate()
    code, _, err = await end(process)
    assert code == 0
    assert (again.deregistered, again.leases) == (1, set())
    records = [json.loads(text) for text in err.splitlines() if text.startswith("{")]
    assert {r["member"] for r in records} == {"reward-0"}
    assert [r["message"] for r in records].count("registered") == 3
    await server.stop(0)


async def test_a_service_is_ready_when_it_is_registered_and_says_what_prevents_that(start: Start) -> None:
    coordinator = Coordinator()
    server, address = await coordinator.serve()
    await server.stop(0)
    proxy = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    began = time.monotonic()
    process = await start("--coordinator", address, "--hasty", **proxy)
    cause = await line(process, f"NOT READY: cannot register with the coordinator at {address}: ")
    assert time.monotonic() - began < 10
    assert "nothing listens there" in cause and f"ipv4:{address}" in cause and cause.endswith("; trying again")
    server, _ = await coordinator.serve(address)
    while (said := (await line(process, "")).partition(" "))[0] == "NOT":  # until the channel tries again
        pass
    assert (said[0], coordinator.registered[0].target) == ("READY", said[2])
    await server.stop(0)


async def test_a_member_that_is_asked_to_drain_ends_with_0(start: Start) -> None:
    coordinator = Coordinator()
    coordinator.drain = True
    server, address = await coordinator.serve()
    code, out, _ = await end(await start("--coordinator", address))
    assert code == 0
    assert out.endswith("DRAINING\nDRAINED\n")
    assert coordinator.deregistered == 1
    await server.stop(0)


async def test_a_member_that_can_never_be_accepted_exits_with_the_reason(start: Start) -> None:
    coordinator = Coordinator()
    coordinator.refuse = errors.WrongState("tokenizer 74 is not the run's; start it with the run's model")
    server, address = await coordinator.serve()
    code, _, err = await end(await start("--coordinator", address))
    assert code == 1
    assert "tokenizer 74 is not the run's" in err.splitlines()[-1]
    await server.stop(0)
