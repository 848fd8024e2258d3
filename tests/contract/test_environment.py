"""Episodes of the environment service, with real worker processes and a fake gateway over real gRPC."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.config import Config
from fourfold.errors import ConfigError
from fourfold_reward.environment.gateways import Gateway
from fourfold_reward.environment.pool import EnvironmentPool
from fourfold_reward.environment.python_tool import PythonTool
from fourfold_reward.environment.runner import EpisodeLimits, Runner
from fourfold_reward.environment.spec import PYTHON_TOOL, EnvironmentSpec
from fourfold_reward.worker_sandbox import WorkerSandbox
from tests.conftest import Serve
from tests.fakes.agent import FakeGateway, Policy, text_of
from tests.fakes.stage import until

ROOT = Path(__file__).parents[2]
RECIPE: dict[str, Any] = {
    "name": "x",
    "steps": 1,
    "model": {"source": "none", "max_context_tokens": 4096},
    "data": {"train": {"path": "none.jsonl"}},
    "sampling": {"max_new_tokens": 64},
    "batch": {"prompts_per_step": 1, "group_size": 2},
}
# The answer of the task selects the behaviour of the environment.
ENVIRONMENTS = """
import asyncio, ctypes, os, time
from fourfold_reward.environment import Action, Done, Message, Observation

class Echo:
    def __init__(self, turns=2):
        self.turns, self.texts = turns, []

    def reset(self, task):
        self.task = task
        match task.answer:
            case "raise": raise KeyError("no such thing")
            case "huge": return Observation("x" * (1 << 30))
        return Observation(task.prompt)

    async def step(self, action):
        print("this must not reach the pipe", flush=True)
        self.texts.append(action.text)
        match self.task.answer:
            case "hang": await asyncio.sleep(1000)
            case "block": time.sleep(1000)
            case "die": os._exit(7)
            case "nan": return Done(float("nan"))
            case "score": return Done(None)
            case "odd": return Observation([Message("tool", "\\x1b[31m\\ud800")])
        if len(self.texts) >= self.turns:
            return Done(float(len(self.texts)), {0: 0.5}, {"said/length": len(action.text)})
        return Observation("go on")

    def truncate(self):
        return Done(0.25) if self.task.answer != "no reward" else None

class Text(Echo):
    def reset(self, task):
        super().reset(task)
        return Observation("begin")

class Threads(Echo):
    def step(self, action):
        if self.task.answer == "hang": time.sleep(1000)
        return Done(1.0)

class Pid(Echo):
    def step(self, action): return Done(float(os.getpid()))

class Caller:
    async def run(self, task, endpoint):
        assert endpoint.api_key not in repr(endpoint)
        return Done(float(endpoint.base_url.endswith("/v1")), metrics={"key": len(endpoint.api_key)})

def add(a: int, b: int = 2) -> int:
    "Adds."
    if a == 13: raise ArithmeticError("unlucky")
    return a + b

def flood(count: int) -> str:
    "Returns much."
    return "\\x1b]0;title\\x07" + "x" * count
