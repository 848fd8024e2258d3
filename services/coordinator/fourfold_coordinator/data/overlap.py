"""Finds prompts of held-out sets that are also training prompts; case, white space and forms of letters are ignored."""

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
    wanted = {content for _, prompts in sets for content, _ in prompts}
    rows = dict[str, int]()  # the first training row of each content
    for prompt in train:
        if (content := _content(prompt)) in wanted:
            rows.setdefault(content, prompt.index)
    found = []
    for name, prompts in sets:
        if hits := [(prompt.index, rows[content]) for content, prompt in prompts if content in rows]:
            found.append(
                f"{len(hits):,} of {len(prompts):,} prompts of the held-out set {name} are training prompts, too "
                f"(case and spaces are ignored), so its score would also measure memorized answers: row "
                f"{hits[0][0]} is training row {hits[0][1]}; remove them from one of the two"
            )
    return found


def _content(prompt: Prompt) -> str:
    """Return the normalized text of a prompt, without system messages: these may differ between sets."""
    messages = json.loads(prompt.messages_json) if prompt.messages_json else []
    asked = [f"{message['role']}: {message['content']}" for message in messages if message["role"] != "system"]
    text = "\n".join(asked) or prompt.text
    return " ".join((text if text.isascii() else unicodedata.normalize("NFKC", text)).casefold().split())
