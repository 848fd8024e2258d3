"""Makes the text of a sample that a reward model reads, and its tokens. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from fourfold.arrays import Int32Array
from fourfold.errors import InvalidInput
from fourfold.model.tokenizer import Tokenizer
from fourfold_reward.job import Job
from fourfold_reward.protocol import Outcome

_NO_TOKENS: Final = "prompt and completion are empty: there is no token to score"


class TextEncoder:
    """Turns jobs into token ids of the reward model. Its methods may be called in any thread."""

    def __init__(
        self, tokenizer: Tokenizer, *, chat: bool, begin_id: int | None, vocabulary_size: int, max_tokens: int | None
    ) -> None:
        """Describe the texts.

        Args:
            chat: render messages with the tokenizer's chat template.
            begin_id: the token that begins a text. Where the text has it already, the tokenizer adds no second one.
            vocabulary_size: token ids must be below.
            max_tokens: longest text; None: no limit.
        """
        self._tokenizer = tokenizer
        self._chat = chat
        self._begin_id = begin_id
        self._vocabulary_size = vocabulary_size
        self._max_tokens = max_tokens

    def encode(self, jobs: Sequence[Job]) -> list[Int32Array | Outcome]:
        """Return the token ids of each job, or the error of one that cannot be scored."""
        texts: list[tuple[str, bool] | Outcome] = [self._text(job) for job in jobs]
        results: list[Int32Array | Outcome] = [text if isinstance(text, Outcome) else _EMPTY for text in texts]
        for plain in (True, False):
            chosen = [i for i, text in enumerate(texts) if not isinstance(text, Outcome) and text[1] is plain]
            encoded = self._tokenizer.encode_batch([str(texts[i][0]) for i in chosen], add_special=plain)  # type: ignore[index]
            for index, ids in zip(chosen, encoded, strict=True):
                results[index] = self._checked(ids)
        return results

    def _text(self, job: Job) -> tuple[str, bool] | Outcome:
        """Return the text of a job, and whether it is plain: a rendered chat has its special tokens already.

        A completion cannot make special tokens, with which it could end its message and begin another one.
        """
        completion = self._tokenizer.escape(_valid(job.completion))
        if not self._chat or not job.messages_json:
            return _valid(job.prompt) + completion, True
        try:
            messages = self._tokenizer.escape(_messages(job.messages_json))
            rendered = self._tokenizer.render_chat(
                [*messages, {"role": "assistant", "content": completion}], add_generation_prompt=False
            )
        except ValueError as error:  # InvalidInput is one
            return Outcome.error("BAD_TEXT", f"prompt_messages_json: {error}")
        return rendered, False

    def _checked(self, ids: list[int]) -> Int32Array | Outcome:
        begin = self._begin_id
        if begin is not None and ids[:2] == [begin, begin]:
            ids = ids[1:]
        if not ids:
            return Outcome.error("BAD_TEXT", _NO_TOKENS)
        if self._max_tokens is not None and len(ids) > self._max_tokens:
            return Outcome.error(
                "TOO_LONG",
                f"the text has {len(ids)} tokens of the reward model; at most {self._max_tokens} fit: shorten it, "
                f"raise reward.model.max_tokens if it is set, or use a model with more positions",
            )
        array = np.asarray(ids, np.int32)
        if int(array.max()) >= self._vocabulary_size:  # on a GPU, such an index ends the process
            return Outcome.error(
                "BAD_TEXT",
                f"the text has the token {int(array.max())}, and the reward model has {self._vocabulary_size}: its "
                f"tokenizer.json belongs to another model",
            )
        return array


_EMPTY: Final[Int32Array] = np.empty(0, np.int32)


def _valid(text: str) -> str:
    """Return the text without half characters, which no tokenizer reads and with which `Tokenizer.escape` marks."""
    return text.encode("utf-8", "replace").decode()


def _messages(text: str) -> list[dict[str, Any]]:
    """Parse the messages of a prompt. Raises InvalidInput: they are no list of objects, or not text."""
    try:
        messages = json.loads(text)
        json.dumps(messages, ensure_ascii=False).encode()  # finds half characters
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"it is not JSON: {type(error).__name__}; send a list of chat messages") from None
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise InvalidInput("it is not a list of chat messages; send objects with role and content")
    return messages
