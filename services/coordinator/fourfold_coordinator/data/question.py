"""Finds the last message of a user in a prompt that a chat template has rendered."""

from __future__ import annotations

import re
from typing import Final

# Marks of templates around messages: ChatML, Llama, Gemma, Mistral, Phi, DeepSeek, Command, gpt-oss. Llama 3 and
# gpt-oss write the role between two marks.
_MARK: Final = re.compile(
    r"<\|(?:start_header_id|start)\|>\w*(?=<\|)|<[|\uff5c][^|\uff5c<>]*[|\uff5c]>|</?s>|<[a-z_]+_of_turn>"
    r"|\[/?(?:INST|SYSTEM_PROMPT)\]|<</?SYS>>"
)
_ROLE_LINE: Final = re.compile(r"\A(?:system|developer|user|assistant|model|tool)[ \t]*(?:\n|$)")
_ANSWER_LINE: Final = re.compile(r"(?:assistant|model)[ \t]*(?:\n|$)|<think>")  # the mark that begins the answer


def last_message(prompt: str) -> str:
    """Return the last message of a rendered prompt without the marks of its template.

    A prompt without known marks is returned as a whole.
    """
    for part in reversed(_MARK.split(prompt)):
        text = part.strip()
        if not _ANSWER_LINE.match(text) and (message := _ROLE_LINE.sub("", text).strip()):
            return message
    return prompt.strip()
