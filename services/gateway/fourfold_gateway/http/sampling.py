"""Reads the parameters that several APIs share: sampling, tools, response formats, messages."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.bounds import MAX_STOP_CHARACTERS, MAX_STOPS
from fourfold_gateway.http.errors import RequestError
from fourfold_gateway.http.fields import Fields, Refusal

MAX_TOKENS: Final = 1 << 30
_TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")

IGNORED: Final = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "request_id", "cache_salt", "prompt_cache_options", "guided_decoding_backend", "rid", "provider", "usage", "speed",
})  # fmt: skip
"""Parameters of the clients of OpenAI, vLLM, SGLang and OpenRouter that change no answer."""
_FULL: Final = "would change the distribution: the trainer needs the full distribution of the policy; leave it out"
_SERVED: Final = "the gateway does not do; leave it out"
REFUSED: Final = {
    **{name: Refusal(_FULL, (0,)) for name in (
        "frequency_penalty", "presence_penalty", "min_p", "min_tokens", "min_new_tokens", "top_a",
    )},
    **{name: Refusal(_FULL, (1,)) for name in ("repetition_penalty", "repeat_penalty", "length_penalty", "typical_p")},
    **{name: Refusal(_FULL, (False,)) for name in ("ignore_eos", "use_beam_search", "early_stopping")},
    **{name: Refusal(_FULL, ([],)) for name in ("bad_words", "logits_processors")},
    "logit_bias": Refusal(_FULL, ({},)),
    **{name: Refusal(_SERVED, (0,)) for name in ("priority", "top_logprobs")},
    **{name: Refusal(_SERVED, (True,)) for name in (
        "skip_special_tokens", "spaces_between_special_tokens", "add_generation_prompt", "include_reasoning",
        "separate_reasoning", "stream_reasoning", "detokenize",
    )},
    **{name: Refusal(_SERVED, (False,)) for name in (
        "include_stop_str_in_output", "continue_final_message", "return_tokens_as_token_ids", "echo", "no_stop_trim",
        "return_hidden_states", "return_routed_experts", "return_cached_tokens_details",
    )},
    **{name: Refusal(_SERVED, ([], {})) for name in (
        "documents", "mm_processor_kwargs", "vllm_xargs", "kv_transfer_params", "structured_outputs",
    )},
    "truncate_prompt_tokens": Refusal(_SERVED, (-1,)),
    "n": Refusal("this format does not have; send a request for each answer", (1,)),
    "best_of": Refusal("would hide samples; send n, and choose yourself", (1,)),
}  # fmt: skip
"""Parameters of these clients that the gateway does not have, with the values that change nothing."""
EXTENSIONS: Final = frozenset({"top_k", "stop_token_ids", "min_policy_version", "return_token_ids"})
"""Parameters that the gateway adds to every API."""


def new_request(fields: Fields, session_id: str, request_id: str) -> pb.GenerateRequest:
    """Return a request with all parameters that every API has; its prompt is missing."""
    request = pb.GenerateRequest(session_id=session_id, request_id=request_id, sample_count=1)
    if request_id and not _REQUEST_ID.fullmatch(request_id):
        raise RequestError(
            "the header idempotency-key must have 1 to 128 characters of [A-Za-z0-9_-]; a random UUID is a good choice",
            param="idempotency-key",
        )
    params = request.sampling_params
    if (temperature := fields.number("temperature", 0.0, 2.0)) is not None:
        params.temperature = temperature
    if (top_p := fields.number("top_p", 0.0, 1.0)) is not None:
        params.top_p = top_p
    if (top_k := fields.integer("top_k", -1, MAX_TOKENS)) is not None and top_k > 0:
        params.top_k = top_k
    if (version := fields.integer("min_policy_version", 0, 1 << 53)) is not None:
        request.min_policy_version = version
    for token in fields.items("stop_token_ids"):
        params.stop_token_ids.append(token_id(fields, "stop_token_ids", token))
    return request


def token_id(fields: Fields, name: str, value: Any) -> int:
    """Return one token id of a list."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        fields.refuse(name, "has an element that is not a token id; send integers from 0 to 2^31 - 1")
    return value


