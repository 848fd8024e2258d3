"""Converts the grammars of agents to those of engines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.config.agents import CONSTRAINED_TOOL_PARSERS
from fourfold.errors import InvalidInput, WrongState
from fourfold.rollout.v1 import rollout_service_pb2 as rollout


def engine_grammar(grammar: pb.Grammar, tools: Sequence[pb.Tool], tool_parser: str) -> rollout.Grammar:
    """Return the grammar for an engine.

    Args:
        grammar: of the request.
        tools: of the request.
        tool_parser: name of the engine's parser of tool calls; empty: none.

    Raises:
        InvalidInput: the grammar is empty, or names a tool that the request does not have.
        WrongState: the form of the model's tool calls is not known here.
    """
    kind = grammar.WhichOneof("kind")
    if kind is None:
        raise InvalidInput("sampling_params.grammar has no kind; set json_schema, regex, ebnf or tool_calls")
    if kind != "tool_calls":
        return rollout.Grammar(**{kind: getattr(grammar, kind)})
    wanted = grammar.tool_calls
    callable_tools = [tool for tool in tools if wanted.name in ("", tool.name)]
    if not callable_tools:
        names = ", ".join(tool.name for tool in tools) or "none"
        raise InvalidInput(f"the grammar allows calls of {wanted.name or 'tools'!r:.80}; tools of the request: {names}")
    if tool_parser not in CONSTRAINED_TOOL_PARSERS:
        raise WrongState(
            f"tool calls in the form of rollout.tool_parser = {tool_parser!r} cannot be constrained; supported are "
            f"{', '.join(CONSTRAINED_TOOL_PARSERS)}: leave the grammar out",
            reason="NOT_SUPPORTED",
        )
    return rollout.Grammar(structural_tag_json=json.dumps(_hermes_tag(callable_tools, required=wanted.required)))


def tools_json(tools: Sequence[pb.Tool]) -> str:
    """Return tools as a JSON array, as in OpenAI's chat completions; empty for none."""
    functions = [{"name": tool.name, "description": tool.description, "parameters": _schema(tool)} for tool in tools]
    return json.dumps([{"type": "function", "function": one} for one in functions]) if functions else ""


def _hermes_tag(tools: Sequence[pb.Tool], *, required: bool) -> dict[str, Any]:
    tags = [
        {
            "type": "tag",
            "begin": f'<tool_call>\n{{"name": {json.dumps(tool.name)}, "arguments": ',
            "content": {"type": "json_schema", "json_schema": _schema(tool)},
            "end": "}\n</tool_call>",
        }
        for tool in tools
    ]
    triggered = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags, "at_least_one": required}
    return {"type": "structural_tag", "format": triggered}


def _schema(tool: pb.Tool) -> dict[str, Any]:
    try:
        schema = json.loads(tool.parameters_json or '{"type": "object", "properties": {}}')
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise InvalidInput(f"tool {tool.name!r:.80}: parameters_json must be a JSON object, a JSON Schema")
    return schema
