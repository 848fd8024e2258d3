"""`/v1/messages`: Anthropic's format."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold_gateway.http import sampling
from fourfold_gateway.http.errors import RequestError, encode
from fourfold_gateway.http.fields import Fields, Refusal
from fourfold_gateway.http.turns import Answer, HttpTurn, TokenTexts, TurnOptions, parse_arguments

USED: Final = sampling.EXTENSIONS | {
    "messages", "model", "stream", "system", "tools", "tool_choice", "stop_sequences", "max_tokens", "temperature",
    "top_p", "seed", "output_config",
}  # fmt: skip
IGNORED: Final = sampling.IGNORED | {"thinking", "cache_control", "inference_geo"}
REFUSED: Final = sampling.REFUSED | {
    "mcp_servers": Refusal("the gateway does not call; give the model function tools", ([],)),
    "container": Refusal("the gateway does not have; leave it out"),
    "context_management": Refusal("the gateway does not do; edit the messages yourself", ({}, {"edits": []})),
}
FINISH: Final[Mapping[int, str]] = {
    pb.FINISH_REASON_STOP: "end_turn",
    pb.FINISH_REASON_LENGTH: "max_tokens",
    pb.FINISH_REASON_TOOL_CALLS: "tool_use",
}
_CHOICES: Final = {"auto": "auto", "none": "none", "any": "required", "tool": "function"}
_TEXT: Final = frozenset({"text"})


def parse(fields: Fields, session_id: str, request_id: str) -> TurnOptions:
    """Return the turn that a request asks for; raise RequestError for a wrong parameter."""
    if fields.has("thread"):
        # The SDK's tool runner asks for this first; after an error with these details it asks again without it.
        raise RequestError(
            "thread is not supported: the gateway keeps no conversation for it; leave it out and send all messages",
            param="thread",
            details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
        )
    fields.check_known(USED, IGNORED, REFUSED)
    request = sampling.new_request(fields, session_id, request_id)
    if not fields.has("max_tokens"):
        fields.refuse("max_tokens", "is missing; send the largest number of tokens to sample")
    sampling.set_max_tokens(request, fields, "max_tokens")
    sampling.set_stop(request, fields, "stop_sequences")
    sampling.set_seed(request, fields)
    set_prompt(request, fields)
    choice = fields.table("tool_choice")
    if choice is not None:
        kind = _CHOICES.get(choice.text("type"), "")
        if not kind:
            choice.refuse("type", 'is unknown; send "auto", "any", "tool" or "none"')
        sampling.set_tool_choice(request, fields, kind, choice.text("name") if kind == "function" else "")
    output = fields.table("output_config")
    form = None if output is None else output.table("format")
    if form is not None:
        if form.text("type") != "json_schema":
            form.refuse("type", 'is not supported; send "json_schema"')
        sampling.set_json_format(request, form, "schema", form.raw("schema"))
    return TurnOptions(
        request=request,
        stream=fields.flag("stream"),
        single_call=choice is not None and choice.flag("disable_parallel_tool_use"),
        token_ids=fields.flag("return_token_ids"),
    )


def set_prompt(request: pb.GenerateRequest, fields: Fields) -> None:
    """Set the conversation from system, messages and tools."""
    chat = request.chat
    if system := sampling.join_texts(fields, "system", _TEXT):
        chat.messages.add(role="system", content=system)
    messages = fields.tables("messages")
    if not messages:
        fields.refuse("messages", "has no message; send at least one")
    for message in messages:
        role = message.text("role")
        if role not in ("user", "assistant", "system"):
            message.refuse("role", 'is unknown; send "user" or "assistant"')
        if not isinstance(message.raw("content"), list):
            chat.messages.add(role=role, content=message.text("content"))
        elif role == "assistant":
            _add_assistant(chat, message)
        else:
            _add_user(chat, message, role)
    for tool in fields.tables("tools"):
        if tool.text("type", "custom") != "custom":
            tool.refuse("type", "is a tool of Anthropic's servers; send tools with name and input_schema")
        sampling.add_tool(chat, tool, "input_schema")


def _add_assistant(chat: pb.Chat, fields: Fields) -> None:
    message = chat.messages.add(role="assistant")
    texts, reasoning = [], []
    for block in fields.tables("content"):
        kind = block.text("type")
        if kind == "text":
            texts.append(block.text("text"))
        elif kind == "thinking":
            reasoning.append(block.text("thinking"))
        elif kind == "tool_use":
            table = block.table("input") or Fields(None, block.path("input"))
            message.tool_calls.add(
                id=block.text("id"),
                name=block.text("name"),
                arguments_json=table.text("_raw") if table.has("_raw") else sampling.dump(block.raw("input")),
            )
        else:
            block.refuse("type", "is not supported; send text, thinking and tool_use")
    message.content, message.reasoning = "\n".join(texts), "\n".join(reasoning)


def _add_user(chat: pb.Chat, fields: Fields, role: str) -> None:
    """Append a message for each tool result, and one for the texts after them."""
    texts = []
    for block in fields.tables("content"):
        kind = block.text("type")
        if kind == "text":
            texts.append(block.text("text"))
        elif kind == "tool_result":
            call = block.text("tool_use_id")
            chat.messages.add(role="tool", tool_call_id=call, content=sampling.join_texts(block, "content", _TEXT))
        else:
            block.refuse("type", "is not supported: the model reads text only; send text and tool_result")
    if texts:
        chat.messages.add(role=role, content="\n".join(texts))


async def respond(turn: HttpTurn, texts: TokenTexts) -> dict[str, Any]:
    """Run the turn, and return the response."""
    await turn.finish()
    sample = turn.samples[0]
    response = _message(turn, _blocks(sample), FINISH.get(sample.finish, "end_turn"), len(sample.ids))
    if turn.options.token_ids:
        response["fourfold"] = sample.extension()
    return response


def _message(turn: HttpTurn, blocks: list[dict[str, Any]], reason: str | None, tokens: int) -> dict[str, Any]:
    return {
        "id": f"msg_{turn.id}",
        "type": "message",
        "role": "assistant",
        "model": turn.model,
        "content": blocks,
        "stop_reason": reason,
        "stop_sequence": None,
        "usage": {"input_tokens": turn.prompt_tokens, "output_tokens": tokens},
    }


def _blocks(sample: Answer) -> list[dict[str, Any]]:
    message = sample.message
    blocks: list[dict[str, Any]] = []
    if message is not None and message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    calls = message.tool_calls if message is not None else ()
    if sample.content or not calls:
        blocks.append({"type": "text", "text": sample.content})
    for call in calls:
        arguments = parse_arguments(call.arguments_json)
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return blocks


class Stream:
    """Writes the chunks of a turn as server-sent events of Anthropic's format."""

    def __init__(self, turn: HttpTurn, texts: TokenTexts, *, live: bool) -> None:
        """Make a stream. `live`: send text as it comes; otherwise the message, when it is complete."""
        self._turn, self._live = turn, live

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield events; the turn is aborted when the iterator is closed."""
        sample = self._turn.samples[0]
        chunks = self._turn.chunks()
        begun = False
        try:
            async for _, chunk in chunks:
                out = b""
                if not begun:
                    out = event({"type": "message_start", "message": _message(self._turn, [], None, 0)})
                    if self._live:
                        out += _start(0, {"type": "text", "text": ""})
                    begun = True
                if self._live and chunk.text:
                    out += _delta(0, {"type": "text_delta", "text": chunk.text})
                if sample.finish:
                    out += self._end(sample)
                yield out
        finally:
            await chunks.aclose()

    def _end(self, sample: Answer) -> bytes:
        if self._live:
            out = event({"type": "content_block_stop", "index": 0})
        else:
            out = b"".join(_whole(index, block) for index, block in enumerate(_blocks(sample)))
        usage = {"input_tokens": self._turn.prompt_tokens, "output_tokens": len(sample.ids)}
        end: dict[str, Any] = {
            "type": "message_delta",
            "delta": {"stop_reason": FINISH.get(sample.finish, "end_turn"), "stop_sequence": None},
            "usage": usage,
        }
        if self._turn.options.token_ids:
            end["fourfold"] = sample.extension()
        return out + event(end) + event({"type": "message_stop"})


def event(value: dict[str, Any]) -> bytes:
    """Return a server-sent event with the name of its type."""
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), encode(value))


def _start(index: int, block: dict[str, Any]) -> bytes:
    return event({"type": "content_block_start", "index": index, "content_block": block})


def _delta(index: int, delta: dict[str, Any]) -> bytes:
    return event({"type": "content_block_delta", "index": index, "delta": delta})


def _whole(index: int, block: dict[str, Any]) -> bytes:
    """Return the events of a complete block."""
    if block["type"] == "text":
        empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
    elif block["type"] == "thinking":
        empty, delta = {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
    else:
        empty, delta = (
            {**block, "input": {}},
            {"type": "input_json_delta", "partial_json": sampling.dump(block["input"])},
        )
    return _start(index, empty) + _delta(index, delta) + event({"type": "content_block_stop", "index": index})
