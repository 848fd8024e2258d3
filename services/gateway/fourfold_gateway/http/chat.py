"""`/v1/chat/completions`: OpenAI's chat format."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from json.encoder import encode_basestring
from typing import Any, Final

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.bounds import MAX_SAMPLES_PER_CALL
from fourfold_gateway.http import sampling
from fourfold_gateway.http.errors import encode
from fourfold_gateway.http.fields import Fields, Refusal
from fourfold_gateway.http.turns import Answer, HttpTurn, TokenTexts, TurnOptions, finite

USED: Final = sampling.EXTENSIONS | {
    "messages", "model", "stream", "stream_options", "tools", "tool_choice", "response_format", "n", "stop",
    "logprobs", "seed", "max_tokens", "max_completion_tokens", "temperature", "top_p", "parallel_tool_calls",
    "chat_template_kwargs",
}  # fmt: skip
IGNORED: Final = sampling.IGNORED | {"reasoning_effort", "verbosity", "reasoning", "thinking"}
REFUSED: Final = sampling.REFUSED | {
    "top_logprobs": Refusal("the engine cannot return: it gives the sampled token's only; send logprobs alone", (0,)),
    "add_special_tokens": Refusal("the chat template decides; leave it out", (False,)),
    "modalities": Refusal('the model cannot produce; leave it out or send ["text"]', (["text"],)),
    "functions": Refusal("is the old form of tools; send tools", ([],)),
    "function_call": Refusal("is the old form of tool_choice; send tool_choice", ("none", "auto")),
    "audio": Refusal("the model cannot produce; leave it out"),
    "prediction": Refusal("the engine does not use; leave it out"),
    "web_search_options": Refusal("the gateway does not have; send a function tool"),
    "moderation": Refusal("the gateway does not have; leave it out"),
}
FINISH: Final[Mapping[int, str]] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
DONE: Final = b"data: [DONE]\n\n"
_TEXT_PARTS: Final = frozenset({"text", "refusal"})


def parse(fields: Fields, session_id: str, request_id: str) -> TurnOptions:
    """Return the turn that a request asks for; raise RequestError for a wrong parameter."""
    fields.check_known(USED, IGNORED, REFUSED)
    request = sampling.new_request(fields, session_id, request_id)
    request.sample_count = fields.integer("n", 1, MAX_SAMPLES_PER_CALL) or 1
    sampling.set_max_tokens(request, fields, "max_completion_tokens", "max_tokens")
    sampling.set_stop(request, fields, "stop")
    sampling.set_seed(request, fields)
    messages = fields.tables("messages")
    if not messages:
        fields.refuse("messages", "has no message; send at least one")
    for message in messages:
        _add_message(request.chat, message)
    for tool in fields.tables("tools"):
        if tool.text("type") != "function":
            tool.refuse("type", "is not supported; send tools of the type function")
        sampling.add_tool(request.chat, tool.table("function") or Fields(None, tool.path("function")), "parameters")
    sampling.choose_tool(request, fields, nested=True)
    _constrain(request, fields)
    stream_options = fields.table("stream_options")
    return TurnOptions(
        request=request,
        stream=fields.flag("stream"),
        include_usage=stream_options is not None and stream_options.flag("include_usage"),
        logprobs=fields.flag("logprobs"),
        single_call=sampling.refuses_parallel_calls(fields),
        token_ids=fields.flag("return_token_ids"),
    )


def _add_message(chat: pb.Chat, fields: Fields) -> None:
    role = fields.text("role")
    message = chat.messages.add(
        role="system" if role == "developer" else role,
        content=sampling.join_texts(fields, "content", _TEXT_PARTS),
        name=fields.text("name", ""),
        tool_call_id=fields.text("tool_call_id", ""),
        reasoning=fields.text("reasoning_content", "") or fields.text("reasoning", ""),
    )
    for call in fields.tables("tool_calls"):
        function = call.table("function") or Fields(None, call.path("function"))
        message.tool_calls.add(
            id=call.text("id"), name=function.text("name"), arguments_json=function.text("arguments", "")
        )


def _constrain(request: pb.GenerateRequest, fields: Fields) -> None:
    form = fields.table("response_format")
    kind = "text" if form is None else form.text("type")
    if form is None or kind == "text":
        return
    if kind == "json_object":
        sampling.set_json_format(request, fields, "response_format", {"type": "object"})
    elif kind == "json_schema":
        schema = form.table("json_schema") or Fields(None, "response_format.json_schema")
        sampling.set_json_format(request, schema, "schema", schema.raw("schema"))
    else:
        form.refuse("type", 'is not supported; send "text", "json_object" or "json_schema"')


async def respond(turn: HttpTurn, texts: TokenTexts) -> bytes:
    """Run the turn, and return the response."""
    await turn.finish()
    choices = [await _choice(turn, sample, texts) for sample in turn.samples]
    rest = {
        "id": f"chatcmpl-{turn.id}",
        "object": "chat.completion",
        "created": turn.created,
        "model": turn.model,
        "usage": turn.usage(),
    }
    return b'%b,"choices":[%b]}' % (encode(rest)[:-1], b",".join(choices))


async def _choice(turn: HttpTurn, sample: Answer, texts: TokenTexts) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": sample.content, "refusal": None}
    calls = sample.message.tool_calls if sample.message is not None else ()
    if sample.message is not None and sample.message.reasoning:
        message["reasoning_content"] = sample.message.reasoning
    if calls:
        message["content"] = sample.content or None
        message["tool_calls"] = [_call(call) for call in calls]
    choice: dict[str, Any] = {
        "index": sample.index,
        "message": message,
        "finish_reason": FINISH.get(sample.finish, "stop"),
    }
    if turn.options.token_ids:
        choice["fourfold"] = sample.extension()
    logprobs = await _logprobs(turn, texts, sample.ids, sample.logprobs)
    return b'%b,"logprobs":%b}' % (encode(choice)[:-1], logprobs)


def _call(call: pb.ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}


async def _logprobs(turn: HttpTurn, texts: TokenTexts, ids: list[int], values: list[float]) -> bytes:
    if not turn.options.logprobs:
        return b"null"
    # `encode` would take 1.4 ms for 512 tokens; this takes a quarter of that.
    tokens = zip(await texts.json_of(turn.caller, ids), values, strict=True)
    content = ",".join([f'{{{text},"top_logprobs":[],"logprob":{finite(value)!r}}}' for text, value in tokens])
    return f'{{"content":[{content}],"refusal":null}}'.encode()


class Stream:
    """Writes the chunks of a turn as server-sent events. The parts that never change are encoded once."""

    def __init__(self, turn: HttpTurn, texts: TokenTexts, *, live: bool) -> None:
        """Make a stream. `live`: send text as it comes; otherwise the message, when it is complete."""
        self._turn, self._texts, self._live = turn, texts, live
        head = encode({
            "id": f"chatcmpl-{turn.id}", "object": "chat.completion.chunk", "created": turn.created, "model": turn.model
        })  # fmt: skip
        self._head = b"data: " + head[:-1] + b',"choices":[{"index":'
        self._usage_head = b"data: " + head[:-1] + b',"choices":[],"usage":'
        self._sent = [0] * len(turn.samples)  # tokens whose log-probabilities were sent

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield events; the turn is aborted when the iterator is closed."""
        chunks = self._turn.chunks()
        try:
            started = set[int]()
            async for sample, chunk in chunks:
                out = b""
                if sample.index not in started:
                    started.add(sample.index)
                    out = self._delta(sample, b'{"role":"assistant","content":""}')
                if self._live and (chunk.text or (self._turn.options.logprobs and chunk.token_ids)):
                    delta = b'{"content":' + encode_basestring(chunk.text).encode() + b"}"
                    out += self._delta(sample, delta, await self._new_logprobs(sample))
                if sample.finish:
                    out += await self._end(sample)
                yield out
        finally:
            await chunks.aclose()
        if self._turn.options.include_usage:
            yield self._usage_head + encode(self._turn.usage()) + b"}\n\n"
        yield DONE

    async def _new_logprobs(self, sample: Answer) -> bytes:
        if not self._turn.options.logprobs:
            return b"null"
        begin, self._sent[sample.index] = self._sent[sample.index], len(sample.ids)
        return await _logprobs(self._turn, self._texts, sample.ids[begin:], sample.logprobs[begin:])

    async def _end(self, sample: Answer) -> bytes:
        out = b""
        message = sample.message
        if message is not None and message.reasoning:
            out += self._delta(sample, encode({"reasoning_content": message.reasoning}))
        if not self._live:
            out += self._delta(sample, encode({"content": sample.content}), await self._new_logprobs(sample))
        if message is not None and message.tool_calls:
            calls = [{"index": i, **_call(call)} for i, call in enumerate(message.tool_calls)]
            out += self._delta(sample, encode({"tool_calls": calls}))
        extension = b',"fourfold":' + encode(sample.extension()) if self._turn.options.token_ids else b""
        finish = b'"%s"' % FINISH.get(sample.finish, "stop").encode()
        return out + self._delta(sample, b"{}", finish=finish, extension=extension)

    def _delta(
        self, sample: Answer, delta: bytes, logprobs: bytes = b"null", finish: bytes = b"null", extension: bytes = b""
    ) -> bytes:
        parts = (self._head, b"%d" % sample.index, b',"delta":', delta, b',"logprobs":', logprobs)
        return b"".join((*parts, b',"finish_reason":', finish, extension, b"}]}\n\n"))
