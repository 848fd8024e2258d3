"""Tests the interactive callers: gaps within a request, first tokens, and tokens that are lost or repeated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from fourfold.errors import Unavailable
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold_bench.streams import Streams, streaming_request


class Client:
    """Streams the tokens of a request one by one; `wrong` is what the first request gets too many."""

    def __init__(self, wrong: int = 0) -> None:
        self.sampled, self.requests = 1000, 0
        self.wrong = wrong
        self.error: Unavailable | None = None

    async def watch_load(self, *, timeout: float) -> AsyncGenerator[rollout.WatchLoadResponse, None]:
        yield rollout.WatchLoadResponse(sampled_token_count=self.sampled)

    async def generate(
        self, request: rollout.GenerateRequest, *, timeout: float
    ) -> AsyncGenerator[rollout.SampleChunk, None]:
        self.requests += 1
        limit = request.sampling_params.max_tokens
        given = limit + (self.wrong if self.requests == 1 else 0)
        self.sampled += limit
        for number in range(given):
            await asyncio.sleep(0)
            if self.error is not None:
                raise self.error
            last = number == given - 1
            finish = rollout.FINISH_REASON_LENGTH if last else rollout.FINISH_REASON_UNSPECIFIED
            yield rollout.SampleChunk(token_ids=bytes(4), logprobs=bytes(4), finish_reason=finish)


def request(index: int, count: int) -> rollout.GenerateRequest:
    params = rollout.SamplingParams(max_tokens=7 if count else 7 - 6 * index)
    return streaming_request(f"stream-{index}-{count}", [1, 2], params, flush_seconds=0.001)


def streams(client: Any, callers: int = 2) -> Streams:
    return Streams(client, request, callers=callers, timeout=60)


@pytest.mark.parametrize(("wrong", "lost"), [(0, 0), (-2, 4), (3, 6)])
async def test_every_token_is_accounted_for(wrong: int, lost: int) -> None:
    client = Client(wrong)
    running = streams(client)
    await running.start()
    await running.wait_for(20, timeout=5)
    running.end()
    tokens = await running.account(timeout=5)
    assert tokens["lost"] == lost, "by its request, and by the service's count"
    assert tokens["received"] == tokens["sampled"] + wrong == sum(len(times) for times in running.times)
    assert len(running.first_token) == client.requests > 4
    assert len(running.longest_gaps(0, 1e18)) == 2 and max(running.longest_gaps(0, 1e18)) > 0
    assert running.longest_gaps(1e17, 1e18) == [0, 0]
    await running.stop()


async def test_the_wait_between_two_requests_is_no_gap_between_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(10_000))
    monkeypatch.setattr("fourfold_bench.streams.time.perf_counter", lambda: float(next(now)))
    running = streams(Client(), callers=1)
    await running.start()
    await running.wait_for(20, timeout=5)
    running.end()
    await running.account(timeout=5)
    assert running.longest_gaps(0, 1e9) == [1.0], "a request begins a tick before its first token, and after the last"


async def test_the_error_of_a_stream_is_raised() -> None:
    client = Client()
    running = streams(client)
    await running.start()
    await running.wait_for(2, timeout=5)
    client.error = Unavailable("the engine died")
    with pytest.raises(Unavailable, match="died"):
        await running.wait_for(100_000, timeout=5)
    await running.stop()
