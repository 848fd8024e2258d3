"""Brings chat messages and tools into the one form that chat templates read: of agents' requests, and of data rows.

    message:   {"role", "content": text, "name", "tool_call_id", "reasoning_content", "tool_calls": [...]}
    tool call: {"id", "type": "function", "function": {"name", "arguments": object}}
    tool:      {"type": "function", "function": {"name", "description", "parameters": object}}

Empty members are left out, except the content. Nothing here is escaped; callers do that (`Tokenizer.escape`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from fourfold.errors import InvalidInput
from fourfold.text import clean

_ROLES: Final = ("system", "user", "assistant", "tool", "developer")
_CALLS: Final = ("function_call", "tool_call")  # roles of a message whose text is a tool call, or a list of them
_OTHER_ROLES: Final = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", *_CALLS), "assistant"),
    **dict.fromkeys(("observation", "function", "function_response", "tool_response"), "tool"),
}  # fmt: skip
_OWN: Final = frozenset(
    {"role", "content", "name", "tool_call_id", "reasoning_content", "reasoning", "tool_calls", "function_call"}
)


def template_message(
    role: str,
    content: str,
    *,
    name: str = "",
    tool_call_id: str = "",
    reasoning: str = "",
    calls: Iterable[tuple[str, str, Any]] = (),
) -> dict[str, Any]:
    """Return a message as templates read it; `calls` are name, id and arguments of each tool call."""
    tool_calls = [
        ({"id": call_id} if call_id else {})
        | {"type": "function", "function": {"name": function, "arguments": arguments}}
        for function, call_id, arguments in calls
    ]
    optional = {
        "name": name, "tool_call_id": tool_call_id, "reasoning_content": reasoning, "tool_calls": tool_calls
    }  # fmt: skip
    return {"role": role, "content": content, **{key: value for key, value in optional.items() if value}}


def template_tool(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as templates read it; `parameters` is a JSON Schema."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def argument_value(value: Any) -> Any:
    """Return the JSON value of a text, {} for an empty one; another value as it is.

    A text that is not JSON, or nested too deeply, stands for itself: a policy may write anything.
    """
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value) if value.strip() else {}
        json.dumps(found, ensure_ascii=False).encode()  # fails for half of a surrogate pair, which no tokenizer takes
        return found
    except (ValueError, RecursionError):
        return value


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages of a data row, of OpenAI's or of ShareGPT's form ({"from", "value"}), as templates read them.

    A member that is null is absent: Parquet gives every message the members of all others. Members that are not listed
    above stay, because some templates read more. Raises InvalidInput: a message is malformed; the text has its number.
    """
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise InvalidInput("a prompt is a text, or a list of messages with `role` and `content`")
    return [_read_message(message, f"message {number}") for number, message in enumerate(_without_nulls(value))]


def read_tools(value: Any) -> list[dict[str, Any]]:
    """Return the tools of a data row, a list or one as JSON text. Raises InvalidInput: a tool is malformed."""
    tools = []
    for tool in _without_nulls(_entries(value)):
        name, function = _function(tool, "a tool", "parameters")
        if not isinstance(parameters := argument_value(function.get("parameters", {})), dict):
            raise InvalidInput(f"the parameters of {name!r} are {_show(parameters)}; they are an object, a JSON Schema")
        tools.append(template_tool(name, str(function.get("description", "")), parameters))
    return tools


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _entries(value: Any) -> list[Any]:
    """Return the entries of a list or of one as JSON text; another value that is not empty is the only entry."""
    found = argument_value(value)
    return found if isinstance(found, list) else [found] if found else []


def _read_message(message: dict[str, Any], where: str) -> dict[str, Any]:
    if "from" in message and "role" not in message:
        message = {"role": message.pop("from"), "content": message.pop("value", None), **message}
    if (role := message.get("role")) in _CALLS:
        message = {**message, "tool_calls": message.get("content"), "content": ""}
    if (role := _OTHER_ROLES.get(str(role), role)) not in _ROLES:
        raise InvalidInput(f"{where} has the role {_show(role)}; a role is one of {', '.join(_ROLES)}")
    calls = []
    for call in _entries(message.get("tool_calls") or message.get("function_call")):  # OpenAI's older form: one call
        name, function = _function(call, f"{where}: a tool call", "arguments")
        calls.append((name, str(call.get("id", "")), argument_value(function.get("arguments", {}))))
    reasoning = message.get("reasoning_content") or message.get("reasoning", "")
    content = message.get("content", "" if calls or reasoning else None)
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidInput(f"{where} has the content {_show(content)}; the `content` of a message is text")
    return template_message(
        "system" if role == "developer" else role,
        "\n".join(map(str, texts)),
        name=message.get("name", ""),
        tool_call_id=message.get("tool_call_id", ""),
        reasoning=reasoning,
        calls=calls,
    ) | {key: item for key, item in message.items() if key not in _OWN}


def _function(value: Any, what: str, member: str) -> tuple[str, dict[str, Any]]:
    """Return name and object of the function of a tool or a call, also without the object around it."""
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
        form = f'{{"type": "function", "function": {{"name", "{member}"}}}}'
        raise InvalidInput(f"{what} is {_show(value)}; it has the form {form}")
    return name, function


def _show(value: Any) -> str:
    return clean(repr(value), 80)
