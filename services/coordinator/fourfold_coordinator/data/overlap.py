"""Finds prompts of held-out sets that are training prompts, too: exactly, or but for case, white space and forms of
letters. One pass over the training prompts, of which nothing is kept."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .prompts import HeldOutSet, Prompt


def find_overlaps(train: Sequence[Prompt], held_out: Sequence[HeldOutSet]) -> list[str]:
    """Return a text on each held-out set with a source of its own that has prompts of the training data."""
    sets = [(held.name, [(_content(p), p) for p in held.prompts]) for held in held_out if held.rule.source is not None]
    wanted = {_normalised(text) for _, prompts in sets for text, _ in prompts}
    exact, places = set[str](), dict[str, int]()  # contents of training prompts, and their first rows
    for prompt in train:
        text = _content(prompt)
        if (key := _normalised(text)) in wanted:
            exact.add(text)
            places.setdefault(key, prompt.index)
    found = []
    for name, prompts in sets:
        hits = [(text, prompt) for text, prompt in prompts if _normalised(text) in places]
        if not hits:
            continue
        alike = sum(text not in exact for text, _ in hits)
        text, prompt = hits[0]
        found.append(
            f"{len(hits):,} of {len(prompts):,} prompts of the held-out set {name} are training prompts, too, "
            f"{alike:,} of them but for case and spaces, so that its score also measures what was memorized: row "
            f"{prompt.index} is training row {places[_normalised(text)]}; remove them from one of the two"
        )
    return found


def _content(prompt: Prompt) -> str:
    """Return what a prompt asks: its messages without those of the system, which may differ between sets."""
    messages = json.loads(prompt.messages_json) if prompt.messages_json else []
    asked = [f"{message['role']}: {message['content']}" for message in messages if message["role"] != "system"]
    return "\n".join(asked) or prompt.text


def _normalised(text: str) -> str:
    return " ".join((text if text.isascii() else unicodedata.normalize("NFKC", text)).casefold().split())
