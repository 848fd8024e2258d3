"""`/v1/responses`: OpenAI's format of items. The gateway keeps no responses: each request has the whole input."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any, Final

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold_gateway.http import sampling
from fourfold_gateway.http.errors import encode
from fourfold_gateway.http.fields import Fields, Refusal
from fourfold_gateway.http.turns import Answer, HttpTurn, TokenTexts, TurnOptions, finite

USED: Final = sampling.EXTENSIONS | {
    "input", "model", "stream", "instructions", "tools", "tool_choice", "max_output_tokens", "temperature", "top_p",
    "text", "include", "seed", "parallel_tool_calls",
}  # fmt: skip
IGNORED: Final = sampling.IGNORED | {"reasoning", "stream_options"}
_STATELESS: Final = "the gateway does not keep; send the whole conversation as input"
REFUSED: Final = sampling.REFUSED | {
    "previous_response_id": Refusal(_STATELESS),
    "conversation": Refusal(_STATELESS),
    "background": Refusal("the gateway does not do; leave it out and use stream", (False,)),
    "prompt": Refusal("the gateway does not store; send instructions and input"),
    "top_logprobs": Refusal("the engine cannot return: it gives the sampled token's only; leave it out", (0,)),
    "truncation": Refusal("the gateway does not do; shorten the input yourself", ("disabled",)),
    "max_tool_calls": Refusal("is for tools of OpenAI's servers; leave it out"),
    "context_management": Refusal("the gateway does not do; shorten the input yourself", ([],)),
}
_LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDES: Final = frozenset({_LOGPROBS, "reasoning.encrypted_content"})
_TEXTS: Final = frozenset({"input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"})


def parse(fields: Fields, session_id: str, request_id: str) -> TurnOptions:
    """Return the turn that a request asks for; raise RequestError for a wrong parameter."""
    fields.check_known(USED, IGNORED, REFUSED)
    request = sampling.new_request(fields, session_id, request_id)
    sampling.set_max_tokens(request, fields, "max_output_tokens")
    sampling.set_seed(request, fields)
    if instructions := fields.text("instructions", ""):
        request.chat.messages.add(role="system", content=instructions)
    if isinstance(fields.raw("input"), str):
        request.chat.messages.add(role="user", content=fields.text("input"))
    else:
        items = fields.tables("input")
        if not items:
            fields.refuse("input", "is empty; send a text or items")
        for item in items:
            _add_item(request.chat, item)
    for tool in fields.tables("tools"):
        if tool.text("type") != "function":
            tool.refuse("type", "is a tool of OpenAI's servers; send tools of the type function")
        sampling.add_tool(request.chat, tool, "parameters")
    sampling.choose_tool(request, fields, nested=False)
    form = text.table("format") if (text := fields.table("text")) is not None else None
    if form is not None and (kind := form.text("type")) != "text":
        if kind not in ("json_object", "json_schema"):
            form.refuse("type", 'is not supported; send "text", "json_object" or "json_schema"')
        sampling.set_json_format(
            request, form, "schema", {"type": "object"} if kind == "json_object" else form.raw("schema")
        )
    include = fields.texts("include")
    if unknown := [name for name in include if name not in _INCLUDES]:
        fields.refuse("include", f"has {unknown[0][:60]!r}, which the gateway does not have; it has {_LOGPROBS}")
    return TurnOptions(
        request=request,
        stream=fields.flag("stream"),
        logprobs=_LOGPROBS in include,
        single_call=sampling.refuses_parallel_calls(fields),
        token_ids=fields.flag("return_token_ids"),
    )


def _add_item(chat: pb.Chat, item: Fields) -> None:
    kind = item.text("type", "message")
    if kind == "function_call_output":
        output = sampling.join_texts(item, "output", _TEXTS)
        chat.messages.add(role="tool", tool_call_id=item.text("call_id"), content=output)
    elif kind == "function_call":
        _assistant(chat, "call").tool_calls.add(
            id=item.text("call_id"), name=item.text("name"), arguments_json=item.text("arguments", "")
        )
    elif kind == "reasoning":
        name = "content" if item.items("content") else "summary"
        _assistant(chat, "reasoning").reasoning = sampling.join_texts(item, name, _TEXTS)
    elif kind == "message":
        role = item.text("role")
        content = sampling.join_texts(item, "content", _TEXTS)
        if role == "assistant":
            _assistant(chat, "content").content = content
        else:
            chat.messages.add(role="system" if role == "developer" else role, content=content)
    else:
        item.refuse("type", "is not supported; send message, reasoning, function_call and function_call_output")


def _assistant(chat: pb.Chat, part: str) -> pb.Message:
    """Return the message that an item belongs to: its parts are reasoning, content and calls, in this order."""
    last = chat.messages[-1] if chat.messages else None
    if last is not None and last.role == "assistant":
        fits = part == "call" or (part == "content" and not last.tool_calls and not last.content)
        if fits:
            return last
    return chat.messages.add(role="assistant")


async def respond(turn: HttpTurn, texts: TokenTexts) -> dict[str, Any]:
    """Run the turn, and return the response."""
    await turn.finish()
    return _response(turn, await _items(turn, texts))


def _response(turn: HttpTurn, output: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Return the response object; `output` is None before the end."""
    sample, chat = turn.samples[0], turn.options.request.chat
    cut = sample.finish == pb.FINISH_REASON_LENGTH
    response: dict[str, Any] = {
        "id": f"resp_{turn.id}",
        "object": "response",
        "created_at": turn.created,
        "status": "in_progress" if output is None else "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": None,
        "metadata": {},
        "model": turn.model,
        "output": output or [],
        "parallel_tool_calls": not turn.options.single_call,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": [{"type": "function", "name": tool.name, "parameters": None, "strict": False} for tool in chat.tools],
        "usage": None,
    }
    if output is not None:
        response["usage"] = {
            "input_tokens": turn.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": turn.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": turn.prompt_tokens + turn.completion_tokens,
        }
        if turn.options.token_ids:
            response["fourfold"] = sample.extension()
    return response


