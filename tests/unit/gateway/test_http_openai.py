"""The HTTP form of the gateway with the real `openai` client, over a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import openai
import pytest

from fourfold.config.agents import GatewayConfig
from fourfold.errors import Overloaded, Unavailable, WrongState
from fourfold.tracing import spans
from fourfold.tracing.propagation import format_traceparent
from fourfold.tracing.spans import Span, SpanContext
from fourfold_gateway.http.server import HttpServer, serve_http
from tests.fakes.agent_api import LENGTH, SESSION_KEY, TOOL_CALLS, FakeAgentApi

USER: Any = [{"role": "user", "content": "2+2?"}]
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@asynccontextmanager
async def served(api: FakeAgentApi) -> AsyncIterator[HttpServer]:
    server = await serve_http(api, GatewayConfig(), None)
    try:
        yield server
    finally:
        await server.stop(1.0)


@asynccontextmanager
async def connected(api: FakeAgentApi, path: str = "/v1", key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    async with served(api) as server:
        url = server.url + path
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=20) as client:
            yield client


async def test_a_chat_has_text_usage_and_a_finish_reason() -> None:
    api = FakeAgentApi(finish=LENGTH)
    async with connected(api) as client:
        done = await client.chat.completions.create(
            model="any", messages=USER, n=2, stop=["\n"], seed=-1, max_tokens=9, temperature=0.5, top_p=0.9, user="me"
        )
    assert [choice.message.content for choice in done.choices] == ["Hello w\u00f6rld"] * 2
    assert {choice.finish_reason for choice in done.choices} == {"length"}
    assert done.model == "toy"
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (5, 4)
    params = api.requests[0].sampling_params
    assert (params.max_tokens, list(params.stop), params.seed) == (9, ["\n"], (1 << 53) - 1)
    assert params.temperature == pytest.approx(0.5)
    assert params.top_p == pytest.approx(0.9)
    assert api.requests[0].chat.messages[0].content == "2+2?"
    assert api.callers[0].session_id == ""


async def test_a_chat_is_in_the_trace_of_its_client() -> None:
    ended: list[Span] = []
    spans.install(ended.append)
    parent = SpanContext(f"{0xABC:032x}", f"{0xDEF:016x}")
    headers = {"traceparent": format_traceparent(parent)}
    try:
        async with connected(FakeAgentApi()) as client:
            await client.chat.completions.create(model="any", messages=USER, extra_headers=headers)
            await client.chat.completions.create(model="any", messages=USER)
    finally:
        spans.install(None)
    assert [(span.name, span.parent, span.kind) for span in ended] == [("POST Generate", parent, "server")]


async def test_a_streamed_chat_has_the_same_content() -> None:
    api = FakeAgentApi(text=("a", '"\\\n', "\u00fc"))
    async with connected(api) as client:
        stream = await client.chat.completions.create(
            model="any", messages=USER, stream=True, n=2, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    texts = ["", ""]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.delta.content or ""
    assert texts == ['a"\\\n\u00fc'] * 2
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == [
        "stop"
    ] * 2
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 11
    assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]) == 6
    assert api.requests[0].flush_interval.nanos > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_and_their_results_have_openais_form(stream: bool) -> None:
    api = FakeAgentApi(finish=TOOL_CALLS, tool_calls=(("add", '{"a": 1}'),), text=("<tool_call>", "x"))
    history = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "c0", "content": [{"type": "text", "text": "4"}]},
    ]  # fmt: skip
    async with connected(api) as client:
        create: Any = client.chat.completions.create
        options = {"model": "any", "messages": history, "tools": [ADD], "tool_choice": "required"}
        if stream:
            deltas = [c.choices[0] async for c in await create(**options, stream=True) if c.choices]
            assert "".join(choice.delta.content or "" for choice in deltas) == ""
            calls = [call for choice in deltas for call in choice.delta.tool_calls or ()]
            finish = deltas[-1].finish_reason
        else:
            choice = (await create(**options)).choices[0]
            calls, finish = choice.message.tool_calls, choice.finish_reason
            assert choice.message.content is None
    assert [(call.id, call.function.name, call.function.arguments) for call in calls] == [("c0", "add", '{"a": 1}')]
    assert finish == "tool_calls"
    request = api.requests[0]
    assert request.chat.messages[1].tool_calls[0].arguments_json == '{"a": 1}'
    assert (request.chat.messages[2].tool_call_id, request.chat.messages[2].content) == ("c0", "4")
    assert json.loads(request.chat.tools[0].parameters_json) == {"type": "object", "properties": {}}
    assert request.sampling_params.grammar.tool_calls.required


async def test_tool_choice_none_hides_the_tools_and_a_function_is_named() -> None:
    api = FakeAgentApi()
    async with connected(api) as client:
        create: Any = client.chat.completions.create
        await create(model="m", messages=USER, tools=[ADD], tool_choice="none")
        named = {"type": "function", "function": {"name": "add"}}
        await create(model="m", messages=USER, tools=[ADD], tool_choice=named)
        with pytest.raises(openai.BadRequestError, match="names a function"):
            named["function"] = {"name": "other"}
            await create(model="m", messages=USER, tools=[ADD], tool_choice=named)
    assert not api.requests[0].chat.tools
    assert not api.requests[0].sampling_params.HasField("grammar")
    assert api.requests[1].sampling_params.grammar.tool_calls.name == "add"


@pytest.mark.parametrize("stream", [False, True])
async def test_without_parallel_calls_a_message_has_one(stream: bool) -> None:
    """LangChain asks for it when a model answers in the form of a call."""
    api = FakeAgentApi(finish=TOOL_CALLS, tool_calls=(("add", '{"a":1}'), ("add", '{"a":2}')))
    chat: Any = {"model": "m", "messages": USER, "tools": [ADD]}
    items: Any = {"model": "m", "input": "x", "tools": [{"type": "function", **ADD["function"]}]}
    async with connected(api) as client:
        create: Any = client.chat.completions.create
        for parallel, count in ((False, 1), (True, 2), (None, 2)):
            if stream:
                choices = [c.choices[0] async for c in await create(**chat, parallel_tool_calls=parallel, stream=True)]
                calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
            else:
                calls = (await create(**chat, parallel_tool_calls=parallel)).choices[0].message.tool_calls
            assert [call.function.arguments for call in calls] == ['{"a":1}', '{"a":2}'][:count]
            response = await client.responses.create(**items, parallel_tool_calls=parallel)
            assert [item.type for item in response.output] == ["function_call"] * count
            assert response.parallel_tool_calls is (count == 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_apart_from_the_content(stream: bool) -> None:
    api = FakeAgentApi(text=("<think>hm</think>", "4"), reasoning="hm", separates_reasoning=True)
    async with connected(api) as client:
        create: Any = client.chat.completions.create
        if stream:
            deltas = [c.choices[0].delta async for c in await create(model="m", messages=USER, stream=True)]
            assert "".join(delta.content or "" for delta in deltas) == "4"
            assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "hm"
        else:
            message = (await create(model="m", messages=USER)).choices[0].message
            assert (message.content, message.reasoning_content) == ("4", "hm")
            await create(model="m", messages=[*USER, message.to_dict()])
            assert api.requests[1].chat.messages[1].reasoning == "hm"


async def test_response_formats_become_grammars() -> None:
    api = FakeAgentApi()
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    async with connected(api) as client:
        create: Any = client.chat.completions.create
        await create(model="m", messages=USER, response_format={"type": "json_object"})
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        await create(model="m", messages=USER, response_format=form)
        await client.responses.create(
            model="m", input="x", text={"format": {"type": "json_schema", "name": "n", "schema": cast(Any, schema)}}
        )
    found = [json.loads(request.sampling_params.grammar.json_schema) for request in api.requests]
    assert found == [{"type": "object"}, schema, schema]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_and_token_ids_are_those_of_the_sampled_tokens(stream: bool) -> None:
    async with connected(FakeAgentApi()) as client:
        create: Any = client.chat.completions.create
        options = {"model": "m", "messages": USER, "logprobs": True, "extra_body": {"return_token_ids": True}}
        if stream:
            choices = [c.choices[0] async for c in await create(**options, stream=True)]
        else:
            choices = [(await create(**options)).choices[0]]
    content = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert [(token.token, token.logprob, token.top_logprobs) for token in content] == [
        ("Hello", -0.5, []),
        (" w\u00f6rld", -0.5, []),
    ]
    assert bytes(content[1].bytes).decode() == " w\u00f6rld"
    assert choices[-1].fourfold == {
        "token_ids": [10, 11],
        "logprobs": [-0.5, -0.5],
        "policy_versions": [{"policy_version": 3, "token_count": 2}],
    }


async def test_logprobs_have_the_bytes_of_a_character_that_has_several_tokens() -> None:
    api = FakeAgentApi(text=("\ufffd", "\ufffd"), part_bytes={10: b"\xc3", 11: b"\xb6"})
    async with connected(api) as client:
        chat = await client.chat.completions.create(model="m", messages=USER, logprobs=True)
        response = await client.responses.create(model="m", input="x", include=["message.output_text.logprobs"])
    assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content is not None
    output: Any = response.output[0]
    for tokens in (chat.choices[0].logprobs.content, output.content[0].logprobs):
        assert b"".join(bytes(token.bytes or ()) for token in tokens).decode() == "\u00f6"


@pytest.mark.parametrize(
    ("options", "param", "text"),
    [
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs", "send logprobs alone"),
        ({"presence_penalty": 0.5}, "presence_penalty", "leave it out"),
        ({"logit_bias": {"1": 2}}, "logit_bias", "leave it out"),
        ({"extra_body": {"parallel_tool_calls": "no"}}, "parallel_tool_calls", "true or false"),
        ({"temperature": 3}, "temperature", "from 0 to 2"),
        ({"n": 0}, "n", "from 1 to 256"),
        ({"max_tokens": 10**30}, "max_tokens", "from 1 to"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"extra_body": {"temprature": 1}}, "temprature", "'temperature'"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", "text"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "array"),
    ],
)
async def test_a_wrong_parameter_is_named_with_its_fix(options: dict[str, Any], param: str, text: str) -> None:
    async with connected(FakeAgentApi()) as client:
        create: Any = client.chat.completions.create
        with pytest.raises(openai.BadRequestError) as caught:
            await create(**{"model": "m", "messages": USER, **options})
    assert caught.value.param == param
    assert text in caught.value.message


NEUTRAL: dict[str, Any] = {
    "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "repetition_penalty": 1.0, "length_penalty": 1,
    "min_p": 0.0, "min_tokens": 0, "ignore_eos": False, "skip_special_tokens": True, "use_beam_search": False,
    "spaces_between_special_tokens": True, "include_stop_str_in_output": False, "bad_words": [], "priority": 0,
    "top_k": -1, "top_p": 1, "echo": False, "best_of": 1, "stop_token_ids": [], "return_tokens_as_token_ids": False,
    "detokenize": True, "truncate_prompt_tokens": -1, "kv_transfer_params": {}, "structured_outputs": {},
    "min_new_tokens": 0, "return_hidden_states": False,
}  # fmt: skip


async def test_neutral_values_of_refused_parameters_are_accepted() -> None:
    api = FakeAgentApi()
    ignored = {
        "user": "u",
        "store": True,
        "service_tier": "auto",
        "request_id": "r",
        "stop": None,
        "seed": None,
        "rid": "r",
    }
    chat = {"parallel_tool_calls": True, "n": 1, "top_logprobs": 0, "function_call": "none", "modalities": ["text"]}
    chat |= {"add_generation_prompt": True, "chat_template_kwargs": {"enable_thinking": True}, "chat_template": None}
    chat |= {"thinking": {"type": "disabled"}, "reasoning": {"effort": "none"}, "usage": {"include": True}}
    text = {"response_format": {"type": "text"}}
    async with connected(api) as client:
        ask: Any = client.chat.completions.create
        await ask(model="m", messages=USER, extra_body=NEUTRAL | ignored | chat)
        await client.completions.create(model="m", prompt="x", suffix="", extra_body=NEUTRAL | ignored | text)
        await client.responses.create(
            model="m", input="x", truncation="disabled", extra_body=NEUTRAL | ignored | {"n": 1}
        )
        for request in api.requests:
            assert not request.sampling_params.HasField("top_k") and not request.sampling_params.stop
        for name, value in NEUTRAL.items():
            if name not in ("top_k", "top_p", "stop_token_ids"):
                wrong = {dict: {"1": 2}, list: ["x"], bool: not value}.get(type(value), 0.5)
                with pytest.raises(openai.BadRequestError, match=r"leave it out|send n"):
                    await ask(model="m", messages=USER, extra_body={name: wrong})
        for wrong in ({"enable_thinking": False}, "x"):
            with pytest.raises(openai.BadRequestError, match="chat_template_kwargs"):
                await ask(model="m", messages=USER, extra_body={"chat_template_kwargs": wrong})


async def test_health_needs_no_key_and_the_end_of_a_run_is_410() -> None:
    api = FakeAgentApi(error=WrongState("the run has trained all its steps", reason="RUN_ENDED"))
    async with served(api) as server, httpx.AsyncClient(base_url=server.url, timeout=20) as client:
        health = await client.get("/health", headers={"authorization": "Bearer wrong"})
        assert (health.status_code, health.json()) == (200, {"status": "ok"})
        assert (await client.head("/health")).status_code == 200
        ended = await client.post("/v1/tasks/next", json={})
        assert (ended.status_code, ended.json()["error"]["code"]) == (410, "run_ended")
        assert ended.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_take_text_or_ids(stream: bool) -> None:
    api = FakeAgentApi()
    async with connected(api) as client:
        create: Any = client.completions.create
        for prompt in ("1 + 1 =", [5, 6, 7]):
            if stream:
                choices = [c.choices[0] async for c in await create(model="m", prompt=prompt, logprobs=0, stream=True)]
            else:
                choices = (await create(model="m", prompt=prompt, logprobs=0)).choices
            assert "".join(choice.text for choice in choices) == "Hello w\u00f6rld"
            assert choices[-1].finish_reason == "stop"
            assert [t for choice in choices for t in choice.logprobs.tokens] == ["Hello", " w\u00f6rld"]
            assert [t for choice in choices for t in choice.logprobs.text_offset] == [0, 5]
        with pytest.raises(openai.BadRequestError, match="send 0"):
            await create(model="m", prompt="x", logprobs=2)
        with pytest.raises(openai.BadRequestError, match="a request for each prompt"):
            await create(model="m", prompt=["a", "b"])
    assert api.requests[0].text == "1 + 1 ="
    assert list(api.requests[1].token_ids.ids) == [5, 6, 7]
    assert api.requests[0].sampling_params.max_tokens == 16


async def test_responses_return_items_and_take_them_back() -> None:
    api = FakeAgentApi(finish=TOOL_CALLS, tool_calls=(("add", '{"a":1}'),), reasoning="hm")
    tool: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
    async with connected(api) as client:
        first = await client.responses.create(model="m", input="2+2?", instructions="Be brief.", tools=[tool])
        assert [item.type for item in first.output] == ["reasoning", "function_call"]
        items: Any = [
            {"role": "user", "content": "2+2?"},
            *[item.to_dict() for item in first.output],
            {"type": "function_call_output", "call_id": "c0", "output": "4"},
        ]
        await client.responses.create(model="m", input=items, tools=[tool])
        with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
            await client.responses.create(model="m", input="x", previous_response_id="resp_1")
    messages = api.requests[1].chat.messages
    assert [message.role for message in messages] == ["user", "assistant", "tool"]
    assert (messages[1].reasoning, messages[1].tool_calls[0].arguments_json) == ("hm", '{"a":1}')
    assert api.requests[0].chat.messages[0].role == "system"


@pytest.mark.parametrize("tools", [False, True])
async def test_streamed_responses_build_the_final_one(tools: bool) -> None:
    api = FakeAgentApi(tool_calls=(("add", '{"a":1}'),) if tools else (), finish=TOOL_CALLS if tools else LENGTH)
    tool: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
    async with connected(api) as client:
        extra: Any = {"tools": [tool]} if tools else {}
        async with client.responses.stream(model="m", input="x", **extra) as stream:
            events = [event async for event in stream]
    kinds = [event.type for event in events]
    numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    assert numbers == sorted(numbers)
    if tools:
        assert kinds[-1] == "response.completed"
        assert "response.function_call_arguments.done" in kinds
    else:
        assert kinds[-1] == "response.incomplete"
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Hello w\u00f6rld"
        assert "response.output_text.done" in kinds


async def test_errors_have_codes_and_retry_times() -> None:
    api = FakeAgentApi(error=Overloaded("too many tokens are in flight", retry_after=2.5))
    async with connected(api) as client:
        with pytest.raises(openai.RateLimitError, match="too many tokens") as busy:
            await client.chat.completions.create(model="m", messages=USER)
        assert busy.value.response.headers["retry-after"] == "3"
        assert busy.value.response.headers["retry-after-ms"] == "2500"
        api.error = Unavailable("no engine serves now")
        with pytest.raises(openai.InternalServerError) as away:
            await client.chat.completions.create(model="m", messages=USER, stream=True)
        assert away.value.status_code == 503
        assert away.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="m", input="x")
        with pytest.raises(openai.AuthenticationError, match="unknown"):
            await client.with_options(api_key="wrong").models.list()
        with pytest.raises(openai.PermissionDeniedError):
            await client.with_options(api_key="no-generate").completions.create(model="m", prompt="x")


async def test_an_error_within_a_stream_ends_it() -> None:
    api = FakeAgentApi(error=Unavailable("the engine died"), error_after=1)
    async with connected(api) as client:
        stream = await client.chat.completions.create(model="m", messages=USER, stream=True)
        with pytest.raises(openai.APIError, match="the engine died"):
            async for _ in stream:
                pass


async def test_an_error_within_streamed_responses_has_the_next_number() -> None:
    api = FakeAgentApi(error=Unavailable("the engine died"), error_after=1)
    body = {"model": "m", "input": "2+2?", "stream": True}
    async with served(api) as server, httpx.AsyncClient(base_url=server.url) as client:
        text = (await client.post("/v1/responses", json=body, timeout=20)).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert len(events) > 2 and (events[-1]["type"], events[-1]["message"]) == ("error", "the engine died")


async def test_url_and_key_choose_the_session() -> None:
    api = FakeAgentApi()
    async with connected(api, "/sessions/s1/v1") as client:
        await client.chat.completions.create(model="m", messages=USER, extra_headers={"Idempotency-Key": "turn-1"})
        await client.with_options(api_key=SESSION_KEY).responses.create(model="m", input="x")
        assert [model.id async for model in client.models.list()] == ["toy"]
    async with connected(api, key=SESSION_KEY) as client:
        await client.completions.create(model="m", prompt="x")
        with pytest.raises(openai.PermissionDeniedError, match="another session"):
            other = str(client.base_url).replace("/v1", "/sessions/s2/v1")
            await client.with_options(base_url=other).completions.create(model="m", prompt="x")
    assert [request.session_id for request in api.requests] == ["s1", "s1", "s1"]
    assert api.requests[0].request_id == "turn-1"


async def test_an_agent_trains_with_the_openai_package_alone() -> None:
    api = FakeAgentApi()
    async with connected(api) as client:
        task: Any = await client.post("/tasks/next", cast_to=object, body={"wait": "5s"})
        assert task["task"]["messages"][0]["content"] == "2+2?"
        body = {"session_id": "s1", "task_id": "t1"}
        opened: Any = await client.post("/sessions", cast_to=object, body=body)
        assert opened["session"]["state"] == "SESSION_STATE_OPEN"
        agent = client.with_options(api_key=opened["session_key"])
        await agent.chat.completions.create(model="m", messages=USER)
        outcome = {"reward": 0.5, "turn_rewards": [{"turn_index": 0, "reward": 1}], "metrics": {"tools": 2}}
        closed: Any = await agent.post("/sessions/s1/close", cast_to=object, body=outcome)
        assert closed["session"]["state"] == "SESSION_STATE_CLOSED"
        exported: Any = await agent.get("/sessions/s1", cast_to=object)
        assert exported["session"]["turn_count"] == 0
        quota: Any = await client.get("/quota", cast_to=object)
        assert quota["max_calls_per_second"] == 2.5
        with pytest.raises(openai.BadRequestError, match="expired"):
            await client.post("/sessions/s9/close", cast_to=object, body={"reward": 1})
        with pytest.raises(openai.BadRequestError, match="rewrad"):
            await client.post("/sessions/s1/close", cast_to=object, body={"rewrad": 1})
    assert api.requests[0].session_id == "s1"
    assert (api.closed[0].reward, api.closed[0].metrics["tools"]) == (0.5, 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_aborts_its_turn(stream: bool) -> None:
    api = FakeAgentApi(hang_after=1)
    async with served(api) as server, httpx.AsyncClient() as client:
        body = {"messages": USER, "stream": stream}
        with pytest.raises(httpx.ReadTimeout):
            await client.post(server.url + "/v1/chat/completions", json=body, timeout=0.5)
        await asyncio.wait_for(api.aborted.wait(), 10)


async def test_stopping_ends_requests_after_the_grace_time() -> None:
    api = FakeAgentApi(hang_after=1)
    server = await serve_http(api, GatewayConfig(), None)
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        call = asyncio.create_task(client.chat.completions.create(model="m", messages=USER))
        while not api.requests:
            await asyncio.sleep(0.01)
        await server.stop(0.1)
        with pytest.raises(openai.InternalServerError, match="stopping"):
            await call
    assert api.aborted.is_set()
