"""Reads the JSON fields of a sample: the columns of its data set's row, and its chat messages."""

from __future__ import annotations

import json
from typing import Any

from fourfold.answers import ANSWER_VALUE, answer_text
from fourfold_reward.scores import InvalidSample


def parse_metadata(text: str) -> dict[str, Any]:
    """Return the columns of a row. Raises InvalidSample: the text is no JSON object."""
    value = _parse("metadata_json", text) if text else {}
    if not isinstance(value, dict):
        raise InvalidSample("BAD_METADATA", f"metadata_json holds a {type(value).__name__}; it must hold an object")
    return value


def take_answer(metadata: dict[str, Any], text: str) -> Any:
    """Take the reference answer out of the columns of a row, and return it; None if the task has none.

    Args:
        metadata: the columns, which have it if it is no text.
        text: the answer as text.
    """
    if ANSWER_VALUE in metadata and answer_text(metadata[ANSWER_VALUE]) == text:  # else a column of the same name
        return metadata.pop(ANSWER_VALUE)
    return text or None


def parse_messages(text: str) -> list[dict[str, Any]]:
    """Return the chat messages of a prompt; empty: it has none. Raises InvalidSample: the text is no such array."""
    value = _parse("prompt_messages_json", text) if text else []
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise InvalidSample("BAD_METADATA", "prompt_messages_json must hold an array of objects")
    return value


def to_json(value: Any, *, ensure_ascii: bool = False) -> str:
    """Return columns as JSON. Raises InvalidSample: the encoder's limit of depth is below that of the parser."""
    try:
        return json.dumps(value, ensure_ascii=ensure_ascii)
    except RecursionError:
        raise InvalidSample("BAD_METADATA", "metadata_json is nested too deeply; flatten it") from None


def _parse(field: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidSample("BAD_METADATA", f"{field} is not JSON: {error}") from None
