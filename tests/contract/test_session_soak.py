"""Every closed session is in the run's store once, with the tokens of its agent: agents and the gateway are killed.

Engines are toys whose tokens show what they were sampled from; the gateway, the agents and the store are real. The soak
test writes its numbers to the folder FOURFOLD_SESSION_RESULTS.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from fourfold.config import Config
from fourfold_bench import record
from tests.fakes.chain_rollout import ChainRollout, check_chain
from tests.fakes.stage import until
from tests.fakes.toy import VOCABULARY, make_config
from tests.support.agent_process import AgentPlan
from tests.support.memory_folder import memory_folder
from tests.support.session_run import Agents, Books, GatewayProcess, check, wait_for_gateway

RESULTS: Final = os.environ.get("FOURFOLD_SESSION_RESULTS", "")
_UPDATES = 5

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Size:
    sessions: int
    agents: int
    width: int
    kills: int
    seconds: float


EVERYDAY, SOAK = Size(200, 4, 8, 4, 60), Size(10_000, 24, 8, 60, 1200)


class World:
    """Everything of one run."""

    def __init__(self, folder: Path, size: Size) -> None:
        self.size = size
        self.config: Config = make_config(
            folder,
            model={"max_context_tokens": 192},
            agents={"source": "tasks", "lease_seconds": 5.0, "group_seconds": 900.0},
        )
        self.engines = [ChainRollout(f"rollout-{i}", self.config, fault_share=0.03, seconds=0.01) for i in range(2)]
        self.books = Books(
            folder, self.config, vocabulary_size=VOCABULARY, newest_version=lambda: self.engines[0].version
        )
        self.folder = folder

    async def start(self) -> None:
        for engine in self.engines:
            await engine.start()
        await self.books.start({engine.member_id: engine.target for engine in self.engines})
        self.gateway = GatewayProcess(self.folder, self.config, self.books.target)
        await self.gateway.start()
        plan = AgentPlan(
            target=self.gateway.target, http=self.gateway.http, journal="", width=self.size.width, idle_seconds=1.5
        )
        self.agents = Agents(self.folder / "agents", plan)

    async def stop(self) -> None:
        await self.agents.stop()
        await self.gateway.kill()
        for line in self.gateway.errors():  # pytest shows them with a failure
            log.error("%s", line)
        await self.books.stop()
        for engine in self.engines:
            await engine.kill()

    def _has_taken(self, count: float) -> bool:
        return self.books.taken >= count

    async def disturb(self) -> None:
        """Kill agents and the gateway and change the weights, all while sessions run."""
        size, choice = self.size, random.Random(5)
        events = ["kill"] * size.kills + ["update"] * _UPDATES + ["restart"]
        choice.shuffle(events)
        for number, event in enumerate(events, 1):
            due = 0.8 * number / len(events) * size.sessions
            await until(partial(self._has_taken, due), size.seconds)
            if event == "kill":
                await self.agents.kill_one()
            elif event == "update":
                for engine in self.engines:
                    engine.version += 1
            else:
                await self.gateway.kill()
                await self.gateway.start()


@pytest.fixture
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    with memory_folder() as folder:
        world = World(folder, request.param)
        await world.start()
        yield world
        await world.stop()


@pytest.mark.parametrize(
    "world",
    [
        pytest.param(EVERYDAY, id="everyday", marks=pytest.mark.slow),
        pytest.param(SOAK, id="soak", marks=[pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(SOAK.seconds)]),
    ],
    indirect=True,
)
async def test_sessions_are_stored_once_with_the_tokens_of_their_agents(world: World) -> None:
    size, began = world.size, time.monotonic()
    world.books.issue(size.sessions)
    await world.agents.start(size.agents)
    disturbing = asyncio.create_task(world.disturb())
    stored = await world.books.finish(size.seconds)
    seconds = time.monotonic() - began
    await disturbing
    await world.agents.stop()
    census = await wait_for_gateway(lambda: any(engine.running for engine in world.engines), world.gateway, seconds=20)
    checked = check(stored, world.agents.journals(), world.gateway.states(), tasks=size.sessions)
    for each in stored:
        for segment in each.segments:
            check_chain(segment)
    assert min(checked[name] for name in ("ids", "chat", "http", "crossed an update")) > 0, checked
    assert checked["sessions"] > checked["closed"], "no session was left open"
    assert world.gateway.starts == 2 and sum(engine.faults for engine in world.engines) > 0
    assert not [engine.running for engine in world.engines if engine.running]
    assert (census["sessions"], census["trajectories"], census["turns in flight"]) == (0, 0, 0)
    assert not world.gateway.errors()
    if RESULTS and size is SOAK:
        _save(world, seconds, checked, census)


def _save(world: World, seconds: float, checked: Mapping[str, int], census: Mapping[str, int]) -> None:
    result = record.document(
        "agent-sessions-toy",
        command="python -m pytest tests/contract/test_session_soak.py -m soak",
        parameters=asdict(world.size) | {"updates": _UPDATES, "engines": len(world.engines)},
        results={
            "seconds": round(seconds, 1),
            "checked": dict(checked),
            "kills": dict(world.agents.kills),
            "gateway_starts": world.gateway.starts,
            "engine_calls": sum(engine.calls for engine in world.engines),
            "engine_faults": sum(engine.faults for engine in world.engines),
            "gateway_census": dict(census),
        },
        libraries=("grpcio", "protobuf", "numpy"),
    )
    record.write(Path(RESULTS), result)
