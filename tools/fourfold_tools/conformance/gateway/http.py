"""Checks of the OpenAI-compatible HTTP API of a gateway."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from fourfold.rpc.codec import read_ints
from fourfold_tools.conformance.checks import Checks, Skipped, Violation
from fourfold_tools.conformance.gateway.http_client import HttpClient, Response
from fourfold_tools.conformance.gateway.probe import FEW_TOKENS, QUESTION, GatewayProbe

HTTP: Final = Checks[GatewayProbe]()
_CHAT: Final = "/v1/chat/completions"
_FINISH: Final = ("stop", "length", "tool_calls")
_USAGE: Final = ("prompt_tokens", "completion_tokens", "total_tokens")


def _client(probe: GatewayProbe) -> HttpClient:
    if not probe.http:
        raise Skipped("no --http was given")
    return HttpClient(probe.http, seconds=probe.seconds, authority=probe.authority)


def _body(probe: GatewayProbe, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": probe.info.model, "messages": messages, "max_tokens": FEW_TOKENS, **fields}


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise Violation(text)


def _answer(response: Response, what: str) -> dict[str, Any]:
    """Return the object of a response with status 200."""
    if response.status != 200:
        raise Violation(
            f"{what} was answered with {response.status} {response.body[:200].decode('utf-8', 'replace')!r}"
        )
    found = response.json()
    _require(isinstance(found, dict), f"{what} was answered with {type(found).__name__}, not with an object")
    kind = response.headers.get("content-type", "")
    _require(kind.startswith("application/json"), f"{what} has the content-type {kind!r}; it must be application/json")
    answer: dict[str, Any] = found
    return answer


@HTTP.add
async def check_http_models(probe: GatewayProbe) -> None:
    """GET /v1/models lists the model of GetInfo."""
    answer = _answer(await _client(probe).request("GET", "/v1/models", key=probe.token), "GET /v1/models")
    data = answer.get("data")
    _require(answer.get("object") == "list" and isinstance(data, list), "the models are no list object with data")
    models = [model for model in data or () if isinstance(model, dict)]
    _require(all(model.get("object") == "model" for model in models), "a model has no object = 'model'")
    ids = [model.get("id") for model in models]
    _require(probe.info.model in ids, f"the models are {ids!r:.200}; GetInfo has {probe.info.model!r:.100}")


@HTTP.add
async def check_http_chat(probe: GatewayProbe) -> None:
    """POST /v1/chat/completions answers with one choice for each sample, finish reasons and usage."""
    response = await _client(probe).request("POST", _CHAT, _body(probe, n=2, logprobs=True), key=probe.token)
    answer = _answer(response, f"POST {_CHAT}")
    _require(answer.get("object") == "chat.completion", f"object is {answer.get('object')!r:.80}")
    for name, kind in (("id", str), ("created", int), ("model", str), ("choices", list), ("usage", dict)):
        _require(
            isinstance(answer.get(name), kind), f"{name} is {answer.get(name)!r:.80}; it must be a {kind.__name__}"
        )
    choices = answer["choices"]
    _require([c.get("index") for c in choices] == [0, 1], f"n = 2 has the choices {choices!r:.200}")
    count = 0
    for choice in choices:
        message, entries = choice.get("message") or {}, (choice.get("logprobs") or {}).get("content") or []
        _require(message.get("role") == "assistant", "the message of a choice has not the role 'assistant'")
        _require(isinstance(message.get("content"), str), "content of a message is no string, and it has no tool calls")
        _require(choice.get("finish_reason") in _FINISH, f"finish_reason is {choice.get('finish_reason')!r:.60}")
        _require(bool(entries), "logprobs = true, and logprobs.content is empty")
        for entry in entries:
            _require(
                isinstance(entry.get("token"), str) and isinstance(entry.get("logprob"), int | float),
                f"an entry of logprobs is {entry!r:.100}; it must have token and logprob",
            )
            _require(entry["logprob"] <= 0, f"a logprob is {entry['logprob']}; it must be at most 0")
        count += len(entries)
    _check_usage(answer["usage"], count)


def _check_usage(usage: Mapping[str, Any], completion: int) -> None:
    values = [usage.get(name) for name in _USAGE]
    if not all(isinstance(value, int) and value > 0 for value in values):
        raise Violation(f"usage is {dict(usage)!r:.200}; {', '.join(_USAGE)} must be above 0")
    prompt, sampled, total = (int(value or 0) for value in values)
    _require(prompt + sampled == total, f"total_tokens is {total}, of {prompt} and {sampled}")
    _require(sampled == completion, f"completion_tokens is {sampled}, and logprobs have {completion} tokens")


@HTTP.add
async def check_http_stream(probe: GatewayProbe) -> None:
    """With stream = true the answer comes as server-sent events, and ends with [DONE]."""
    body = _body(probe, stream=True, stream_options={"include_usage": True}, logprobs=True)
    response = await _client(probe).request("POST", _CHAT, body, key=probe.token)
    _require(response.status == 200, f"a stream was answered with {response.status}")
    kind = response.headers.get("content-type", "")
    _require(kind.startswith("text/event-stream"), f"a stream has the content-type {kind!r}")
    events = response.events()
    _require(events[-1:] == ["[DONE]"], f"the last event is {(events or [''])[-1]!r:.100}; it must be [DONE]")
    chunks = [_chunk(event) for event in events[:-1]]
    _require(bool(chunks), "a stream has no chunks")
    _require(len({chunk.get("id") for chunk in chunks}) == 1, "the chunks of a stream have several ids")
    choices = [choice for chunk in chunks for choice in chunk.get("choices") or ()]
    _require(bool(choices), "a stream has no choices")
    _require(choices[0]["delta"].get("role") == "assistant", "the first delta of a stream has not the role 'assistant'")
    finishes = [c.get("finish_reason") for c in choices if c.get("finish_reason")]
    _require(len(finishes) == 1 and finishes[0] in _FINISH, f"the finish reasons of a stream are {finishes!r:.100}")
    _require(bool(choices[-1].get("finish_reason")), "a delta follows the finish reason")
    tokens = sum(len((choice.get("logprobs") or {}).get("content") or ()) for choice in choices)
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    _require(len(usages) == 1, f"{len(usages)} chunks have usage; with include_usage one has")
    _check_usage(usages[0], tokens)


def _chunk(event: str) -> dict[str, Any]:
    try:
        found = json.loads(event)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("object") != "chat.completion.chunk":
        raise Violation(f"an event is {event[:100]!r}; it must be a chat.completion.chunk as JSON")
    for choice in found.get("choices") or ():
        _require(isinstance(choice, dict) and isinstance(choice.get("delta"), dict), "a choice of a chunk has no delta")
    return found


@HTTP.add
async def check_http_errors(probe: GatewayProbe) -> None:
    """Errors have OpenAI's form: a status, and an object error with message, type, param and code."""
    client, good = _client(probe), _body(probe)
    cases: list[tuple[str, str, str, Any, tuple[int, ...]]] = [
        ("a body that is not JSON", "POST", _CHAT, b"{", (400,)),
        ("an empty object", "POST", _CHAT, {}, (400,)),
        ("messages = []", "POST", _CHAT, {**good, "messages": []}, (400,)),
        ("messages = 'x'", "POST", _CHAT, {**good, "messages": "x"}, (400,)),
        ("temperature = 9", "POST", _CHAT, {**good, "temperature": 9}, (400,)),
        ("max_tokens = 0", "POST", _CHAT, {**good, "max_tokens": 0}, (400,)),
        ("n = 0", "POST", _CHAT, {**good, "n": 0}, (400,)),
        ("an unknown path", "POST", "/v1/no/such/path", good, (404,)),
        ("GET of completions", "GET", _CHAT, None, (404, 405)),
    ]
    for what, verb, path, body, statuses in cases:
        response = await client.request(verb, path, body, key=probe.token)
        _check_error(response, what, statuses)
    response = await client.request("POST", _CHAT, {**good, "temperature": 9}, key=probe.token)
    param = response.json()["error"].get("param")
    _require(param == "temperature", f"the error of temperature = 9 has param = {param!r:.80}")


