"""All attacks of `tests/support/hostile_attacks.py` at once on a gateway, while agents play the tasks of its run.

The run has the real coordinator and a real gateway process; engines and trainer are toys. Without TLS, the hostile
client and the agents are one caller for the gateway.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import psutil
import pytest

from fourfold.agent.client import AsyncAgentClient
from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.errors import FourfoldError
from fourfold.rpc.channel import open_channel
from fourfold_coordinator.state.ledger import SampleState
from tests.contract import conftest
from tests.fakes.stage import Stage, check_books
from tests.support.hostile_attacks import HostilePlan
from tests.support.hostile_client import HostileProcess, Report, hostile_process
from tests.support.session_run import GatewayProcess

make_stage = conftest.make_stage
AGENTS = {"source": "tasks", "lease_seconds": 20.0, "group_seconds": 60.0}
STEPS, STEP_SECONDS, WIDTH = 10, 0.5, 8
SAMPLES = STEPS * 3 * 4
MOST_SESSIONS, MIB = 100, 1 << 20
PHASES, PHASE_SECONDS = 5, 6.0  # attacks that only met a gateway full of connections are made again


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def play(target: str, http: str) -> None:
    """Attempt tasks until cancelled: a turn over gRPC, another one over HTTP."""
    async with open_channel(target, None) as channel, httpx.AsyncClient(timeout=20) as web:
        agent = AsyncAgentClient(channel, peer="gateway")
        while True:
            try:
                if (task := await agent.next_task(wait=0.5)) is not None:
                    await attempt(agent, web, http, task)
            except FourfoldError:  # the run begins or ends
                await asyncio.sleep(0.05)


async def attempt(agent: AsyncAgentClient, web: httpx.AsyncClient, http: str, task: pb.Task) -> None:
    session = f"good-{task.task_id}"
    await agent.open_session(session, task_id=task.task_id)
    messages = list(task.messages) or [pb.Message(role="user", content=task.text)]
    messages += [await agent.chat(session, messages), pb.Message(role="user", content="2 * 3 =")]
    chat = [{"role": message.role, "content": message.content} for message in messages]
    while True:
        response = await web.post(f"http://{http}/sessions/{session}/v1/chat/completions", json={"messages": chat})
        if response.status_code not in (429, 503):
            break
        assert response.headers["retry-after"]
        await asyncio.sleep(0.2)
    assert response.status_code == 200, response.text
    await agent.close_session(session, reward=float(task.sample_index % 2))


class Memory:
    """The largest memory of a process in a time, in MiB."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.before = self.most = self._now()

    def _now(self) -> float:
        return float(self._process.memory_info().rss / MIB)

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            self.most = max(self.most, self._now())


@asynccontextmanager
async def running(*work: Any) -> AsyncIterator[None]:
    """Run coroutines in tasks, and cancel them at the end; the first one that fails ends the block."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in work]
        yield
        for task in tasks:
            task.cancel()


async def rest(hostile: HostileProcess) -> Report:
    """End the attacks; repeat them in short phases until each had an answer other than that of a full gateway."""
    report = await hostile.rest()
    for _ in range(PHASES):
        if not report.faults():
            break
        await hostile.attack()
        await asyncio.sleep(PHASE_SECONDS)
        report = await hostile.rest()
    return report


@pytest.mark.slow
async def test_a_run_goes_on_while_its_gateway_is_attacked(make_stage: Callable[..., Stage]) -> None:
    public = f"127.0.0.1:{free_port()}"
    limits = {"max_body_mib": 1, "body_seconds": 3.0, "max_connections": 96, "public_listen": public}
    limits["max_open_sessions_per_agent"] = MOST_SESSIONS
    stage = make_stage(steps=STEPS, agents=AGENTS, gateway=limits, data={"holdout": None})

    async def train(_step: int) -> None:
        await asyncio.sleep(STEP_SECONDS)

    stage.trainer.on_train = train
    await stage.start()
    gateway = GatewayProcess(stage.folder, stage.config, stage.address)
    plan = HostilePlan(
        http=gateway.http,
        public=public,
        max_body_bytes=MIB,
        flood=128,
        sessions=10 * MOST_SESSIONS,
        sessions_per_second=100,
        pause=1.0,
    )
    try:
        await gateway.start()
        assert gateway.process is not None
        memory = Memory(gateway.process.pid)
        async with hostile_process(plan) as hostile, running(memory.watch()):
            await hostile.attack()
            async with running(*(play(gateway.target, gateway.http) for _ in range(WIDTH))):
                assert await stage.finish(60) == 0
            report = await rest(hostile)
        census, states = await gateway.census(), gateway.states()
    finally:
        await gateway.kill()
    check_books(stage)
    assert stage.ledger().counts() == {SampleState.TRAINED: SAMPLES}
    good = Counter(state for name, state in states.items() if name.startswith("good"))
    assert good == {pb.SESSION_STATE_STORED: SAMPLES}
    assert report.faults() == []
    assert report.refused("TOO_MANY_SESSIONS") > MOST_SESSIONS
    assert memory.most - memory.before < 100, f"{memory.before:.0f} MiB before, {memory.most:.0f} MiB in the attacks"
    assert census["turns in flight"] == 0 and census["sessions"] == MOST_SESSIONS
