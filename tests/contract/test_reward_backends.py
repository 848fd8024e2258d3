"""The reward service with each kind of backend: dispatch, GetInfo, packing, metrics, and its errors at the start."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fourfold.config import Config
from fourfold.contract import CONTRACT_VERSION
from fourfold.errors import ConfigError
from fourfold.reward.client import AsyncRewardClient
from fourfold.reward.v1 import reward_service_pb2 as pb
from fourfold.reward.v1.reward_service_pb2_grpc import add_RewardServiceServicer_to_server
from fourfold.rpc.codec import pack_ints
from fourfold.service.lifecycle import ServeOptions
from fourfold.types.v1.experience_pb2 import Experience
from fourfold_reward import serve as serve_module
from fourfold_reward.backend import Backend
from fourfold_reward.backends import make_backend
from fourfold_reward.job import Job
from fourfold_reward.metrics_source import reward_source
from fourfold_reward.protocol import Outcome
from fourfold_reward.servicer import RewardServicer, sampled_ids
from fourfold_reward.signatures import Reads
from tests.conftest import Serve
from tests.fakes.toy import make_config
from tests.support.http_peers import json_server

EXAMPLES = Path(__file__).parents[2] / "examples/rewards"
FUNCTIONS = """
from fourfold_reward import Score

def tokens(sample):
    ids = sample.completion_ids
    if sample.completion == "short": ids = ids[:-1]
    if sample.completion == "nan": return Score(1.0, token_rewards=[float("nan")] * len(ids))
    if sample.completion == "text": return Score(1.0, token_rewards="12")
    return {"score": 2.0, "token_rewards": [i / 10 for i in ids], "turn_rewards": (0.5, -0.5)}
tokens.reads_tokens = True
tokens.pure = True

def blind(sample):
    return Score(1.0, token_rewards=[1.0, 2.0])
