"""Parses tool calls and reasoning with vLLM's parser classes. Works with vLLM 0.26 to 0.32."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import transformers
from pydantic import TypeAdapter, ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from fourfold.errors import ConfigError, InvalidInput
from fourfold.text import clean, nearest_name

_MAX_TOOLS: Final = 1024
_TOOLS: Final = TypeAdapter(list[ChatCompletionToolsParam])


class Parsers:
    """The parsers that a recipe names, for one model."""

    def __init__(self, folder: Path, *, tool_parser: str, reasoning_parser: str) -> None:
        """Load the tokenizer in `folder` and the parsers; an empty name is no parser.

        Raises ConfigError: vLLM has no parser of that name, or the parser does not fit the tokenizer.
        """
        auto: Any = transformers.AutoTokenizer
        self._tokenizer: Any = auto.from_pretrained(folder, trust_remote_code=False)
        self._tool_class: Any = _find("tool_parser", tool_parser, ToolParserManager, ToolParserManager.get_tool_parser)
        self._reasoning_class: Any = _find(
            "reasoning_parser", reasoning_parser, ReasoningParserManager, ReasoningParserManager.get_reasoning_parser
        )
        for key, name in (("tool_parser", tool_parser), ("reasoning_parser", reasoning_parser)):
            try:
                self._tool_parser([]) if key == "tool_parser" else self._reasoning_parser()
            except Exception as error:  # parsers refuse a tokenizer with various errors
                text = clean(f"{type(error).__name__}: {error}", 500)
                raise ConfigError(f"rollout.{key} = {name!r} does not fit the tokenizer of {folder}: {text}") from None

    def parse(self, text: str, tools_json: str) -> dict[str, Any]:
        """Return `content`, `reasoning` and `tool_calls`, a list of [name, arguments].

        A parser that fails leaves its text in the content. Without tools, tool calls are not parsed. Raises
        InvalidInput: the tools are malformed.
        """
        tools = _read_tools(tools_json)
        make: Any = ChatCompletionRequest
        request = make(messages=[{"role": "user", "content": ""}], tools=tools or None)
        content, reasoning = text, ""
        parser = self._reasoning_parser()
        if parser is not None:
            try:
                found, rest = parser.extract_reasoning(text, request)
                content, reasoning = rest or "", found or ""
            except Exception:
                content, reasoning = text, ""
        calls: list[list[str]] = []
        if tools and (tool_parser := self._tool_parser(tools)) is not None:
            try:
                parsed = tool_parser.extract_tool_calls(content, request)
                calls = [[str(call.function.name), str(call.function.arguments)] for call in parsed.tool_calls]
                if not all(name for name, _ in calls):
                    calls = []  # a call without a name could not be executed
                elif parsed.tools_called:
                    content = parsed.content or ""
            except Exception:
                calls = []
        return {"content": content, "reasoning": reasoning, "tool_calls": calls}

    # Parsers keep state, so each text gets new parsers.
    def _reasoning_parser(self) -> Any:
        return None if self._reasoning_class is None else self._reasoning_class(self._tokenizer)

    def _tool_parser(self, tools: list[ChatCompletionToolsParam]) -> Any:
        if self._tool_class is None:
            return None
        takes_tools = "tools" in inspect.signature(self._tool_class).parameters
        return self._tool_class(self._tokenizer, **({"tools": tools} if takes_tools else {}))


def _find(key: str, name: str, manager: Any, get: Any) -> Any:
    """Return the parser class of that name; None for an empty name. Raises ConfigError."""
    if not name:
        return None
    known: Iterable[str] = manager.list_registered()
    if name not in known:
        near = nearest_name(name, known)
        hint = f"did you mean `{near}`?" if near else f"it has {', '.join(known)}"
        raise ConfigError(f"rollout.{key} = {clean(name, 100)!r}: the installed vLLM has no such parser; {hint}")
    try:
        return get(name)
    except Exception as error:  # a parser may need a package that is not installed
        text = clean(f"{type(error).__name__}: {error}", 500)
        raise ConfigError(f"rollout.{key} = {name!r}: the parser cannot be imported: {text}") from None


def _read_tools(tools_json: str) -> list[ChatCompletionToolsParam]:
    if not tools_json:
        return []
    try:
        tools = json.loads(tools_json)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"tools_json is not JSON: {clean(str(error), 200)}") from None
    if not isinstance(tools, list) or len(tools) > _MAX_TOOLS:
        raise InvalidInput(f"tools_json must hold an array of at most {_MAX_TOOLS} tools")
    try:
        return _TOOLS.validate_python(tools)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidInput(f"tools_json: {clean(where, 200)}: {clean(first['msg'], 200)}") from None