"""


@dataclass
class Stage:
    """An environment service of a test, with the gateway that it calls."""

    gateway: Any
    pool: EnvironmentPool
    runner: Runner
    serving: asyncio.Task[None]

    async def outcome(self, **task: Any) -> pb.CloseSessionRequest:
        """Run one episode and return how its session was closed."""
        before = len(self.gateway.closed)
        self.gateway.add(**{"text": "problem", **task})
        outcomes: list[pb.CloseSessionRequest] = await self.gateway.wait(before + 1)
        return outcomes[-1]


Make = Callable[..., Awaitable[Stage]]


@pytest.fixture
async def stage(serve: Serve, tmp_path: Path) -> AsyncIterator[Make]:
    (tmp_path / "envs.py").write_text(ENVIRONMENTS)
    async with AsyncExitStack() as stack:

        async def make(
            policy: Policy = lambda _: "hello",
            *,
            context: int = 4096,
            http_url: str = "",
            gateway: FakeGateway | None = None,
            scores: bool = False,
            **environment: Any,
        ) -> Stage:
            values = {"source": f"{tmp_path}/envs.py:Echo", "step_seconds": 20, "concurrent_episodes": 4, **environment}
            recipe = Config.model_validate({**RECIPE, "environment": values, "rollout": {"tool_parser": "hermes"}})
            config = recipe.environment
            gateway = gateway or FakeGateway(policy, context=context, http_url=http_url)
            channel = await serve(gateway.servicer())
            pool = EnvironmentPool(
                EnvironmentSpec.from_config(recipe, directory=tmp_path),
                processes=config.processes,
                step_seconds=config.step_seconds,
                sandbox=WorkerSandbox(network=config.network, memory_gib=config.memory_gib),
                on_failure=pytest.fail,
            )
            stack.push_async_callback(pool.close)
            await pool.start()
            limits = EpisodeLimits(
                max_turns=config.max_turns,
                max_new_tokens=64,
                episode_seconds=config.episode_seconds,
                scores=scores,
                tool_calls=config.tool_calls,
            )
            python = PythonTool(seconds=20) if PYTHON_TOOL in config.tools else None
            runner = Runner(pool, limits, concurrent=config.concurrent_episodes, python=python)
            serving = asyncio.create_task(runner.serve(Gateway(channel, "gateway-0")))

            async def stop() -> None:
                serving.cancel()
                await runner.drain()

            stack.push_async_callback(stop)
            return Stage(gateway, pool, runner, serving)

        yield make


async def test_an_episode_of_two_turns_is_closed_with_its_reward(stage: Make) -> None:
    s = await stage()
    outcome = await s.outcome(text="problem")
    assert outcome.reward == 2 and not outcome.truncated
    assert [(r.turn_index, r.reward) for r in outcome.turn_rewards] == [(0, 0.5)]
    assert dict(outcome.metrics) == {"turns": 2, "said/length": 5}
    first, second = s.gateway.turns
    assert [m.content for m in first.chat.messages] == ["problem"]
    assert [(m.role, m.content) for m in second.chat.messages] == [
        ("user", "problem"),
        ("assistant", "hello"),
        ("user", "go on"),
    ]
    assert first.request_id != second.request_id and first.sampling_params.max_tokens == 64
    assert s.gateway.opened[outcome.session_id].task_id == "task-0"


async def test_failed_calls_are_repeated_with_their_ids(stage: Make) -> None:
    s = await stage()
    s.gateway.failures.update(NextTask=1, OpenSession=1, Generate=2, CloseSession=1)
    assert (await s.outcome()).reward == 2
    assert len(s.gateway.opened) == 1 and len(s.gateway.turns) == 2


@pytest.mark.parametrize(("answer", "reward"), [("", 0.25), ("no reward", None)])
async def test_an_episode_at_its_last_turn_is_truncated_with_its_reward_or_abandoned(
    stage: Make, answer: str, reward: float | None
) -> None:
    s = await stage(max_turns=3, options={"turns": 100})
    outcome = await s.outcome(answer=answer)
    assert len(s.gateway.turns) == 3
    if reward is None:
        assert outcome.abandon_reason == "TRUNCATED"
    else:
        assert outcome.truncated and outcome.reward == reward


async def test_an_episode_that_fills_the_context_is_truncated(stage: Make) -> None:
    s = await stage(context=30, options={"turns": 100}, max_turns=100)
    outcome = await s.outcome(text="p" * 20)
    assert outcome.truncated and outcome.reward == 0.25 and outcome.metrics["turns"] == 2


async def test_a_prompt_that_does_not_fit_is_abandoned(stage: Make) -> None:
    s = await stage(context=30)
    assert (await s.outcome(text="p" * 31)).abandon_reason == "PROMPT_REFUSED"


async def test_an_episode_is_truncated_at_its_time_limit_while_the_model_samples(stage: Make) -> None:
    def policy(_: pb.GenerateRequest) -> str:
        s.gateway.sample_seconds = 1000  # of the second turn
        return "hello"

    s = await stage(policy, episode_seconds=2)
    outcome = await s.outcome()
    assert outcome.truncated and outcome.reward == 0.25 and outcome.metrics["turns"] == 1


async def test_an_episode_whose_time_is_over_before_its_first_turn_is_abandoned(stage: Make) -> None:
    s = await stage(episode_seconds=1)
    s.gateway.sample_seconds = 1000
    assert (await s.outcome()).abandon_reason == "TRUNCATED"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("raise", "ENVIRONMENT_ERROR"),
        ("huge", "ENVIRONMENT_ERROR"),
        ("nan", "ENVIRONMENT_ERROR"),
        ("score", "NO_REWARD"),
        ("die", "ENVIRONMENT_DIED"),
    ],
)
async def test_a_faulty_environment_costs_its_episode_and_the_next_one_runs(
    stage: Make, answer: str, reason: str
) -> None:
    s = await stage()
    assert (await s.outcome(answer=answer)).abandon_reason == reason
    assert (await s.outcome()).reward == 2
    await until(lambda: not s.runner.running)
    assert s.runner.outcomes == {reason: 1, "DONE": 1}


async def test_a_broken_session_of_text_reaches_the_model_as_text(stage: Make) -> None:
    s = await stage(max_turns=2)
    assert (await s.outcome(answer="odd")).reward == 0.25
    assert s.gateway.turns[1].chat.messages[-1].role == "tool"


@pytest.mark.slow
async def test_a_step_that_waits_too_long_costs_only_its_episode(stage: Make) -> None:
    s = await stage(step_seconds=1)
    (pid,) = s.pool.pids()
    s.gateway.sample_seconds = 2
    s.gateway.add(text="x")
    assert (await s.outcome(answer="hang")).abandon_reason in ("STEP_TIMEOUT", "")
    outcomes = await s.gateway.wait(2)
    assert sorted(o.abandon_reason for o in outcomes) == ["", "STEP_TIMEOUT"]
    assert s.pool.pids() == [pid]  # an `async def` can be cancelled


async def test_a_process_with_a_thread_that_does_not_end_is_replaced(stage: Make, tmp_path: Path) -> None:
    s = await stage(source=f"{tmp_path}/envs.py:Threads", step_seconds=1)
    (pid,) = s.pool.pids()
    assert (await s.outcome(answer="hang")).abandon_reason == "STEP_TIMEOUT"
    assert (await s.outcome()).reward == 1
    assert pid not in s.pool.pids() and not psutil.pid_exists(pid)


@pytest.mark.slow
async def test_a_process_that_blocks_is_killed_and_its_other_episodes_are_abandoned(stage: Make) -> None:
    s = await stage(step_seconds=1)
    (pid,) = s.pool.pids()
    assert (await s.outcome(answer="block")).abandon_reason == "STEP_TIMEOUT"
    assert (await s.outcome()).reward == 2
    assert not psutil.pid_exists(pid)


async def test_a_killed_process_fails_its_episodes_at_once(stage: Make) -> None:
    s = await stage()
    s.gateway.add(2, text="x", answer="hang")
    async with asyncio.timeout(30):
        while len(s.gateway.turns) < 2:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    os.kill(s.pool.pids()[0], signal.SIGKILL)
    outcomes = await s.gateway.wait(2)
    assert {o.abandon_reason for o in outcomes} == {"ENVIRONMENT_DIED"}
    assert s.pool.deaths == 1


async def test_episodes_run_at_the_same_time_up_to_the_limit_over_all_processes(stage: Make, tmp_path: Path) -> None:
    s = await stage(source=f"{tmp_path}/envs.py:Pid", processes=2, concurrent_episodes=4)
    s.gateway.sample_seconds = 0.3
    s.gateway.add(12, text="x")
    outcomes = await s.gateway.wait(12)
    assert s.gateway.most_busy == 4
    assert {int(o.reward) for o in outcomes} == set(s.pool.pids()) and len(s.pool.pids()) == 2


async def test_a_drain_abandons_running_episodes(stage: Make) -> None:
    s = await stage()
    s.gateway.sample_seconds = 1000
    s.gateway.add(text="x")
    async with asyncio.timeout(30):
        while not s.gateway.turns:
            await asyncio.sleep(0.01)
    await s.runner.drain()
    (outcome,) = await s.gateway.wait()
    assert outcome.abandon_reason == "ENVIRONMENT_DRAINED" and not s.runner.running


def calls(*pairs: tuple[str, str]) -> pb.Message:
    made = [pb.ToolCall(id=f"call-{i}", name=n, arguments_json=a) for i, (n, a) in enumerate(pairs)]
    return pb.Message(role="assistant", tool_calls=made)


async def test_tool_calls_are_answered_and_counted(stage: Make, tmp_path: Path) -> None:
    message = calls(
        ("add", '{"a": 1}'),
        ("add", '{"a": "x"}'),
        ("add", "{"),
        ("add", '{"a": 13}'),
        ("sub", "{}"),
        ("python", '{"code": "print(6 * 7)"}'),
        ("python", "[]"),
    )
    tools = [f"{tmp_path}/envs.py:add", PYTHON_TOOL]
    s = await stage(
        lambda request: message if len(request.chat.messages) == 1 else "the end",
        source="",
        tools=tools,
        scores=True,
    )
    outcome = await s.outcome(text="add 1 and 2")
    assert outcome.score and dict(outcome.metrics) == {"turns": 2, "tool_calls": 7, "tool_calls_valid": 3}
    first, second = s.gateway.turns
    assert [tool.name for tool in first.chat.tools] == ["add", "python"]
    assert json.loads(first.chat.tools[0].parameters_json)["required"] == ["a"]
    results = [m.content for m in second.chat.messages[2:]]
    assert results[0] == "3" and results[5] == "42"
    assert [text.startswith("Error: ") for text in results] == [False, True, True, True, True, False, True]
    assert "unlucky" in results[3] and "no tool 'sub'" in results[4]
    assert [m.tool_call_id for m in second.chat.messages[2:]] == [f"call-{i}" for i in range(7)]


@pytest.mark.parametrize(
    ("tool_calls", "required"),
    [("free", [None, None, None]), ("valid", [False, False, False]), ("required", [True, True, False])],
)
async def test_a_grammar_makes_calls_valid_and_requires_the_first(
    stage: Make, tmp_path: Path, tool_calls: str, required: list[bool | None]
) -> None:
    replies = iter([pb.Message(role="assistant", content="cut off"), calls(("add", '{"a": 1}')), "the end"])
    s = await stage(
        lambda request: next(replies),
        options={"turns": 2},
        tools=[f"{tmp_path}/envs.py:add"],
        tool_calls=tool_calls,
    )
    assert (await s.outcome()).reward == 2
    grammars = [turn.sampling_params.grammar for turn in s.gateway.turns]
    assert [g.tool_calls.required if g.HasField("tool_calls") else None for g in grammars] == required


async def test_a_text_as_first_observation_follows_the_system_prompt(stage: Make, tmp_path: Path) -> None:
    s = await stage(source=f"{tmp_path}/envs.py:Text")
    messages = [pb.Message(role="system", content="Be brief."), pb.Message(role="user", content="the task")]
    await s.outcome(text="", messages=messages)
    first, second = s.gateway.turns
    assert [(m.role, m.content) for m in first.chat.messages] == [("system", "Be brief."), ("user", "begin")]
    assert [m.role for m in second.chat.messages] == ["system", "user", "assistant", "user"]


@pytest.mark.slow
async def test_hostile_output_of_a_tool_is_cut_and_cleaned(stage: Make, tmp_path: Path) -> None:
    s = await stage(
        lambda request: calls(("flood", '{"count": 1000000000}')) if len(request.chat.messages) == 1 else "the end",
        source="",
        tools=[f"{tmp_path}/envs.py:flood"],
        scores=True,
        step_seconds=80,
    )
    outcome = await s.outcome()
    assert outcome.score and outcome.metrics["tool_calls_valid"] == 1
    text = s.gateway.turns[1].chat.messages[-1].content
    assert len(text) < 20_000 and "[cut: " in text and "\x1b" not in text and "\x07" not in text


async def test_an_agent_gets_the_address_and_key_of_its_session(stage: Make, tmp_path: Path) -> None:
    s = await stage(source=f"{tmp_path}/envs.py:Caller", http_url="http://127.0.0.1:1")
    outcome = await s.outcome()
    assert outcome.reward == 1 and outcome.metrics["key"] == len("secret-key")


async def test_an_agent_without_an_http_api_is_abandoned(stage: Make, tmp_path: Path) -> None:
    s = await stage(source=f"{tmp_path}/envs.py:Caller")
    assert (await s.outcome()).abandon_reason == "GATEWAY_ERROR"


async def test_a_gym_task_may_be_answered_again_until_it_is_right(stage: Make) -> None:
    answers = iter(["5", "41", "42"])
    s = await stage(lambda _: next(answers), kind="reasoning_gym", source="products")
    outcome = await s.outcome(text="6 * 7 =", answer="42", metadata_json='{"difficulty": {}}')
    assert outcome.reward == 1 and outcome.metrics["attempts"] == 3
    assert "Try again" in s.gateway.turns[1].chat.messages[-1].content


async def test_the_example_game_is_won_with_its_hints(stage: Make) -> None:
    def policy(request: pb.GenerateRequest) -> str:
        low, high = 1, 10
        for turn, answer in zip(request.chat.messages[1::2], request.chat.messages[2::2], strict=False):
            guess = int(turn.content)
            low, high = (guess + 1, high) if answer.content == "Higher." else (low, guess - 1)
        return str((low + high) // 2)

    s = await stage(policy, source=str(ROOT / "examples/environments/guessing.py:Guessing"))
    outcome = await s.outcome(answer="12")
    assert outcome.reward == 1 and outcome.metrics["guesses"] <= 4


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"source": "missing.py:Echo"}, "cannot read"),
        ({"source": "envs.py:Nothing"}, "defines no 'Nothing'"),
        ({"source": "envs.py:add"}, "a class with reset and step"),
        ({"source": "envs"}, "is not FILE.py:NAME"),
        ({"tools": ["envs.py:Echo"]}, "no type hint"),
        ({"kind": "verifiers", "source": "x"}, "environment.network = false"),
        ({"kind": "verifiers", "source": "x", "network": True}, r"reward\[verifiers\]"),
        ({"kind": "reasoning_gym", "source": "productz"}, "did you mean 'products'"),
        ({"kind": "reasoning_gym", "source": "countdown"}, "as code"),
        ({"kind": "openenv", "source": "x", "network": True}, "is no URL"),
    ],
)
async def test_an_environment_that_cannot_be_loaded_is_refused_at_the_start(
    stage: Make, environment: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        await stage(**environment)


OPENRLHF = ROOT / "tests/support/openrlhf_agent.py"


@pytest.mark.parametrize("name", ["AgentInstance", "AgentExecutor", "ReadmeInstance", "ReadmeExecutor"])
async def test_an_openrlhf_file_runs_on_raw_text_without_changes(stage: Make, name: str) -> None:
    s = await stage(lambda request: f"answer {len(text_of(request))}", kind="openrlhf", source=f"{OPENRLHF}:{name}")
    outcome = await s.outcome(messages=[pb.Message(role="user", content="1+1=")], text="", answer="2")
    assert outcome.reward == 3 and outcome.metrics["dummy_scores"] == 2
    first, second = s.gateway.turns
    assert text_of(first) == "<user>1+1=<assistant>"
    assert list(second.token_ids.ids) == [*first.token_ids.ids, *map(ord, "answer 21"), *map(ord, "\nTry again: ")]


async def test_an_openrlhf_executor_calls_the_model_itself(stage: Make) -> None:
    s = await stage(lambda request: "abc", kind="openrlhf", source=f"{OPENRLHF}:OwnExecutor")
    outcome = await s.outcome(text="xy", answer="2")
    assert outcome.reward == 6 and len(s.gateway.turns) == 2
    assert text_of(s.gateway.turns[1]) == "7abc"


@pytest.mark.parametrize(("replies", "reward"), [(["It is 41, no, 42."], 1), (["?", "41"], 0)])
async def test_the_openrlhf_example_asks_once_more_for_a_number(stage: Make, replies: list[str], reward: float) -> None:
    pytest.importorskip("torch")
    turns = iter(replies)
    source = str(ROOT / "examples/environments/openrlhf_agent.py:AgentExecutor")
    s = await stage(lambda _: next(turns), kind="openrlhf", source=source)
    outcome = await s.outcome(text="6 * 7 =", answer="42")
    assert outcome.reward == reward and outcome.metrics["turns"] == len(s.gateway.turns) == len(replies)
