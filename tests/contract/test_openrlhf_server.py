"""The backend `http`: servers of OpenRLHF, correct ones in each known form, and hostile ones."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from aiohttp import web

from fourfold.errors import ConfigError, Overloaded
from fourfold_reward.job import Job
from fourfold_reward.protocol import ERROR_CODES, Outcome
from fourfold_reward.scorers import openrlhf_server
from fourfold_reward.scorers.openrlhf_server import BATCH, REQUESTS, OpenRlhfServer
from tests.support.http_peers import HOSTILE, JsonServer, dumps, json_server, raw_server
from tests.support.reward_jobs import make_job

# Answers that look like a broken connection.
BROKEN = ("nothing", "a wrong length", "a wrong chunk")
STATUS = {500: "OVERLOADED", 503: "OVERLOADED", 429: "OVERLOADED", 401: "REFUSED", 404: "REFUSED", 422: "BAD_RESPONSE"}


def job(number: int, completion: str = "4", *, size: int = 10) -> Job:
    return make_job(completion, sample_id=f"s{number}", prompt="2 + 2 = ", answer="4", size_bytes=size)


@asynccontextmanager
async def backend(url: str, *, timeout: float = 5.0) -> AsyncIterator[OpenRlhfServer]:
    made = OpenRlhfServer(url, timeout_seconds=timeout, on_failure=lambda message: pytest.fail(message))
    await made.start()
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture
async def server() -> AsyncIterator[JsonServer]:
    async with json_server("/get_reward") as made:
        made.url += "/get_reward"
        yield made


def answer_lengths(server: JsonServer) -> None:
    async def respond(body: dict[str, Any]) -> Any:
        await asyncio.sleep(0.01)
        return {"rewards": [float(len(query)) for query in body["query"]]}

    server.respond = respond


async def test_requests_and_replies_have_the_form_of_openrlhf(server: JsonServer) -> None:
    async def respond(body: dict[str, Any]) -> Any:  # as openrlhf.cli.serve_rm 0.11 answers
        rewards = [0.25] * len(body["query"])
        return {"rewards": rewards, "scores": rewards, "extra_logs": {"dummy_scores": rewards}}

    server.respond = respond
    async with backend(server.url) as scorer:
        (outcome,) = await scorer.score([job(0)], timeout=5)
        assert scorer.scorer == server.url.removeprefix("http://") + "@openrlhf"
    assert server.requests == [{"query": ["2 + 2 = 4"], "prompts": ["2 + 2 = "], "labels": ["4"]}]
    assert outcome == Outcome(score=0.25, components={"scores": 0.25, "dummy_scores": 0.25})
    assert not scorer.pure and not scorer.reads.tokens


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        ({"rewards": [0.5]}, Outcome(score=0.5)),  # before 0.8.4
        ({"rewards": 0.5}, Outcome(score=0.5)),
        ({"rewards": [[0.5]], "scores": [[1]]}, Outcome(score=0.5, components={"scores": 1})),
        ({"rewards": [None]}, Outcome(abstain_reason="NO_SCORE")),
        ({"rewards": [1], "scores": None, "extra_logs": None}, Outcome(score=1)),
        (
            {"rewards": [1], "extra_logs": {"a": 2, "b": [3], "c": "x", "d": [1, 2], "e\n": 1, "f": [math.inf]}},
            Outcome(score=1, components={"a": 2, "b": 3}),
        ),
    ],
)
async def test_each_known_form_of_a_reply_is_read(server: JsonServer, reply: Any, outcome: Outcome) -> None:
    async def respond(body: dict[str, Any]) -> Any:
        return dumps(reply)

    server.respond = respond
    async with backend(server.url) as scorer:
        assert await scorer.score([job(0)], timeout=5) == [outcome]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ({}, "BAD_RESPONSE"),
        ({"rewards": []}, "BAD_RESPONSE"),
        ({"rewards": [1, 2]}, "BAD_RESPONSE"),
        ({"rewards": {"0": 1}}, "BAD_RESPONSE"),
        ({"rewards": "1"}, "BAD_RESPONSE"),
        ({"reward": [1]}, "BAD_RESPONSE"),
        ({"rewards": ["1"]}, "NOT_A_NUMBER"),
        ({"rewards": [True]}, "NOT_A_NUMBER"),
        ({"rewards": [[1, 2]]}, "NOT_A_NUMBER"),
        ({"rewards": [math.nan]}, "NOT_FINITE"),
        ({"rewards": [1e39]}, "NOT_FINITE"),
        ({"rewards": [10**400]}, "NOT_FINITE"),
    ],
)
async def test_a_wrong_reply_is_a_named_error(server: JsonServer, reply: Any, reason: str) -> None:
    async def respond(body: dict[str, Any]) -> Any:
        return dumps(reply)

    server.respond = respond
    async with backend(server.url) as scorer:
        (outcome,) = await scorer.score([job(0)], timeout=5)
    assert outcome.error_reason == reason and outcome.score is None and outcome.message


def test_a_reply_just_below_the_depth_of_the_parser_is_no_number() -> None:
    found = []
    for depth in range(700, 1000):
        with suppress(RecursionError):
            found.append(json.loads('{"rewards": [' + "[" * depth + "1, 2" + "]" * depth + "]}"))
    assert 0 < len(found) < 300
    for reply in found:
        (outcome,) = openrlhf_server._outcomes(reply, 1)
        assert outcome.error_reason == "NOT_A_NUMBER" and len(outcome.message) < 300


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_server_is_a_named_error(name: str) -> None:
    async with raw_server(HOSTILE[name]) as url, backend(url + "/get_reward") as scorer:
        outcomes = await scorer.score([job(0), job(1)], timeout=10)
    expected = {"BAD_RESPONSE", "UNREACHABLE"} if name in BROKEN else {"BAD_RESPONSE"}
    assert {outcome.error_reason for outcome in outcomes} <= expected, outcomes
    assert name != "a huge body" or all("more than 1048576 bytes" in outcome.message for outcome in outcomes)
    assert all(0 < len(outcome.message) <= 1000 and outcome.message.isprintable() for outcome in outcomes)


async def test_a_slow_drip_of_bytes_does_not_extend_the_time() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n" + b'{"rewards": [1]}'
    async with raw_server(answer, drip_seconds=0.05) as url, backend(url, timeout=0.3) as scorer:
        (outcome,) = await scorer.score([job(0)], timeout=5)
    assert outcome.error_reason == "TIMEOUT" and "raise reward.timeout_seconds" in outcome.message


@pytest.mark.parametrize(("status", "reason"), STATUS.items())
async def test_a_status_is_a_named_error(server: JsonServer, status: int, reason: str) -> None:
    async def respond(body: dict[str, Any]) -> Any:
        return web.Response(status=status, text="no \x1b[31m" + "x" * 5000)

    server.respond = respond
    async with backend(server.url) as scorer:
        (outcome,) = await scorer.score([job(0)], timeout=5)
    assert outcome.error_reason == reason and str(status) in outcome.message
    assert outcome.error_code == ERROR_CODES[reason]
    assert outcome.message.isprintable()


async def test_a_server_that_is_gone_is_unreachable_and_may_come_later(unused_port: int) -> None:
    url = f"http://127.0.0.1:{unused_port}/get_reward?key=secret"
    async with backend(url) as scorer:
        (outcome,) = await scorer.score([job(0)], timeout=5)
    assert (outcome.error_reason, outcome.error_code) == ("UNREACHABLE", "UNAVAILABLE")
    assert "secret" not in outcome.message + scorer.scorer


async def test_samples_share_requests_and_keep_their_order(server: JsonServer) -> None:
    answer_lengths(server)
    jobs = [job(number, "x" * number) for number in range(700)]
    async with backend(server.url) as scorer:
        outcomes = await scorer.score(jobs, timeout=20)
        assert [outcome.score for outcome in outcomes] == [len(j.prompt) + n for n, j in enumerate(jobs)]
        assert (scorer.busy, scorer.waiting_samples) == (0, 0)
    sizes = [len(request["query"]) for request in server.requests]
    assert max(sizes) == BATCH and len(sizes) < 60
    assert 1 < server.at_once <= REQUESTS


async def test_large_samples_have_requests_of_their_own(server: JsonServer) -> None:
    answer_lengths(server)
    async with backend(server.url) as scorer:
        await scorer.score([job(number, size=3 << 20) for number in range(20)], timeout=20)
    assert max(len(request["query"]) for request in server.requests) <= 2


@pytest.mark.parametrize("how", ["fails", "hangs", "wrong count"])
async def test_a_sample_that_the_server_cannot_score_fails_alone(server: JsonServer, how: str) -> None:
    async def respond(body: dict[str, Any]) -> Any:
        if any("poison" in query for query in body["query"]):
            if how == "hangs":
                await asyncio.sleep(60)
            return web.Response(status=500) if how == "fails" else {"rewards": []}
        return {"rewards": [1.0] * len(body["query"])}

    server.respond = respond
    jobs = [job(number, "poison" if number == 40 else "4") for number in range(100)]
    async with backend(server.url, timeout=0.5) as scorer:
        outcomes = await scorer.score(jobs, timeout=20)
    failed = {number: outcome.error_reason for number, outcome in enumerate(outcomes) if outcome.error_reason}
    assert failed == {40: {"fails": "OVERLOADED", "hangs": "TIMEOUT", "wrong count": "BAD_RESPONSE"}[how]}


async def test_a_sample_that_hangs_does_not_keep_the_scores_of_its_request(
    server: JsonServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openrlhf_server, "_SINGLE_SECONDS", 0.5)

    async def respond(body: dict[str, Any]) -> Any:
        await asyncio.sleep(60 * any("poison" in query for query in body["query"]))
        return {"rewards": [1.0] * len(body["query"])}

    server.respond = respond
    jobs = [job(number, "4" if number else "poison") for number in range(20)]
    async with backend(server.url, timeout=1.5) as scorer:
        outcomes = await scorer.score(jobs, timeout=2.7)  # less than two times the limit of a sample
    assert [outcome.error_reason for outcome in outcomes] == ["TIMEOUT"] + [""] * 19
    assert outcomes[0].error_code == "DEADLINE_EXCEEDED"


async def test_the_deadline_of_a_call_ends_it_and_a_full_queue_refuses(
    server: JsonServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def respond(body: dict[str, Any]) -> Any:
        await asyncio.sleep(60)

    server.respond = respond
    async with backend(server.url, timeout=60) as scorer:
        monkeypatch.setattr(scorer, "_max_waiting", 400)
        outcomes = await scorer.score([job(number) for number in range(300)], timeout=0.3)
        assert {(o.error_reason, o.error_code) for o in outcomes} == {("TIMEOUT", "UNAVAILABLE")}
        assert scorer.waiting_samples == 0
        assert scorer.busy == BATCH * REQUESTS
        waiting = asyncio.create_task(scorer.score([job(number) for number in range(300)], timeout=60))
        await asyncio.sleep(0.05)
        with pytest.raises(Overloaded, match="300 samples wait and 200 more do not fit"):
            await scorer.score([job(number) for number in range(200)], timeout=5)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert scorer.waiting_samples == 0


async def test_a_proxy_of_the_environment_is_not_used_on_this_machine(
    server: JsonServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    answer_lengths(server)
    for url in (server.url, server.url.replace("127.0.0.1", "localhost")):
        async with backend(url) as scorer:
            assert (await scorer.score([job(0)], timeout=5))[0].score == 9.0
    async with backend("http://scorer.example.com/get_reward") as scorer:
        (outcome,) = await scorer.score([job(0)], timeout=5)
    assert outcome.error_reason == "UNREACHABLE"  # of the proxy


async def test_a_proxy_that_wants_another_password_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 407 Wanted\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as proxy:
        monkeypatch.setenv("https_proxy", f"me:secret@127.0.0.1:{proxy.sockets[0].getsockname()[1]}")
        async with backend("https://scorer.example.com/get_reward") as scorer:
            (outcome,) = await scorer.score([job(0)], timeout=5)
    assert outcome.error_reason == "REFUSED"
    assert "status 407; check user and password of the proxy" in outcome.message and "secret" not in outcome.message


@pytest.mark.parametrize("url", ["http://", "http://:5000/x", "http://host:port/x", "http://[::1/x"])
def test_a_malformed_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"reward\.http"):
        OpenRlhfServer(url, timeout_seconds=1, on_failure=print)
