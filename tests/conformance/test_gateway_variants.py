"""`fourfold conformance gateway` passes for the real gateway, and names faults of ones that break the contract."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.errors import NotFound, Overloaded, WrongState
from fourfold.rpc.codec import pack_floats, pack_ints, read_ints
from fourfold.security.principal import CallerLimits
from fourfold_gateway.servicer import AgentServicer, Context
from fourfold_tools.conformance.checks import Finding
from fourfold_tools.conformance.gateway import CHECKS, GatewayProbe
from tests.conformance import toy_gateway
from tests.conformance.toy_gateway import gateway


def variant(**changes: Any) -> type[AgentServicer]:
    return type("Variant", (AgentServicer,), changes)


def answered(method: str, change: Callable[[Any, Any], Any]) -> type[AgentServicer]:
    """Return a gateway that changes the responses of a method; `change` gets request and response."""
    original = getattr(AgentServicer, method)

    async def call(self: AgentServicer, request: Any, context: Context) -> Any:
        response = await original(self, request, context)
        change(request, response)
        return response

    return variant(**{method: call})


def streamed(change: Callable[[pb.TurnChunk], Any]) -> type[AgentServicer]:
    """Return a gateway that changes the chunks of turns."""

    async def generate(self: AgentServicer, request: Any, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        async for response in AgentServicer.Generate(self, request, context):
            for chunk in response.chunks:
                change(chunk)
            yield response

    return variant(Generate=generate)


def asked(method: str, change: Callable[[Any], Any]) -> type[AgentServicer]:
    """Return a gateway that changes requests before it handles them."""
    original = getattr(AgentServicer, method)
    if method in ("Generate", "WatchSession"):

        async def stream(self: AgentServicer, request: Any, context: Context) -> AsyncIterator[Any]:
            change(request)
            async for response in original(self, request, context):
                yield response

        return variant(**{method: stream})

    async def call(self: AgentServicer, request: Any, context: Context) -> Any:
        change(request)
        return await original(self, request, context)

    return variant(**{method: call})


def put(**fields: Any) -> Callable[[Any, Any], Any]:
    def change(request: Any, response: Any) -> None:
        for name, value in fields.items():
            setattr(response, name, value)

    return change


def clear(*names: str) -> Callable[[Any], Any]:
    return lambda message: [message.ClearField(name) for name in names]


def without_tokens_before_the_end(chunk: pb.TurnChunk) -> None:
    if not chunk.finish_reason:
        chunk.token_ids = chunk.logprobs = b""


def encoded_again(request: Any, response: pb.ExportSessionResponse) -> None:
    """Change a sampled token of each segment, as a gateway does that encodes text again."""
    for segment in response.segments:
        ids = read_ints(segment.token_ids).copy()
        ids[-1] = (ids[-1] + 1) % 256
        segment.token_ids = pack_ints(ids)


def other_logprobs(request: Any, response: pb.ExportSessionResponse) -> None:
    for segment in response.segments:
        count = len(segment.action_mask)
        values = [-0.5 if segment.action_mask[i] else float("nan") for i in range(count)]
        segment.behavior_logprobs = pack_floats(values)


def short_spans(request: Any, response: pb.ExportSessionResponse) -> None:
    for segment in response.segments:
        segment.version_spans[-1].token_count -= 1


_numbers = itertools.count()


def three_more_tokens(request: pb.GenerateRequest) -> None:
    request.sampling_params.max_tokens += 3


def any_reason(request: pb.CloseSessionRequest) -> None:
    if request.WhichOneof("outcome") == "abandon_reason":
        request.abandon_reason = "REASON"


class TurnsTwice(AgentServicer):
    """Samples a repeated request again."""

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        if request.request_id == "again":
            request.request_id = f"again-{next(_numbers)}"
        async for response in AgentServicer.Generate(self, request, context):
            yield response


class ForgetsAtOnce(AgentServicer):
    """Knows no session that was closed."""

    closed: ClassVar[set[str]] = set()

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Context) -> pb.CloseSessionResponse:
        if request.session_id in self.closed:
            raise NotFound("no such session")
        response = await AgentServicer.CloseSession(self, request, context)
        self.closed.add(request.session_id)
        return response


class WatchNeverEnds(AgentServicer):
    async def WatchSession(self, request: Any, context: Context) -> AsyncIterator[pb.WatchSessionResponse]:
        async for response in AgentServicer.WatchSession(self, request, context):
            yield response
        await asyncio.sleep(1000)


class NoRetryDelay(AgentServicer):
    async def OpenSession(self, request: pb.OpenSessionRequest, context: Context) -> pb.OpenSessionResponse:
        try:
            return await AgentServicer.OpenSession(self, request, context)
        except Overloaded as error:
            raise Overloaded(error.message, reason=error.reason) from None


class WrongCode(AgentServicer):
    async def ExportSession(self, request: pb.ExportSessionRequest, context: Context) -> pb.ExportSessionResponse:
        try:
            return await AgentServicer.ExportSession(self, request, context)
        except NotFound as error:
            raise WrongState(error.message) from None


class AlwaysATask(AgentServicer):
    async def NextTask(self, request: pb.NextTaskRequest, context: Context) -> pb.NextTaskResponse:
        response = await AgentServicer.NextTask(self, request, context)
        response.task.sample_index = response.task.group_size
        return response


VARIANTS: dict[str, tuple[type[AgentServicer], str]] = {
    # GetInfo and text
    "no contract version": (answered("GetInfo", put(contract_version="")), "info"),
    "another contract": (answered("GetInfo", put(contract_version="2.1")), "info"),
    "a slash at the end of http_url": (answered("GetInfo", put(http_url="http://x/")), "info"),
    "training without a run": (answered("GetInfo", put(run_name="")), "info"),
    "short hash": (answered("GetInfo", put(tokenizer_sha256=b"x")), "info"),
    "tokens of an empty text": (asked("Tokenize", lambda r: setattr(r, "text", r.text or "x")), "text"),
    "another text": (answered("Detokenize", put(text="something else")), "text"),
    "a template without its tokens": (
        answered("ApplyChatTemplate", lambda _, r: r.token_ids.append(1)),
        "chat_template",
    ),
    # turns
    "no message": (streamed(clear("message")), "turn"),
    "another message": (streamed(lambda c: c.message.MergeFrom(pb.Message(content="x", role="assistant"))), "turn"),
    "no prompt count": (streamed(clear("prompt_token_count")), "turn"),
    "no finish reason": (streamed(clear("finish_reason")), "turn"),
    "no tokens": (streamed(clear("token_ids", "logprobs")), "turn"),
    "no log-probabilities": (streamed(clear("logprobs")), "turn"),
    "tokens missing": (streamed(without_tokens_before_the_end), "session"),
    "one index for all": (streamed(clear("sample_index")), "several_samples"),
    "ignores stop_token_ids": (
        asked("Generate", lambda r: r.sampling_params.ClearField("stop_token_ids")),
        "stop",
    ),
    "ignores max_tokens": (asked("Generate", three_more_tokens), "turn"),
    "ignores a wrong sample_count": (
        asked("Generate", lambda r: r.sample_count > 0 or r.ClearField("sample_count")),
        "malformed_turns",
    ),
    # sessions
    "no key": (answered("OpenSession", put(session_key="")), "open"),
    "a new key each time": (
        answered("OpenSession", lambda _, r: setattr(r, "session_key", f"k{next(_numbers)}")),
        "open",
    ),
    "one key for all": (answered("OpenSession", put(session_key="key")), "open"),
    "another attempt is the same": (asked("OpenSession", clear("own_group")), "open"),
    "any idle_timeout": (asked("OpenSession", clear("idle_timeout")), "malformed_open"),
    "encodes text again": (answered("ExportSession", encoded_again), "session"),
    "other log-probabilities in the export": (answered("ExportSession", other_logprobs), "session"),
    "spans that do not add up": (answered("ExportSession", short_spans), "session"),
    "exports no turns": (answered("ExportSession", lambda _, r: r.ClearField("turns")), "turns_by_ids"),
    "samples a repeated turn again": (TurnsTwice, "repeated_turn"),
    "another code for an unknown session": (WrongCode, "unknown_session"),
    "a watch that never ends": (WatchNeverEnds, "watch"),
    # outcomes
    "forgets closed sessions": (ForgetsAtOnce, "close"),
    "another state after an abandonment": (
        answered("CloseSession", lambda _, r: setattr(r.session, "state", pb.SESSION_STATE_CLOSED)),
        "abandon",
    ),
    "accepts any reason": (
        asked("CloseSession", any_reason),
        "malformed_close",
    ),
    "accepts two rewards of a turn": (asked("CloseSession", clear("turn_rewards")), "malformed_close"),
    "counts no sessions": (answered("GetQuota", put(open_session_count=0)), "quota"),
    "a negative quota": (answered("GetQuota", put(max_open_sessions=-1)), "quota"),
    "another limit of sessions": (answered("GetQuota", put(max_open_sessions=2)), "session_limit"),
    "no retry delay": (NoRetryDelay, "session_limit"),
    "a sample_index beyond the group": (AlwaysATask, "tasks"),
    "any wait": (asked("NextTask", clear("wait")), "tasks"),
}


async def examine(
    root: Path, servicer: type[AgentServicer], *only: str, seconds: float = 10.0, **options: Any
) -> list[Finding]:
    async with gateway(root, servicer, **options) as running:
        probe = GatewayProbe(channel=running.channel, peer="gateway", seconds=seconds, http=running.url)
        return list(await CHECKS.run(probe, only={"info", *only} if only else ()))


def broken(findings: list[Finding]) -> set[str]:
    return {finding.name for finding in findings if finding.status == "broken"}


@pytest.mark.slow
@pytest.mark.lock
async def test_the_real_gateway_without_a_run_keeps_the_contract(tmp_path: Path) -> None:
    findings = await examine(tmp_path, AgentServicer, run=False)
    assert broken(findings) == set(), findings
    skipped = {finding.name for finding in findings if finding.status != "ok"}
    assert skipped == {"tokenizer", "call_rate", "http_keys"}, findings


@pytest.mark.parametrize("most", [1, 2])
async def test_a_low_quota_of_sessions_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(toy_gateway, "SESSIONS", most)
    rules = ("open", "concurrent_sessions", "session_limit", "http_session")
    findings = await examine(tmp_path, AgentServicer, *rules)
    assert broken(findings) == set(), findings
    skipped = {finding.name for finding in findings if finding.status == "skipped"}
    assert skipped == ({"open", "concurrent_sessions", "http_session"} if most == 1 else set()), findings


async def test_programs_of_the_same_machine_have_no_limit_of_calls(tmp_path: Path) -> None:
    """GetQuota must not show the limit of agents, which is not applied without TLS."""
    findings = await examine(tmp_path, AgentServicer, "call_rate", limits=CallerLimits(calls_per_second=20))
    assert [finding.status for finding in findings] == ["ok", "skipped"], findings


async def test_a_limit_of_calls_that_is_not_applied_is_named(tmp_path: Path) -> None:
    findings = await examine(tmp_path, answered("GetQuota", put(max_calls_per_second=20.0)), "call_rate")
    assert broken(findings) == {"call_rate"}


@pytest.mark.parametrize("name", VARIANTS)
async def test_a_variant_is_named(name: str, tmp_path: Path) -> None:
    servicer, check = VARIANTS[name]
    findings = await examine(tmp_path, servicer, check, seconds=1.0 if name == "a watch that never ends" else 10.0)
    assert check in broken(findings), [(f.name, f.status, f.text) for f in findings]


# -- HTTP -------------------------------------------------------------------------------------------------------------


def without(*names: str) -> Callable[[Any], Any]:
    def change(value: Any) -> Any:
        for name in names:
            value.pop(name, None)
        return value

    return change


def as_json(change: Callable[[Any], Any]) -> Callable[[int, bytes], tuple[int, bytes]]:
    """Return a change of the JSON in a body."""
    return lambda status, body: (status, json.dumps(change(json.loads(body))).encode())


def first_choice(**fields: Any) -> Callable[[Any], Any]:
    return lambda value: (value["choices"][0].update(fields), value)[1]


HTTP_VARIANTS: dict[str, tuple[Callable[[int, bytes], tuple[int, bytes]], str]] = {
    "another model": (as_json(lambda v: (v["data"][0].update(id="other"), v)[1]), "http_models"),
    "models that are no list": (as_json(without("object")), "http_models"),
    "no usage": (as_json(without("usage")), "http_chat"),
    "usage that does not add up": (as_json(lambda v: (v["usage"].update(total_tokens=1), v)[1]), "http_chat"),
    "choices that are no objects": (as_json(lambda v: {**v, "choices": ["x"]}), "http_chat"),
    "an answer that is a list": (as_json(lambda v: [v]), "http_chat"),
    "one choice for two": (as_json(lambda v: (v["choices"].pop(), v)[1]), "http_chat"),
    "another finish reason": (as_json(first_choice(finish_reason="eos")), "http_chat"),
    "no logprobs": (as_json(first_choice(logprobs=None)), "http_chat"),
    "no [DONE]": (lambda status, body: (status, body.replace(b"data: [DONE]\n\n", b"")), "http_stream"),
    "chunks of another object": (
        lambda status, body: (status, body.replace(b"chat.completion.chunk", b"chunk")),
        "http_stream",
    ),
    "no finish reason in a stream": (
        lambda status, body: (status, body.replace(b'"length"', b"null").replace(b'"stop"', b"null")),
        "http_stream",
    ),
    "errors of another form": (lambda status, body: (status, b'{"detail": "wrong"}'), "http_errors"),
    "errors without a param": (as_json(lambda v: {"error": {**v["error"], "param": None}}), "http_errors"),
    "status 422": (lambda status, body: (422 if status == 400 else status, body), "http_errors"),
}


@contextlib.contextmanager
def proxy(url: str, change: Callable[[int, bytes], tuple[int, bytes]]) -> Iterator[str]:
    """Serve an HTTP API whose responses are changed on their way; yield its URL."""
    host = url.removeprefix("http://")

    class Handler(BaseHTTPRequestHandler):
        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            connection = http.client.HTTPConnection(host, timeout=10)
            names = ("content-type", "authorization")
            headers = {name: self.headers[name] for name in names if self.headers[name]}
            connection.request(self.command, self.path, body or None, headers)
            response = connection.getresponse()
            status, content = change(response.status, response.read())
            self.send_response(status)
            self.send_header("content-type", response.headers["content-type"])
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            connection.close()

        do_GET = do_POST = forward

        def log_message(self, *_: Any) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_faults_of_the_http_api_are_named(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running:
        for name, (change, check) in HTTP_VARIANTS.items():
            with proxy(running.url, change) as changed:
                probe = GatewayProbe(channel=running.channel, peer="gateway", seconds=10.0, http=changed)
                findings = list(await CHECKS.run(probe, only={"info", check}))
            assert check in broken(findings), (name, [(f.name, f.status, f.text) for f in findings])


def test_every_variant_breaks_a_check_that_exists() -> None:
    assert {check for _, check in (*VARIANTS.values(), *HTTP_VARIANTS.values())} <= set(CHECKS.names)
