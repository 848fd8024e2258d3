"""Gives chat templates tool calls in the form that they read.

Most templates read the arguments of a call as an object, and its message has a text. Those of DeepSeek join the JSON
text of the arguments to other text, and the first ones write the calls of a message only if its content is null.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, Final, NamedTuple

_NAME: Final = "4F6rName"
_KEY: Final = "4F6rKey"


class CallForm(NamedTuple):
    """How a template reads a message with tool calls."""

    json_text: bool = False
    """The arguments are JSON text."""
    null_content: bool = False
    """A message without a text has null as its content. Such a template leaves out the calls beside a text."""

    def fit(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Convert messages whose tool calls have objects as arguments to this form."""
        return [self._fit(message) for message in messages] if any(self) else messages

    def _fit(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        calls = []
        for call in message.get("tool_calls") or ():
            function = dict(call["function"])
            if self.json_text and not isinstance(function.get("arguments"), str):
                function["arguments"] = json.dumps(function.get("arguments"), ensure_ascii=False)
            calls.append({**call, "function": function})
        if not calls:
            return message
        content = message.get("content") or (None if self.null_content else "")
        return {**message, "tool_calls": calls, "content": content}


def find_call_form(render: Callable[[Sequence[Mapping[str, Any]]], str | None]) -> CallForm:
    """Return the first form in which a template writes the name and the arguments of a call; the usual one if none.

    Args:
        render: returns the text of messages; None if the template refuses them.
    """
    for json_text, null_content in product((False, True), repeat=2):
        function = {"name": _NAME, "arguments": json.dumps({_KEY: 1}) if json_text else {_KEY: 1}}
        call = {"type": "function", "id": "call00001", "function": function}  # Mistral's have 9 characters
        reply = {"role": "assistant", "content": None if null_content else "", "tool_calls": [call]}
        text = render([{"role": "user", "content": "x"}, reply]) or ""
        # Neither the form of Python, nor JSON text in a JSON text.
        if _NAME in text and _KEY in text and f"'{_KEY}'" not in text and f'\\"{_KEY}' not in text:
            return CallForm(json_text, null_content)
    return CallForm()