def set_max_tokens(request: pb.GenerateRequest, fields: Fields, *names: str) -> None:
    """Set max_tokens from the first of `names` that the request has."""
    for name in names:
        if (count := fields.integer(name, 1, MAX_TOKENS)) is not None:
            request.sampling_params.max_tokens = count
            return


def set_stop(request: pb.GenerateRequest, fields: Fields, name: str) -> None:
    """Set the texts that end a turn."""
    stop = fields.texts(name)
    if len(stop) > MAX_STOPS or not all(0 < len(text) <= MAX_STOP_CHARACTERS for text in stop):
        fields.refuse(name, f"must have at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARACTERS} characters")
    request.sampling_params.stop.extend(stop)


def set_seed(request: pb.GenerateRequest, fields: Fields) -> None:
    """Set the seed. A negative one, which OpenAI allows, counts from 2^53."""
    if (seed := fields.integer("seed", -(1 << 63), (1 << 63) - 1)) is not None:
        request.sampling_params.seed = seed % (1 << 53)


def add_tool(chat: pb.Chat, fields: Fields, schema: str) -> None:
    """Append a tool whose arguments have the JSON Schema in the parameter `schema`."""
    name = fields.text("name")
    if not _TOOL_NAME.fullmatch(name):
        fields.refuse("name", "must have 1 to 64 characters of [A-Za-z0-9_-]")
    parameters = fields.table(schema)
    chat.tools.add(
        name=name,
        description=fields.text("description", ""),
        parameters_json="" if parameters is None else dump(fields.raw(schema)),
    )


def choose_tool(request: pb.GenerateRequest, fields: Fields, *, nested: bool) -> None:
    """Apply `tool_choice` of OpenAI's formats; `nested`: the name is a field of `function`."""
    choice = fields.raw("tool_choice")
    if choice is None:
        return
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            fields.refuse("tool_choice", 'is unknown; send "auto", "none", "required" or a function')
        set_tool_choice(request, fields, choice, "")
        return
    table = Fields(choice, "tool_choice")
    if table.text("type") != "function":
        name = '"function": {"name": ...}' if nested else '"name": ...'
        table.refuse("type", f'is not supported; send {{"type": "function", {name}}}')
    if nested:
        table = table.table("function") or Fields(None, "tool_choice.function")
    set_tool_choice(request, fields, "function", table.text("name"))


def set_tool_choice(request: pb.GenerateRequest, fields: Fields, kind: str, name: str) -> None:
    """Apply a choice of tools: "auto", "none", "required", or "function" with the name of one."""
    chat = request.chat
    if kind in ("required", "function") and not chat.tools:
        fields.refuse("tool_choice", "needs tools, and the request has none; send tools or leave tool_choice out")
    if kind == "function" and name not in {tool.name for tool in chat.tools}:
        fields.refuse("tool_choice", "names a function that is not in tools; name one of them")
    if kind == "none":
        del chat.tools[:]
    elif kind != "auto":
        request.sampling_params.grammar.tool_calls.required = True
        request.sampling_params.grammar.tool_calls.name = name


def refuses_parallel_calls(fields: Fields) -> bool:
    """Return whether the client wants at most one tool call in a message."""
    return fields.has("parallel_tool_calls") and not fields.flag("parallel_tool_calls")


def set_json_format(request: pb.GenerateRequest, fields: Fields, where: str, schema: Any) -> None:
    """Constrain the text to JSON of a schema; {"type": "object"} is any object."""
    if request.sampling_params.HasField("grammar"):
        fields.refuse(where, "asks for JSON while tool_choice asks for a tool call; leave one of them out")
    if not isinstance(schema, dict):
        fields.refuse(where, "needs a JSON Schema; send an object")
    request.sampling_params.grammar.json_schema = dump(schema)


def join_texts(fields: Fields, name: str, kinds: frozenset[str]) -> str:
    """Return the text of a content: a string, or an array of text parts, which are joined by line ends."""
    value = fields.raw(name)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return "\n".join(_part_text(part, kinds) for part in fields.tables(name))


def _part_text(part: Fields, kinds: frozenset[str]) -> str:
    kind = part.text("type")
    if kind not in kinds:
        part.refuse("type", "is not supported: the model reads text only; send text parts")
    return part.text("refusal" if kind == "refusal" else "text")


def dump(value: Any) -> str:
    """Return JSON text."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
