"""Faults around episodes: slow or hostile environments, sessions that do not close, drains, gateways that move."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from fourfold import errors
from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.rpc.server import Server
from fourfold_reward.environment.members import RunGateways
from fourfold_reward.environment.runner import Play
from tests.contract import test_environment as environment
from tests.contract.test_environment import Make, Stage
from tests.fakes.agent import FakeGateway

Context = grpc.aio.ServicerContext[Any, Any]
# The answer of the task selects the behaviour of the environment.
ENVIRONMENTS = """
import time
from fourfold_reward.environment import Done, Observation

class Odd:
    def __init__(self):
        self.begun = False

    def reset(self, task):
        self.task, self.begun = task, True
        if task.answer == "done at once": return Done(1.0)
        if task.answer == "slow reset": time.sleep(3)
        return Observation("go")

    def step(self, action):
        match self.task.answer:
            case "far turn": return Done(1.0, {7: 1.0})
            case "huge": return Done(1e39)
            case "huge turn": return Done(1.0, {0: 1e39})
            case "names": return Done(1.0, metrics={"win rate": 1.0, "x" * 64: 2.0, "\\u00e4:b": 3.0})
            case "again": return Observation("again")
            case "short wait":
                time.sleep(0.4)
                return Observation("again")
            case "wait": time.sleep(4)
        return Done(2.0)

    def truncate(self):
        return Done(0.25 if self.begun else 0.75)

    def close(self):
        if self.task.answer == "slow close": time.sleep(5)
        if self.task.answer == "endless close": time.sleep(1000)

class Caller:
    async def run(self, task, endpoint):
        return Done(1.0, {7: 1.0})

class SlowStart(Odd):
    def __init__(self):
        super().__init__()
        time.sleep(4)