"""
Start = Callable[..., Awaitable[tuple[AsyncRewardClient, RewardServicer, Backend]]]


class Fixed:
    """A backend that is no function, with an outcome for each completion."""

    def __init__(self, **outcomes: Outcome) -> None:
        self.outcomes, self.jobs = outcomes, list[Job]()
        self.reads, self.pure, self.scorer = Reads(messages=True), True, "fixed@7"
        self.busy = self.waiting_samples = 0

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def score(self, jobs: Sequence[Job], *, timeout: float) -> list[Outcome]:
        self.jobs += jobs
        return [self.outcomes[job.completion] for job in jobs]


def item(sample_id: str, completion: str = "a", *, verifier: str = "", tokens: int = 0) -> pb.ScoreItem:
    made = pb.ScoreItem(experience=Experience(sample_id=sample_id), completion_text=completion, verifier=verifier)
    if tokens:  # two of the prompt, then two turns with a token between them
        made.experience.token_ids = pack_ints(range(2 + tokens + 1))
        made.experience.action_mask = bytes([0, 0, 1, 0, *[1] * (tokens - 1)])
    return made


async def serve_backend(serve: Serve, backend: Backend, servicer: RewardServicer) -> AsyncRewardClient:
    service = pb.DESCRIPTOR.services_by_name["RewardService"]
    channel = await serve((service, add_RewardServiceServicer_to_server, servicer))
    await backend.start()
    servicer.set_ready()
    return AsyncRewardClient(channel, peer="reward-0")


@pytest.fixture
async def start(serve: Serve, tmp_path: Path) -> AsyncIterator[Start]:
    """Return a function that serves a table of a recipe."""
    backends: list[Backend] = []

    async def made(**reward: Any) -> tuple[AsyncRewardClient, RewardServicer, Backend]:
        options = options_of(make_config(tmp_path, reward=reward), tmp_path)
        table = options.config.scorer("")
        backend = make_backend(options, table, on_failure=lambda message: pytest.fail(message))
        backends.append(backend)
        servicer = RewardServicer(backend, name=table.name)
        return await serve_backend(serve, backend, servicer), servicer, backend

    yield made
    for backend in backends:
        await backend.close()


def options_of(config: Config, folder: Path, scorer: str = "") -> ServeOptions:
    return ServeOptions(
        role="reward", recipe=Path(), config=config, member_id="reward-0", run_dir=folder / "run", scorer=scorer
    )


async def test_a_backend_that_is_no_function_has_no_other_verifiers(serve: Serve) -> None:
    backend = Fixed(a=Outcome(score=1.0, cost_usd=0.25), b=Outcome.error("BAD_VERDICT", "none"))
    client = await serve_backend(serve, backend, RewardServicer(backend, name="judge"))
    info = await client.get_info(timeout=5)
    assert (info.name, info.pure, info.reads_messages, info.tokenizer_sha256) == ("fixed@7", True, True, b"")
    assert info.contract_version == CONTRACT_VERSION
    items = [item("s0"), item("s1", verifier="judge"), item("s2", verifier="exact_match"), item("s3", "b")]
    scores = await client.score(items, timeout=5)
    assert [score.WhichOneof("outcome") for score in scores] == ["score", "score", "error", "error"]
    assert scores[0].cost_usd == 0.25
    assert scores[2].error.reason == "NOT_FOUND" and "the scorer here is 'judge'" in scores[2].error.message


async def test_errors_and_abstentions_have_their_price(serve: Serve) -> None:
    outcomes = {"a": Outcome(abstain_reason="NO_ANSWER", cost_usd=0.5), "b": Outcome(score=0.0)}
    backend = Fixed(**outcomes)
    client = await serve_backend(serve, backend, RewardServicer(backend))
    scores = await client.score([item("s0"), item("s1", "b")], timeout=5)
    assert [score.cost_usd for score in scores] == [0.5, 0.0]
    assert scores[0].abstain_reason == "NO_ANSWER"


async def test_token_rewards_are_spread_over_the_sampled_tokens(start: Start, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    client, _, backend = await start(function=f"{tmp_path}/mine.py:tokens")
    assert backend.reads.tokens and (await client.get_info(timeout=5)).pure
    names = ("good", "short", "nan", "text")
    scores = await client.score([item(name, name, tokens=3) for name in names], timeout=20)
    assert np.frombuffer(scores[0].token_rewards, "<f4").tolist() == pytest.approx([0, 0, 0.2, 0, 0.4, 0.5])
    assert list(scores[0].turn_rewards) == [0.5, -0.5]
    assert [score.error.reason for score in scores[1:]] == ["BAD_TOKEN_REWARDS", "NOT_FINITE", "RAISED"]
    assert not any(score.token_rewards for score in scores[1:])


@pytest.mark.parametrize(
    ("mask", "ids", "sampled"),
    [(b"\1\1", bytes(6), []), (b"\1", bytes(8), []), (b"", bytes(4), []), (b"\0\2\xff", pack_ints(range(3)), [1, 2])],
)
def test_arrays_that_do_not_fit_are_no_tokens(mask: bytes, ids: bytes, sampled: list[int]) -> None:
    assert sampled_ids(Experience(action_mask=mask, token_ids=ids)) == sampled


async def test_token_rewards_need_the_tokens(start: Start, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    client, _, _ = await start(function=f"{tmp_path}/mine.py:blind")
    assert not (await client.get_info(timeout=5)).pure
    (score,) = await client.score([item("s0")], timeout=20)
    assert score.error.reason == "BAD_TOKEN_REWARDS" and "reads_tokens = True" in score.error.message


@pytest.mark.parametrize(
    ("reward", "pure"),
    [
        ({"function": "exact_match"}, True),
        ({"function": "reasoning_gym:products"}, False),
        ({"function": "format", "options": {"pattern": "a"}}, True),
    ],
)
async def test_a_function_that_is_known_to_be_pure_is_pure(start: Start, reward: Any, pure: bool) -> None:
    client, _, _ = await start(**reward)
    assert (await client.get_info(timeout=5)).pure == pure


async def test_each_kind_is_served_and_measured(start: Start) -> None:
    async def openrlhf(body: dict[str, Any]) -> Any:
        return {"rewards": [0.5] * len(body["query"])}

    async def judge(body: dict[str, Any]) -> Any:
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        return {"choices": [{"message": {"content": "Score: 5"}}], "usage": usage}

    async with json_server("/get_reward") as reward, json_server("/v1/chat/completions") as endpoint:
        reward.respond, endpoint.respond = openrlhf, judge
        tables: list[dict[str, Any]] = [
            {"command": [sys.executable, str(EXAMPLES / "command_scorer.py")]},
            {"http": f"{reward.url}/get_reward"},
            {"judge": {"url": f"{endpoint.url}/v1", "model": "m", "input_usd_per_million": 1e4}},
        ]
        numbers: list[dict[str, Any]] = []
        for table in tables:
            client, servicer, backend = await start(**table)
            made = item("s0", "the end")
            made.answer = "the beginning"
            (score,) = await client.score([made], timeout=20)
            assert score.score == 0.5
            assert "@" in (await client.get_info(timeout=5)).name
            numbers.append({family.name: values for family, values in reward_source(backend, servicer)()})
            await backend.close()
    for found in numbers:
        assert found["fourfold_reward_samples_total"]["SCORED"] == 1
        assert sum(found["fourfold_reward_sample_seconds"].counts) == 1
    assert [sum(found["fourfold_reward_workers"].values()) for found in numbers] == [1, 0, 0]
    assert [found["fourfold_reward_judge_cost_usd_total"] for found in numbers] == [0.0, 0.0, 1.0]
    assert numbers[2]["fourfold_reward_judge_tokens_total"] == {"prompt": 100, "completion": 10}


async def test_a_table_that_cannot_be_served_is_named(tmp_path: Path) -> None:
    config = make_config(tmp_path, reward={"name": "remote", "target": ["127.0.0.1:1"]})
    with pytest.raises(ConfigError, match=r"'remote' has target = \['127.0.0.1:1'\].*start none here"):
        await serve_module.serve(options_of(config, tmp_path))
    with pytest.raises(ConfigError, match=r"--scorer 'judge' is not the name of a table .* the recipe has 'remote'"):
        await serve_module.serve(options_of(config, tmp_path, scorer="judge"))


def test_the_key_of_a_judge_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    judge = {"url": "http://127.0.0.1:1/v1", "model": "m", "api_key_env": "NO_SUCH_KEY"}
    options = options_of(make_config(tmp_path, reward={"judge": judge}), tmp_path)
    with pytest.raises(ConfigError, match="api_key_env = 'NO_SUCH_KEY'"):
        make_backend(options, options.config.scorer(""), on_failure=print)
