"""The backend `judge` with OpenAI-compatible endpoints, correct and hostile ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.utils import formatdate
from typing import Any

import pytest
from aiohttp import web

from fourfold.config.reward import JudgeConfig
from fourfold.errors import ConfigError
from fourfold_reward.job import Job
from fourfold_reward.protocol import Outcome
from fourfold_reward.scorers import judge as judge_module
from fourfold_reward.scorers.judge import Judge
from tests.support.http_peers import HOSTILE, JsonServer, dumps, json_server, raw_server
from tests.support.reward_jobs import make_job

KEY = "sk-the-secret-key-0123456789"


def job(number: int, completion: str = "4", answer: str = "4") -> Job:
    return make_job(completion, sample_id=f"s{number}", prompt="2 + 2?", answer=answer)


def reply(content: Any, **usage: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content}
    return {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}


@asynccontextmanager
async def backend(url: str, *, timeout: float = 5.0, **keys: Any) -> AsyncIterator[Judge]:
    config = JudgeConfig(url=url, model="judge-7b", **keys)
    made = Judge(config, timeout_seconds=timeout, on_failure=lambda message: pytest.fail(message))
    await made.start()
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
async def server() -> AsyncIterator[JsonServer]:
    async with json_server("/v1/chat/completions") as made:
        made.url += "/v1"
        yield made


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_module, "_FIRST_WAIT_SECONDS", 0.01)


def answer_in_turn(server: JsonServer, *replies: Any) -> None:
    """Give each request the next reply, and the last one to all others."""
    left = list(replies)

    async def respond(body: dict[str, Any]) -> Any:
        return left.pop(0) if len(left) > 1 else left[0]

    server.respond = respond


async def test_a_verdict_becomes_score_components_and_cost(server: JsonServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    answer_in_turn(server, reply("Good.\nScore: 8", prompt_tokens=1000, completion_tokens=200))
    keys: dict[str, Any] = {
        "api_key_env": "JUDGE_KEY",
        "input_usd_per_million": 2.0,
        "output_usd_per_million": 10.0,
        "system": "Fair.",
    }
    async with backend(server.url + "/", temperature=0.5, max_tokens=64, **keys) as scorer:
        (outcome,) = await scorer.score([job(0)], timeout=5)
        assert scorer.cost_usd == pytest.approx(0.004) and scorer.tokens == {"prompt": 1000, "completion": 200}
        assert scorer.reads.messages and not scorer.pure
    assert outcome.score == pytest.approx(0.8) and outcome.cost_usd == pytest.approx(0.004)
    assert outcome.components == {"grade": 8, "prompt_tokens": 1000, "completion_tokens": 200}
    (request,), (headers,) = server.requests, server.headers
    assert headers["Authorization"] == f"Bearer {KEY}"
    assert {name: request[name] for name in ("model", "temperature", "max_tokens")} == {
        "model": "judge-7b",
        "temperature": 0.5,
        "max_tokens": 64,
    }
    assert [message["role"] for message in request["messages"]] == ["system", "user"]


async def test_the_name_has_a_version_of_all_that_decides_the_grades() -> None:
    names = set()
    for keys in ({}, {"system": "Fair."}, {"temperature": 1.0}, {"grade_max": 5.0}, {"pattern": "(.)"}):
        async with backend("http://127.0.0.1:1/v1", **keys) as scorer:
            names.add(scorer.scorer)
    async with backend("http://127.0.0.1:1/v1", concurrency=2, tries=1) as scorer:
        names.add(scorer.scorer)
    assert len(names) == 5 and all(name.startswith("judge-7b@") for name in names)


async def test_a_sample_without_the_answer_that_the_rubric_needs_is_not_sent(server: JsonServer, tmp_path: Any) -> None:
    (tmp_path / "rubric.md").write_text("{completion} {answer} {level}")
    async with backend(server.url, rubric=str(tmp_path / "rubric.md")) as scorer:
        outcomes = await scorer.score([job(0, answer=""), job(1)], timeout=5)
    assert outcomes[0] == Outcome(abstain_reason="NO_ANSWER")
    assert outcomes[1].error_reason == "BAD_METADATA"
    assert server.requests == []


@pytest.mark.parametrize(
    "first",
    [
        web.Response(status=429, headers={"Retry-After": "0"}),
        web.Response(status=500),
        web.Response(status=529),
        web.Response(status=408, headers={"Retry-After": formatdate(0)}),
        web.Response(status=429, headers={"Retry-After": "-1"}),
        reply("no grade"),
        reply("Score: 99"),
        reply(None),
        {"choices": []},
        {"error": {"message": "overloaded"}},
        web.Response(text="<html>"),
    ],
    ids=str,
)
async def test_what_may_work_later_is_tried_again(server: JsonServer, first: Any) -> None:
    if isinstance(first, web.Response):  # each test needs its own
        first = web.Response(status=first.status, headers=first.headers, body=first.body)
    answer_in_turn(server, first, reply("Score: 5"))
    async with backend(server.url) as scorer:
        (outcome,) = await scorer.score([job(0)], timeout=5)
    assert outcome.score == 0.5 and len(server.requests) == 2


async def test_all_tries_are_paid_also_without_a_grade(server: JsonServer) -> None:
    answer_in_turn(server, reply("none", prompt_tokens=10, completion_tokens=1))
    async with backend(server.url, input_usd_per_million=1e6, tries=3) as scorer:
        (outcome,) = await scorer.score([job(0)], timeout=5)
    assert (outcome.error_reason, outcome.cost_usd) == ("BAD_VERDICT", 30.0)
    assert "no match of reward.judge.pattern" in outcome.message and "'none'" in outcome.message
    assert len(server.requests) == 3


async def test_a_verdict_that_was_cut_off_says_so(server: JsonServer) -> None:
    cut = reply("I think that")
    cut["choices"][0]["finish_reason"] = "length"
    answer_in_turn(server, cut)
    async with backend(server.url, tries=1) as scorer:
        (outcome,) = await scorer.score([job(0)], timeout=5)
    assert "raise reward.judge.max_tokens" in outcome.message


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_refusal_is_a_failure_of_the_service_and_keeps_the_key_secret(
    server: JsonServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("JUDGE_KEY", KEY)
    answer_in_turn(server, web.Response(status=status, text=f"Incorrect API key provided: {KEY}"))
    async with backend(server.url, api_key_env="JUDGE_KEY") as scorer:
        (outcome,) = await scorer.score([job(0)], timeout=5)
    assert (outcome.error_reason, outcome.error_code) == ("REFUSED", "UNAVAILABLE")
    assert str(status) in outcome.message and "check the" in outcome.message
    assert len(server.requests) == 1  # the answer will be the same
    assert KEY not in outcome.message + caplog.text


@pytest.mark.parametrize("status", [200, 400, 500])
async def test_a_key_that_the_endpoint_repeats_is_removed(
    server: JsonServer, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    body = reply(f"your key is {KEY}") if status == 200 else web.Response(status=status, text=f"Bearer {KEY}!")
    answer_in_turn(server, body)
    async with backend(server.url, api_key_env="JUDGE_KEY", tries=1) as scorer:
        (outcome,) = await scorer.score([job(0)], timeout=5)
    assert outcome.error_reason and KEY not in outcome.message and "***" in outcome.message


async def test_no_part_of_a_key_is_left_where_a_verdict_is_cut(
    server: JsonServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    answer_in_turn(server, reply(KEY + " " * (200 - len(KEY) // 2)))
    async with backend(server.url, api_key_env="JUDGE_KEY", tries=1) as scorer:
        (outcome,) = await scorer.score([job(0)], timeout=5)
    assert outcome.error_reason == "BAD_VERDICT" and KEY[-5:] not in outcome.message


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_endpoint_is_a_named_error(name: str) -> None:
    async with raw_server(HOSTILE[name]) as url, backend(url + "/v1", tries=2) as scorer:
        (outcome,) = await scorer.score([job(0)], timeout=10)
    assert outcome.error_reason in ("BAD_RESPONSE", "UNREACHABLE") and outcome.message.isprintable()


@pytest.mark.parametrize(
    "usage",
    [None, [], {"prompt_tokens": -5}, {"prompt_tokens": 1e30}, {"prompt_tokens": 10**12}, {"prompt_tokens": True}, {}],
)
async def test_an_implausible_count_of_tokens_is_estimated(server: JsonServer, usage: Any) -> None:
    answer_in_turn(server, dumps({**reply("Score: 5"), "usage": usage}))
    async with backend(server.url, input_usd_per_million=1e6) as scorer:
        (outcome,) = await scorer.score([job(0)], timeout=5)
    prompt = server.requests[0]["messages"][0]["content"]
    assert outcome.components["prompt_tokens"] == -(-len(prompt) // 4) == outcome.cost_usd
    assert outcome.components["completion_tokens"] == 2


async def test_the_time_limit_covers_all_tries_and_a_long_wait_ends_them(server: JsonServer) -> None:
    async def respond(body: dict[str, Any]) -> Any:
        await asyncio.sleep(60)

    server.respond = respond
    async with backend(server.url, timeout=0.2) as scorer:
        (outcome,) = await scorer.score([job(0)], timeout=5)
    assert outcome.error_reason == "TIMEOUT"
    for number, seconds in enumerate(("3600", "9" * 400), 2):  # the second has no float
        answer_in_turn(server, web.Response(status=429, headers={"Retry-After": seconds}))
        async with backend(server.url) as scorer:
            (outcome,) = await scorer.score([job(0)], timeout=5)
        assert outcome.error_reason == "OVERLOADED" and len(server.requests) == number


async def test_the_query_of_an_address_stays_behind_its_path(server: JsonServer) -> None:
    answer_in_turn(server, reply("Score: 5"))
    async with backend(server.url + "/?api-version=1") as scorer:
        (outcome,) = await scorer.score([job(0)], timeout=5)
    assert outcome.score == 0.5


async def test_concurrency_is_a_limit_and_outcomes_keep_their_order(server: JsonServer) -> None:
    async def respond(body: dict[str, Any]) -> Any:
        await asyncio.sleep(0.01)
        return reply(f"Score: {body['messages'][0]['content'].count('@')}")

    server.respond = respond
    async with backend(server.url, concurrency=4) as scorer:
        outcomes = await scorer.score([job(n, "@" * (n % 3)) for n in range(40)], timeout=10)
    assert server.at_once == 4
    assert [outcome.components["grade"] for outcome in outcomes] == [n % 3 for n in range(40)]


@pytest.mark.parametrize("value", [None, "", " ", "two\nlines", "\u00e9"])
def test_a_missing_or_unusable_key_is_named_by_its_variable(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    config = JudgeConfig(url="http://127.0.0.1:1/v1", model="m", api_key_env="JUDGE_KEY")
    with pytest.raises(ConfigError, match="'JUDGE_KEY'") as info:
        Judge(config, timeout_seconds=1, on_failure=print)
    assert "lines" not in str(info.value)