"""


class Strict(FakeGateway):
    """A gateway that checks outcomes as the real one does, and can hold calls back."""

    def __init__(self) -> None:
        super().__init__(lambda _: "hello", http_url="http://127.0.0.1:1")
        self.refused: list[str] = []
        self.open_seconds = self.task_seconds = 0.0
        self.lengths: list[float] = []  # seconds from each OpenSession to the end of the session
        self._began: dict[str, float] = {}

    async def NextTask(self, request: pb.NextTaskRequest, context: Context) -> pb.NextTaskResponse:
        response = await super().NextTask(request, context)
        if response.HasField("task"):
            await asyncio.sleep(self.task_seconds)
        return response

    async def OpenSession(self, request: pb.OpenSessionRequest, context: Context) -> pb.OpenSessionResponse:
        self._began[request.session_id] = time.monotonic()
        response = await super().OpenSession(request, context)
        await asyncio.sleep(self.open_seconds)
        return response

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Context) -> pb.CloseSessionResponse:
        turns = sum(turn.session_id == request.session_id for turn in self.turns)
        if not request.abandon_reason:
            if not turns:
                raise self._refusal(errors.WrongState("no finished turn"))
            if any(reward.turn_index >= turns for reward in request.turn_rewards):
                raise self._refusal(errors.InvalidInput("turn_rewards names no turn"))
            if any(not re.fullmatch("[A-Za-z0-9_./-]{1,63}", name) for name in request.metrics):
                raise self._refusal(errors.InvalidInput("a name of a metric"))
        self.lengths.append(time.monotonic() - self._began[request.session_id])
        return await super().CloseSession(request, context)

    def _refusal(self, error: errors.FourfoldError) -> errors.FourfoldError:
        self.refused.append(error.message)
        return error


async def reached(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


plain_stage = environment.stage


@pytest.fixture
def stage(plain_stage: Make, tmp_path: Path) -> Make:
    """Return a function that starts a class of ENVIRONMENTS with a strict gateway."""
    (tmp_path / "odd.py").write_text(ENVIRONMENTS)

    def make(name: str = "Odd", **environment: Any) -> Awaitable[Stage]:
        return plain_stage(gateway=Strict(), source=f"{tmp_path}/odd.py:{name}", **environment)

    return make


async def test_an_episode_without_a_turn_is_abandoned_at_once(stage: Make) -> None:
    s = await stage()
    outcome = await s.outcome(answer="done at once")
    assert outcome.abandon_reason == "ENVIRONMENT_ERROR" and not s.gateway.refused


async def test_a_reward_beyond_float32_is_an_error_of_the_environment(stage: Make) -> None:
    s = await stage()
    for answer in ("huge", "huge turn"):
        assert (await s.outcome(answer=answer)).abandon_reason == "ENVIRONMENT_ERROR"


async def test_deep_metadata_reaches_the_environment(stage: Make) -> None:
    s = await stage()
    assert (await s.outcome(metadata_json='{"a": ' * 600 + "1" + "}" * 600)).reward == 2


async def test_metrics_get_names_that_the_run_takes(stage: Make) -> None:
    s = await stage()
    outcome = await s.outcome(answer="names")
    assert outcome.reward == 1 and dict(outcome.metrics) == {"turns": 1, "win_rate": 1, "x" * 63: 2, "__b": 3}


async def test_a_session_that_the_gateway_does_not_close_is_abandoned(stage: Make) -> None:
    """The service does not see the turns of an agent that calls the model itself."""
    s = await stage("Caller", network=True)
    assert (await s.outcome()).abandon_reason == "ENVIRONMENT_ERROR" and len(s.gateway.refused) == 1
    await reached(lambda: not s.runner.running)
    assert s.runner.outcomes == {"ENVIRONMENT_ERROR": 1}


async def test_an_episode_that_ends_with_a_bug_is_counted_once(stage: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_play: Play) -> None:
        raise RuntimeError("a bug")

    s = await stage()
    monkeypatch.setattr(Play, "outcome", fail)
    s.gateway.add(text="problem")
    await reached(lambda: bool(s.runner.outcomes) and not s.runner.running)
    assert s.runner.outcomes == {"INTERNAL": 1}


async def test_the_end_of_a_group_leaves_time_to_hand_in_what_there_is(stage: Make) -> None:
    s = await stage(max_turns=1000)
    s.gateway.sample_seconds = 0.01
    # A tenth is left to end the episode: with 3 s, that was too little once on two busy cores.
    outcome = await s.outcome(answer="again", time_left=Duration(seconds=6))
    assert outcome.truncated and outcome.reward == 0.25 and s.gateway.lengths[0] < 5.8


async def test_a_call_that_soon_returns_keeps_the_reward_of_its_truncated_episode(stage: Make) -> None:
    s = await stage(max_turns=1000, episode_seconds=2)
    assert (await s.outcome(answer="short wait")).reward == 0.25


@pytest.mark.slow
async def test_a_slow_end_of_an_environment_costs_no_other_episode(stage: Make) -> None:
    s = await stage()
    pids = s.pool.pids()
    s.gateway.add(text="x", answer="wait")
    await reached(lambda: len(s.gateway.turns) == 1)
    assert (await s.outcome(answer="slow close")).reward == 2
    outcomes = await s.gateway.wait(2)
    assert [o.abandon_reason for o in outcomes] == ["", ""] and s.pool.pids() == pids and not s.pool.deaths


@pytest.mark.slow
async def test_an_environment_whose_end_never_comes_loses_its_process_when_it_is_free(stage: Make) -> None:
    s = await stage(step_seconds=5)
    pids = s.pool.pids()
    s.gateway.add(text="x", answer="endless close")
    s.gateway.add(text="x", answer="wait")
    outcomes = await s.gateway.wait(2)
    assert [o.abandon_reason for o in outcomes] == ["", ""]
    await reached(lambda: s.pool.pids() not in ([], pids))
    assert (await s.outcome()).reward == 2


async def test_an_environment_that_was_never_made_is_not_asked_for_a_reward(stage: Make) -> None:
    s = await stage("SlowStart", episode_seconds=1)
    outcome = await s.outcome()
    assert outcome.abandon_reason == "TRUNCATED"


async def test_a_drain_abandons_a_session_that_is_being_opened(stage: Make) -> None:
    s = await stage()
    s.gateway.open_seconds = 1000
    s.gateway.add(text="x")
    await reached(lambda: bool(s.gateway.opened))
    await s.runner.drain()
    (outcome,) = await s.gateway.wait()
    assert outcome.abandon_reason == "ENVIRONMENT_DRAINED"


async def test_a_drain_begins_no_episode(stage: Make) -> None:
    s = await stage()
    s.gateway.task_seconds = 0.5
    s.gateway.add(text="x")
    await reached(lambda: not s.gateway.tasks)
    await s.runner.drain()
    await asyncio.sleep(1)
    assert not s.gateway.opened and not s.runner.running


async def listen(gateway: FakeGateway) -> tuple[Server, str]:
    server = Server(listen="127.0.0.1:0", security=None)
    server.add(*gateway.servicer())
    target = await server.start()
    server.set_ready(True)
    return server, target


@pytest.mark.parametrize("gap", [False, True])
async def test_an_episode_goes_on_with_a_gateway_that_was_started_again_at_another_port(stage: Make, gap: bool) -> None:
    """With `gap`, the run forgets the gateway in between."""
    s = await stage(concurrent_episodes=1)
    gateway = Strict()
    gateway.sample_seconds = 1000
    gateways = RunGateways(s.runner, None)
    server, target = await listen(gateway)
    gateways.update({"gateway-0": target})
    gateway.add(2, text="x")
    await reached(lambda: len(gateway.turns) == 1)
    await server.stop(0)
    gateway.sample_seconds = 0.0
    if gap:
        gateways.update({})
    server, target = await listen(gateway)
    try:
        gateways.update({"gateway-0": target})
        outcomes = await gateway.wait(2)
        assert [o.reward for o in outcomes] == [2, 2]
    finally:
        await gateways.close()
        await server.stop(0)


async def test_an_episode_of_a_gateway_that_left_gives_its_place_to_the_tasks_of_another(stage: Make) -> None:
    """The episode called the gateway until its time was over, and held its place."""
    s = await stage(concurrent_episodes=1)
    gone, other = Strict(), Strict()
    gone.sample_seconds = 1000
    gateways = RunGateways(s.runner, None)
    (first, one), (second, two) = await listen(gone), await listen(other)
    gateways.update({"gateway-0": one})
    gone.add(text="x")
    await reached(lambda: len(gone.turns) == 1)
    try:
        gateways.update({"gateway-1": two})
        other.add(text="x")
        (outcome,) = await other.wait(1)
        assert outcome.reward == 2 and not gone.closed
        assert s.runner.outcomes["GATEWAY_LEFT"] == 1
    finally:
        await gateways.close()
        await asyncio.gather(first.stop(0), second.stop(0))
