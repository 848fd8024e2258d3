"""`/v1/completions`: OpenAI's text format, for prompts without a chat template."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from json.encoder import encode_basestring
from typing import Any, Final

from fourfold.bounds import MAX_SAMPLES_PER_CALL
from fourfold_gateway.http import sampling
from fourfold_gateway.http.chat import DONE, FINISH
from fourfold_gateway.http.errors import encode
from fourfold_gateway.http.fields import Fields, Refusal
from fourfold_gateway.http.turns import Answer, HttpTurn, TokenTexts, TurnOptions, finite

USED: Final = sampling.EXTENSIONS | {
    "prompt", "model", "stream", "stream_options", "n", "stop", "logprobs", "seed", "max_tokens", "temperature",
    "top_p",
}  # fmt: skip
IGNORED: Final = sampling.IGNORED
REFUSED: Final = sampling.REFUSED | {
    "echo": Refusal("the engine does not do; join prompt and text yourself", (False,)),
    "suffix": Refusal("the model cannot use; leave it out", ("",)),
    "response_format": Refusal("only the chat formats have; send messages", ({"type": "text"},)),
    "add_special_tokens": Refusal("the engine does not do; send token ids", (True,)),
}
_DEFAULT_TOKENS: Final = 16  # OpenAI's default of max_tokens


def parse(fields: Fields, session_id: str, request_id: str) -> TurnOptions:
    """Return the turn that a request asks for; raise RequestError for a wrong parameter."""
    fields.check_known(USED, IGNORED, REFUSED)
    request = sampling.new_request(fields, session_id, request_id)
    request.sample_count = fields.integer("n", 1, MAX_SAMPLES_PER_CALL) or 1
    request.sampling_params.max_tokens = _DEFAULT_TOKENS
    sampling.set_max_tokens(request, fields, "max_tokens")
    sampling.set_stop(request, fields, "stop")
    sampling.set_seed(request, fields)
    prompt = fields.raw("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, list) and prompt and not isinstance(prompt[0], str | list):
        request.token_ids.ids.extend([sampling.token_id(fields, "prompt", value) for value in prompt])
    else:
        fields.refuse("prompt", "must be one text or one list of token ids; send a request for each prompt")
    count = fields.integer("logprobs", 0, 1 << 20)
    if count:
        fields.refuse("logprobs", f"is {count}: the engine gives the sampled token's only; send 0")
    stream_options = fields.table("stream_options")
    return TurnOptions(
        request=request,
        stream=fields.flag("stream"),
        include_usage=stream_options is not None and stream_options.flag("include_usage"),
        logprobs=count is not None,
        token_ids=fields.flag("return_token_ids"),
    )


async def respond(turn: HttpTurn, texts: TokenTexts) -> dict[str, Any]:
    """Run the turn, and return the response."""
    await turn.finish()
    choices = []
    for sample in turn.samples:
        choice: dict[str, Any] = {
            "index": sample.index,
            "text": sample.text,
            "logprobs": await _logprobs(turn, texts, sample),
            "finish_reason": FINISH.get(sample.finish, "stop"),
        }
        if turn.options.token_ids:
            choice["fourfold"] = sample.extension()
        choices.append(choice)
    return {
        "id": f"cmpl-{turn.id}",
        "object": "text_completion",
        "created": turn.created,
        "model": turn.model,
        "choices": choices,
        "usage": turn.usage(),
    }


async def _logprobs(turn: HttpTurn, texts: TokenTexts, sample: Answer, begin: int = 0) -> dict[str, Any] | None:
    if not turn.options.logprobs:
        return None
    words = await texts.of(turn.caller, sample.ids)
    offsets = [0]
    for word in words:
        offsets.append(offsets[-1] + len(word))
    return {
        "tokens": words[begin:],
        "token_logprobs": [finite(value) for value in sample.logprobs[begin:]],
        "top_logprobs": None,
        "text_offset": offsets[begin:-1],
    }


class Stream:
    """Writes the chunks of a turn as server-sent events."""

    def __init__(self, turn: HttpTurn, texts: TokenTexts, *, live: bool) -> None:
        """Make a stream. Text is always sent as it comes: a completion has no message."""
        self._turn, self._texts = turn, texts
        head = encode({
            "id": f"cmpl-{turn.id}", "object": "text_completion", "created": turn.created, "model": turn.model
        })  # fmt: skip
        self._head = b"data: " + head[:-1]
        self._sent = [0] * len(turn.samples)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield events; the turn is aborted when the iterator is closed."""
        chunks = self._turn.chunks()
        try:
            async for sample, chunk in chunks:
                begin, self._sent[sample.index] = self._sent[sample.index], len(sample.ids)
                logprobs = encode(await _logprobs(self._turn, self._texts, sample, begin))
                finish = b"null" if not sample.finish else b'"%s"' % FINISH.get(sample.finish, "stop").encode()
                extension = b""
                if sample.finish and self._turn.options.token_ids:
                    extension = b',"fourfold":' + encode(sample.extension())
                yield b'%b,"choices":[{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}]}\n\n' % (
                    self._head, sample.index, encode_basestring(chunk.text).encode(), logprobs, finish, extension,
                )  # fmt: skip
        finally:
            await chunks.aclose()
        if self._turn.options.include_usage:
            yield self._head + b',"choices":[],"usage":' + encode(self._turn.usage()) + b"}\n\n"
        yield DONE