async def _items(turn: HttpTurn, texts: TokenTexts) -> list[dict[str, Any]]:
    sample = turn.samples[0]
    message, items = sample.message, list[dict[str, Any]]()
    status = "incomplete" if sample.finish == pb.FINISH_REASON_LENGTH else "completed"
    if message is not None and message.reasoning:
        content = [{"type": "reasoning_text", "text": message.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{turn.id}", "summary": [], "content": content})
    calls = message.tool_calls if message is not None else ()
    if sample.content or not calls:
        part = _part(sample.content, await _logprobs(turn, sample, texts))
        items.append(_message_item(turn, status, [part]))
    for index, call in enumerate(calls):
        items.append({
            "type": "function_call", "id": f"fc_{turn.id}_{index}", "call_id": call.id, "name": call.name,
            "arguments": call.arguments_json, "status": status,
        })  # fmt: skip
    return items


async def _logprobs(turn: HttpTurn, sample: Answer, texts: TokenTexts) -> list[dict[str, Any]]:
    if not turn.options.logprobs:
        return []
    tokens = await texts.json_of(turn.caller, sample.ids)
    return [
        {**json.loads(f"{{{token}}}"), "logprob": finite(value), "top_logprobs": []}
        for token, value in zip(tokens, sample.logprobs, strict=True)
    ]


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _message_item(turn: HttpTurn, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "message", "id": f"msg_{turn.id}", "role": "assistant", "status": status, "content": content}


class Stream:
    """Writes the chunks of a turn as server-sent events with sequence numbers."""

    def __init__(self, turn: HttpTurn, texts: TokenTexts, *, live: bool) -> None:
        """Make a stream. `live`: send text as it comes; otherwise the items, when they are complete."""
        self._turn, self._texts, self._live = turn, texts, live
        self.next_number = 0
        """Sequence number of the next event."""

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield events; the turn is aborted when the iterator is closed."""
        sample = self._turn.samples[0]
        chunks = self._turn.chunks()
        begun = False
        try:
            async for _, chunk in chunks:
                out = b""
                if not begun:
                    for name in ("response.created", "response.in_progress"):
                        out += self._event(name, response=_response(self._turn, None))
                    if self._live:
                        out += self._open_text(0)
                    begun = True
                if self._live and chunk.text:
                    out += self._text(0, chunk.text)
                if sample.finish:
                    out += self._end(await _items(self._turn, self._texts))
                yield out
        finally:
            await chunks.aclose()

    def _end(self, items: list[dict[str, Any]]) -> bytes:
        out = b""
        for index, item in enumerate(items):
            if item["type"] == "message":
                if not self._live:
                    out += self._open_text(index) + self._text(index, item["content"][0]["text"])
                out += self._close_text(index, item)
            else:
                shell = {**item, "arguments": ""} if item["type"] == "function_call" else {**item, "content": []}
                out += self._event("response.output_item.added", output_index=index, item=shell)
                out += self._whole(index, item)
            out += self._event("response.output_item.done", output_index=index, item=item)
        response = _response(self._turn, items)
        return out + self._event(f"response.{response['status']}", response=response)

    def _whole(self, index: int, item: dict[str, Any]) -> bytes:
        """Return the events of the content of a call or of reasoning."""
        place = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            text, name = item["arguments"], item["name"]
            out = self._event("response.function_call_arguments.delta", **place, delta=text)
            return out + self._event("response.function_call_arguments.done", **place, name=name, arguments=text)
        text = item["content"][0]["text"]
        out = self._event("response.reasoning_text.delta", **place, content_index=0, delta=text)
        return out + self._event("response.reasoning_text.done", **place, content_index=0, text=text)

    def _place(self, index: int) -> dict[str, Any]:
        return {"item_id": f"msg_{self._turn.id}", "output_index": index, "content_index": 0}

    def _open_text(self, index: int) -> bytes:
        item = _message_item(self._turn, "in_progress", [])
        out = self._event("response.output_item.added", output_index=index, item=item)
        return out + self._event("response.content_part.added", **self._place(index), part=_part("", []))

    def _text(self, index: int, text: str) -> bytes:
        return self._event("response.output_text.delta", **self._place(index), delta=text, logprobs=[])

    def _close_text(self, index: int, item: dict[str, Any]) -> bytes:
        part = item["content"][0]
        place = self._place(index)
        out = self._event("response.output_text.done", **place, text=part["text"], logprobs=part["logprobs"])
        return out + self._event("response.content_part.done", **place, part=part)

    def _event(self, name: str, /, **values: Any) -> bytes:
        body = encode({"type": name, **values, "sequence_number": self.next_number})
        self.next_number += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), body)
