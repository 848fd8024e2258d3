"""The ASGI application: routes, keys, bodies, deadlines and errors of every endpoint.

request --> route --> key --> limits --> body --> parse --> AgentApi.generate --> response or server-sent events
                                                                ^
client disconnects: the task of the request is cancelled, which aborts the turn
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from contextlib import suppress
from types import ModuleType
from typing import Any, Final, NamedTuple

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.errors import DeadlinePassed, FourfoldError, PermissionDenied, Unavailable
from fourfold.security.web_pages import joined, refusal
from fourfold.text import clean
from fourfold.tracing.propagation import TRACEPARENT, incoming
from fourfold.tracing.spans import Spans
from fourfold_gateway.api import AgentApi, Caller
from fourfold_gateway.encoding import PromptLimits
from fourfold_gateway.http import agent_calls, chat, completions, messages, responses
from fourfold_gateway.http.errors import (
    Dialect,
    RequestError,
    encode,
    error_body,
    error_headers,
    status_of,
)
from fourfold_gateway.http.fields import Fields, parse_json
from fourfold_gateway.http.turns import TURN_SECONDS, HttpTurn, TokenTexts, TurnOptions

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_AgentCall = Callable[[AgentApi, Caller, dict[str, Any], str], Awaitable[dict[str, Any]]]

_PATH: Final = re.compile(r"(?:/sessions/(?P<prefix>[A-Za-z0-9_-]{1,128}))?/v1/(?P<rest>[a-z_/]{1,64})")
_SESSION_PATH: Final = re.compile(r"/v1/sessions/(?P<id>[A-Za-z0-9_-]{1,128})(?P<close>/close)?")
_JSON: Final = (b"content-type", b"application/json")
_SSE: Final = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_CLOSE: Final = (b"connection", b"close")
_DRAIN_FACTOR: Final = 8  # read at most this multiple of the limit of a body that is too large, then answer
_PING_SECONDS: Final = 10.0  # after this time without an event, send a comment, so that no proxy closes the stream


class _Route(NamedTuple):
    verb: str
    method: str  # method of AgentService, which decides whether the key allows the call
    dialect: Dialect = "openai"
    turns: ModuleType | None = None  # a module with parse, respond and Stream
    call: _AgentCall | None = None


_TURNS: Final = {
    "chat/completions": _Route("POST", "Generate", turns=chat),
    "completions": _Route("POST", "Generate", turns=completions),
    "responses": _Route("POST", "Generate", turns=responses),
    "messages": _Route("POST", "Generate", "anthropic", turns=messages),
    "messages/count_tokens": _Route("POST", "ApplyChatTemplate", "anthropic"),
    "models": _Route("GET", "GetInfo"),
}
_CALLS: Final = {
    "tasks/next": _Route("POST", "NextTask", call=agent_calls.next_task),
    "sessions": _Route("POST", "OpenSession", call=agent_calls.open_session),
    "quota": _Route("GET", "GetQuota", call=agent_calls.get_quota),
}
_EXPORT: Final = _Route("GET", "ExportSession", call=agent_calls.export_session)
_CLOSE_SESSION: Final = _Route("POST", "CloseSession", call=agent_calls.close_session)


class GatewayApp:
    """Answers HTTP requests with the operations of a gateway."""

    def __init__(
        self, api: AgentApi, *, max_body_bytes: int, body_seconds: float, names: Collection[str] | None
    ) -> None:
        """Make an application.

        Args:
            api: the operations.
            max_body_bytes: largest body.
            body_seconds: longest time in which a body must arrive.
            names: further names of this machine, for requests that need no token; None: all need one.
        """
        self._api, self._names = api, names
        self._most_bytes, self._body_seconds = max_body_bytes, body_seconds
        self._texts = TokenTexts(api)
        self._info: pb.GetInfoResponse | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await _Exchange(self, scope, receive, send).run()

    async def max_body_bytes(self, caller: Caller) -> int:
        """Return the size of the largest body in bytes: a larger prompt cannot fit the context."""
        context = (await self.info(caller)).max_context_tokens
        return min(self._most_bytes, PromptLimits(context).body_bytes) if context else self._most_bytes

    async def info(self, caller: Caller) -> pb.GetInfoResponse:
        """Return the description of the model, which never changes."""
        if self._info is None:
            self._info = await self._api.get_info(caller)
        return self._info


class _Exchange:
    """One request and its response."""

    def __init__(self, app: GatewayApp, scope: Scope, receive: Receive, send: Send) -> None:
        self._app, self._scope, self._receive, self._send = app, scope, receive, send
        self._headers = joined(scope["headers"])
        self._path: str = scope["path"]
        self._anthropic = self._path.endswith(("/v1/messages", "/v1/messages/count_tokens"))
        self._started = False
        self._written: Any = None  # the stream of the response
        self._body_read = False
        self._answering = False
        self._gone = False  # the client disconnected

    async def run(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self._serve(task)
        except TimeoutError as error:  # includes DeadlinePassed of the gateway
            late = DeadlinePassed(f"the request took longer than {TURN_SECONDS:g} s; sample fewer tokens")
            await self._fail(error if isinstance(error, DeadlinePassed) else late)
        except FourfoldError as error:
            await self._fail(error)
        except UnicodeEncodeError:
            await self._fail(RequestError("a text has half of a surrogate pair; send valid Unicode"))
        except RecursionError:
            await self._fail(RequestError("the body nests too deeply; send flatter JSON"))
        except asyncio.CancelledError:
            task.uncancel()
            if not self._gone:  # the server stops
                await self._fail(Unavailable("the gateway is stopping; call another one, or try again"))

    async def _serve(self, task: asyncio.Task[Any]) -> None:
        self._check_origin()
        if self._path == "/health" and self._scope["method"] in ("GET", "HEAD"):  # health probes have no key
            return await self._reply(200, b'{"status":"ok"}')
        route, session_id = self._route()
        caller = self._app._api.check_key(self._key(), route.method)
        if caller.session_id and session_id and caller.session_id != session_id:
            raise PermissionDenied("the key belongs to another session than the one of the URL; use its own key")
        with self._app._api.admit(caller), self._spans(route):  # before the body: slow and large bodies count, too
            await self._serve_admitted(task, route, caller, session_id or caller.session_id)

    def _check_origin(self) -> None:
        """Refuse requests of web pages on ports without a token."""
        names = self._app._names
        if names is not None and (refused := refusal(self._scope["method"], self._headers, names)):
            raise RequestError(clean(refused[1], 300), status=refused[0])

    async def _serve_admitted(self, task: asyncio.Task[Any], route: _Route, caller: Caller, session_id: str) -> None:
        body = parse_json(await self._body(await self._app.max_body_bytes(caller))) if route.verb == "POST" else {}
        self._answering = self._body_read
        watcher = asyncio.ensure_future(self._receive())  # the body was read: returns at the disconnect
        watcher.add_done_callback(lambda _: self._disconnected(task))
        try:
            await self._answer(route, caller, session_id, body)
        finally:
            self._answering = False
            watcher.cancel()

    def _spans(self, route: _Route) -> Spans:
        """Begin the span of the request, if its client traces it."""
        traceparent = self._headers.get("traceparent", "")
        attributes = {"http.request.method": route.verb}
        return incoming(((TRACEPARENT, traceparent),), f"{route.verb} {route.method}", attributes)

    def _disconnected(self, task: asyncio.Task[Any]) -> None:
        if self._answering:
            self._gone = True
            task.cancel()

    def _route(self) -> tuple[_Route, str]:
        """Return the route and the session of the URL."""
        if match := _SESSION_PATH.fullmatch(self._path):
            route: _Route | None = _CLOSE_SESSION if match["close"] else _EXPORT
            session_id = match["id"]
        elif match := _PATH.fullmatch(self._path):
            session_id = match["prefix"] or ""
            route = _TURNS.get(match["rest"]) or (None if session_id else _CALLS.get(match["rest"]))
        else:
            route, session_id = None, ""
        if route is None:
            raise RequestError(f"the gateway has no path {clean(self._path, 200)}; see docs/agents.md", status=404)
        verb = self._scope["method"]
        if verb != route.verb:
            raise RequestError(f"{clean(self._path, 200)} takes no {clean(verb, 20)}; send {route.verb}", status=405)
        return route, session_id

    def _key(self) -> str:
        """Return the bearer token, or the key in Anthropic's header."""
        value = self._headers.get("authorization", "")
        scheme, _, key = value.partition(" ")
        if scheme.lower() != "bearer":
            key = self._headers.get("x-api-key", "")
        return key.strip()

    async def _body(self, limit: int) -> bytes:
        """Return the body, of at most `limit` bytes.

        Raises:
            RequestError: it is not JSON by its type, too large, too slow, or has no length.
        """
        # A browser lets a page of another site send a body of any other type, or of none, without a preflight request.
        kind = self._headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestError(f"content-type is {clean(kind, 60)!r}; send application/json", status=415)
        if "transfer-encoding" in self._headers:  # a body of tiny chunks would block the event loop
            raise RequestError("the body has no length; send content-length, and no chunks", status=411)
        if self._headers.get("content-encoding", "identity").lower() != "identity":
            raise RequestError("the body is compressed; send plain JSON", status=415)
        length = int(self._headers.get("content-length", "0"))
        if length > limit and (length > _DRAIN_FACTOR * limit or "expect" in self._headers):
            raise _too_large(length, limit)
        try:
            async with asyncio.timeout(self._app._body_seconds):
                body = await self._read(limit)
        except TimeoutError:
            seconds = self._app._body_seconds
            raise RequestError(f"the body did not arrive within {seconds:g} s; send it faster", status=408) from None
        if length > limit:
            raise _too_large(length, limit)
        self._body_read = True
        return body

    async def _read(self, limit: int) -> bytes:
        """Read the body to its end, and keep at most `limit` bytes."""
        kept, size, more = list[bytes](), 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._gone = True
                raise asyncio.CancelledError
            piece: bytes = message.get("body", b"")
            size += len(piece)
            if size <= limit:
                kept.append(piece)
            more = message.get("more_body", False)
        return b"".join(kept)

    async def _answer(self, route: _Route, caller: Caller, session_id: str, body: dict[str, Any]) -> None:
        app = self._app
        if route.call is not None:
            await self._reply(200, encode(await route.call(app._api, caller, body, session_id)))
            return
        if route.turns is not None:
            request_id = self._headers.get("idempotency-key", "")
            fields, variables = Fields(body), "chat_template_kwargs"
            options: TurnOptions = route.turns.parse(fields, session_id, request_id)
            if fields.table(variables) is not None and not app._api.is_neutral(fields.raw(variables)):
                fields.refuse(variables, "would change what the run's chat template writes; leave it out")
            info = await app.info(caller)
            turn = HttpTurn(app._api, caller, options, info.model)
            if options.stream:
                live = not info.separates_reasoning and not options.request.chat.tools
                await self._stream(route.turns.Stream(turn, app._texts, live=live))
            else:
                response: bytes | dict[str, Any] = await route.turns.respond(turn, app._texts)
                await self._reply(200, response if isinstance(response, bytes) else encode(response))
        elif route.method == "GetInfo":
            model = {"id": (await app.info(caller)).model, "object": "model", "created": 0, "owned_by": "fourfold"}
            # The last three names are Anthropic's; the SDKs of OpenAI and Anthropic read these headers.
            model |= {"type": "model", "display_name": model["id"], "created_at": "1970-01-01T00:00:00Z"}
            await self._reply(200, encode({"object": "list", "data": [model], "has_more": False}))
        else:
            await self._reply(200, encode(await _count_tokens(app._api, caller, body)))

    async def _stream(self, stream: Any) -> None:
        """Send server-sent events; the response starts with the first, so that errors before it have their status."""
        self._written, events = stream, stream.events()
        clock = asyncio.get_running_loop().time
        sent = clock()
        try:
            async for event in events:
                if not self._started:
                    await self._start(200, _SSE)
                elif not event and clock() - sent > _PING_SECONDS:
                    event = b": ping\n\n"
                if event:
                    sent = clock()
                    await self._send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            await events.aclose()
        await self._send({"type": "http.response.body", "body": b""})

    async def _fail(self, error: FourfoldError) -> None:
        """Send an error as a response, or as the last event of a stream."""
        body = error_body(error, "anthropic" if self._anthropic else "openai")
        if not self._started:
            headers = error_headers(error)
            if not self._body_read and self._scope["method"] == "POST":
                headers.append(_CLOSE)  # the rest of the body is not read
            await self._reply(status_of(error), encode(body), headers)
            return
        if self._path.endswith("/v1/responses"):
            number = 0 if self._written is None else self._written.next_number
            body = {**body["error"], "type": "error", "sequence_number": number}
        name = b"event: error\n" if "type" in body else b""
        event = name + b"data: " + encode(body) + b"\n\n"
        with suppress(TimeoutError):  # the client does not read
            async with asyncio.timeout(self._app._body_seconds):
                await self._send({"type": "http.response.body", "body": event})

    async def _reply(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        await self._start(status, [_JSON, (b"content-length", b"%d" % len(body)), *(headers or ())])
        await self._send({"type": "http.response.body", "body": body})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


def _too_large(length: int, limit: int) -> RequestError:
    return RequestError(
        f"the body has {length} bytes; for this model at most {limit} are allowed: shorten the prompt", status=413
    )


async def _count_tokens(api: AgentApi, caller: Caller, body: dict[str, Any]) -> dict[str, Any]:
    request = pb.GenerateRequest()
    messages.set_prompt(request, Fields(body))
    response = await api.apply_chat_template(caller, pb.ApplyChatTemplateRequest(chat=request.chat))
    return {"input_tokens": len(response.token_ids)}
