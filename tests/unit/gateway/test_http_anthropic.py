"""The HTTP form of the gateway with the real `anthropic` client, over a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest

from fourfold.config.agents import GatewayConfig
from fourfold.errors import Overloaded, Unavailable
from fourfold_gateway.http.server import serve_http
from tests.fakes.agent_api import LENGTH, SESSION_KEY, STOP, TOOL_CALLS, FakeAgentApi

USER: Any = [{"role": "user", "content": "2+2?"}]
ADD: Any = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}


@asynccontextmanager
async def connected(api: FakeAgentApi, path: str = "", key: str = "none") -> AsyncIterator[anthropic.AsyncAnthropic]:
    server = await serve_http(api, GatewayConfig(), None)
    try:
        url = server.url + path
        async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0, timeout=20) as client:
            yield client
    finally:
        await server.stop(1.0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_has_text_usage_and_a_stop_reason(stream: bool) -> None:
    api = FakeAgentApi(finish=LENGTH)
    async with connected(api, key=SESSION_KEY) as client:
        options: Any = {
            "model": "m", "max_tokens": 9, "messages": USER, "system": [{"type": "text", "text": "Be brief."}],
            "stop_sequences": ["\n"], "extra_body": {"return_token_ids": True, "top_k": 4, "seed": 3},
        }  # fmt: skip
        if stream:
            async with client.messages.stream(**options) as events:
                assert "".join([text async for text in events.text_stream]) == "Hello w\u00f6rld"
                message = await events.get_final_message()
        else:
            message = await client.messages.create(**options)
            assert message.to_dict()["fourfold"]["token_ids"] == [10, 11]
    assert [block.to_dict()["text"] for block in message.content] == ["Hello w\u00f6rld"]
    assert message.stop_reason == "max_tokens"
    assert (message.usage.input_tokens, message.usage.output_tokens) == (5, 2)
    request = api.requests[0]
    assert [(m.role, m.content) for m in request.chat.messages] == [("system", "Be brief."), ("user", "2+2?")]
    params = request.sampling_params
    assert (params.max_tokens, list(params.stop), params.top_k, params.seed) == (9, ["\n"], 4, 3)
    assert request.session_id == "s1"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("arguments", ['{"a": 1}', "no json", '{"a": NaN}'])
async def test_tool_use_and_thinking_come_back_as_they_were(stream: bool, arguments: str) -> None:
    api = FakeAgentApi(finish=TOOL_CALLS, tool_calls=(("add", arguments),), reasoning="hm", separates_reasoning=True)
    async with connected(api, "/sessions/s1") as client:
        options: Any = {"model": "m", "max_tokens": 9, "tools": [ADD], "tool_choice": {"type": "any"}}
        if stream:
            async with client.messages.stream(messages=USER, **options) as events:
                message = await events.get_final_message()
        else:
            message = await client.messages.create(messages=USER, **options)
        assert [block.type for block in message.content] == ["thinking", "tool_use"]
        assert message.stop_reason == "tool_use"
        blocks = [{k: v for k, v in block.to_dict().items() if k != "caller"} for block in message.content]
        result = [{"type": "tool_result", "tool_use_id": "c0", "content": "4"}, {"type": "text", "text": "go on"}]
        history = [*USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": result}]
        await client.messages.create(messages=history, **options)
    assert api.requests[0].sampling_params.grammar.tool_calls.required
    messages = api.requests[1].chat.messages
    assert [m.role for m in messages] == ["user", "assistant", "tool", "user"]
    assert (messages[1].reasoning, messages[1].tool_calls[0].arguments_json) == ("hm", arguments)
    assert (messages[2].tool_call_id, messages[2].content, messages[3].content) == ("c0", "4", "go on")


async def test_tokens_are_counted() -> None:
    async with connected(FakeAgentApi()) as client:
        count = await client.messages.count_tokens(model="m", messages=USER, system="x", tools=[ADD])
    assert count.input_tokens == 2


async def test_errors_have_anthropics_form() -> None:
    api = FakeAgentApi(error=Overloaded("too many", retry_after=4))
    async with connected(api) as client:
        create: Any = client.messages.create
        with pytest.raises(anthropic.RateLimitError) as busy:
            await create(model="m", max_tokens=1, messages=USER)
        assert busy.value.response.headers["retry-after"] == "4"
        assert busy.value.body == {"type": "error", "error": {"type": "rate_limit_error", "message": "too many"}}
        with pytest.raises(anthropic.BadRequestError, match="server"):
            await create(model="m", max_tokens=1, messages=USER, tools=[{"type": "bash_20250124", "name": "bash"}])
        with pytest.raises(anthropic.BadRequestError, match="max_tokens is missing"):
            await client.post("/v1/messages", cast_to=object, body={"messages": USER})
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="wrong").messages.create(model="m", max_tokens=1, messages=USER)
        api.error, api.error_after = Unavailable("the engine died"), 1
        with pytest.raises(anthropic.APIStatusError, match="the engine died"):
            async with client.messages.stream(model="m", max_tokens=1, messages=USER) as events:
                await events.get_final_message()


async def test_the_sdks_tool_runner_runs_a_loop() -> None:
    """Newer SDKs first ask for a conversation on the server (`thread`), and go on without it after this refusal."""
    api = FakeAgentApi(finish=TOOL_CALLS, tool_calls=(("add", '{"a":1,"b":2}'),))
    results = []

    async def add(a: int, b: int) -> str:
        results.append(a + b)
        api.tool_calls, api.finish = (), STOP
        return str(a + b)

    async with connected(api) as client:
        tools = [anthropic.beta_async_tool(add)]
        runner: Any = client.beta.messages.tool_runner(model="m", max_tokens=9, messages=USER, tools=tools)
        message = await runner.until_done()
        with pytest.raises(anthropic.BadRequestError, match="send all messages") as refused:
            create: Any = client.messages.create
            await create(model="m", max_tokens=9, messages=USER, extra_body={"thread": {"type": "create"}})
    assert (message.content[0].text, results) == ("Hello w\u00f6rld", [3])
    assert [each.role for each in api.requests[1].chat.messages] == ["user", "assistant", "tool"]
    body: Any = refused.value.body
    assert body["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


async def test_without_parallel_use_a_message_has_one_call() -> None:
    api = FakeAgentApi(finish=TOOL_CALLS, tool_calls=(("add", '{"a":1}'), ("add", '{"a":2}')))
    async with connected(api) as client:
        for disabled, inputs in ((True, [{"a": 1}]), (False, [{"a": 1}, {"a": 2}])):
            choice: Any = {"type": "auto", "disable_parallel_tool_use": disabled}
            message: Any = await client.messages.create(
                model="m", max_tokens=9, messages=USER, tools=[ADD], tool_choice=choice
            )
            assert [block.input for block in message.content] == inputs