def _check_error(response: Response, what: str, statuses: tuple[int, ...]) -> None:
    if response.status not in statuses:
        wanted = " or ".join(map(str, statuses))
        raise Violation(f"{what} was answered with {response.status}; it must be {wanted}")
    found = response.json()
    error = found.get("error") if isinstance(found, dict) else None
    if not isinstance(error, dict) or not {"message", "type", "param", "code"} <= error.keys():
        raise Violation(
            f"{what} was answered with {response.body[:150].decode('utf-8', 'replace')!r}; the error is an object with "
            f"message, type, param and code"
        )
    _require(isinstance(error["message"], str) and bool(error["message"]), f"the error of {what} has no message")
    _require(isinstance(error["type"], str) and bool(error["type"]), f"the error of {what} has no type")


@HTTP.add
async def check_http_keys(probe: GatewayProbe) -> None:
    """Where a token is needed, a call without one, or with an unknown one, is answered with 401."""
    client = _client(probe)
    if not probe.token:
        raise Skipped("the API takes calls without a token")
    for what, key in (("no token", ""), ("an unknown token", "no-such-token")):
        _check_error(await client.request("POST", _CHAT, _body(probe), key=key), what, (401,))


@HTTP.add
async def check_http_session(probe: GatewayProbe) -> None:
    """URL/sessions/ID/v1 with the session's key samples turns of that session alone, with their exact tokens."""
    client = _client(probe)
    async with probe.session() as opened, probe.session() as other:
        name, key = opened.session.session_id, opened.session_key
        path = f"/sessions/{name}{_CHAT}"
        _answer(await client.request("POST", path, _body(probe, logprobs=True), key=key), f"POST {path}")
        exported = await probe.export(name)
        if (exported.session.turn_count, len(exported.segments)) != (1, 1):
            raise Violation(f"after one turn over HTTP the session has {exported.session.turn_count} turns")
        turn, segment = exported.turns[0], exported.segments[0]
        if len(read_ints(segment.token_ids)) != turn.prompt_token_count + turn.completion_token_count:
            raise Violation("the segment of a turn over HTTP has other tokens than its prompt and its completion")
        foreign = await client.request("POST", f"/sessions/{other.session.session_id}{_CHAT}", _body(probe), key=key)
        _check_error(foreign, "the key of another session", (401, 403))
        unknown = await client.request("POST", "/sessions/no-such-session" + _CHAT, _body(probe), key=probe.token)
        _check_error(unknown, "an unknown session", (401, 404))
