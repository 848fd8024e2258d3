"""The HTTP port of a gateway with the real sessions and generator behind it, on a toy engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.bounds import MAX_SAMPLES_PER_CALL
from fourfold.config.agents import GatewayConfig
from fourfold.errors import InvalidInput
from fourfold_gateway.http.server import serve_http
from tests.contract.test_gateway import Gateway, running_gateway

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "3 * 4 ="}]}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(tmp_path) as gateway:
        yield gateway


async def test_a_prompt_that_cannot_fit_the_context_is_refused_by_its_size(gateway: Gateway) -> None:
    large = "\u00e9" * (1 << 16)
    chat = pb.Chat(messages=[pb.Message(role="user", content=large)])
    for name, request in (
        ("Tokenize", pb.TokenizeRequest(text=large)),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[1] * (1 << 17))),
        ("ApplyChatTemplate", pb.ApplyChatTemplateRequest(chat=chat)),
    ):
        with pytest.raises(
            InvalidInput, match=r"131\d+ (bytes|token ids).* at most 65536 are (encoded for a context of 64|decoded)"
        ):
            await gateway.call(name, request)
    short = pb.Chat(messages=[pb.Message(role="user", content="2+2?")] * 65)
    ids = pb.TokenIds(ids=[1] * 64)
    for asked in (pb.GenerateRequest(text=large), pb.GenerateRequest(chat=short), pb.GenerateRequest(token_ids=ids)):
        with pytest.raises(InvalidInput) as caught:
            await gateway.generate(asked)
        assert caught.value.reason == "CONTEXT_LENGTH"


@asynccontextmanager
async def connected(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    server = await serve_http(gateway.core, GatewayConfig(), None)
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            yield client
    finally:
        await server.stop(1.0)


async def test_a_refused_close_tells_what_is_missing(gateway: Gateway) -> None:
    await gateway.open()
    async with connected(gateway) as client:
        for outcome, text in (
            ({}, 'close with one of {"reward": 1.0}, {"score": true}'),
            ({"score": False}, 'and {"abandon_reason": "GAVE_UP"}'),
            ({"reward": 1.0}, "no finished turn, so that there is nothing to train on; sample a turn in it"),
            ({"score": True}, "the run has no reward service for agents; close with a reward"),
            ({"abandon_reason": "gave up"}, "give UPPER_SNAKE_CASE"),
        ):
            answer = await client.post("/v1/sessions/s/close", json=outcome)
            assert answer.status_code == 400 and text in answer.json()["error"]["message"]


@pytest.mark.parametrize("seed", [-1, 0, (1 << 53) - 1, -(1 << 63), (1 << 63) - 1])
async def test_every_seed_that_openai_allows_gives_valid_seeds_to_all_samples(gateway: Gateway, seed: int) -> None:
    async with connected(gateway) as client:
        response = await client.post("/v1/chat/completions", json=CHAT | {"seed": seed, "n": 2})
    assert (response.status_code, len(response.json()["choices"])) == (200, 2)
    assert 0 <= gateway.engine.requests[0].sampling_params.seed <= (1 << 53) - MAX_SAMPLES_PER_CALL
