"""Makes the text of a sample that a reward model reads, and its tokens. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from fourfold.arrays import Int32Array
from fourfold.errors import InvalidInput
from fourfold.model.conversation import EncodedAnswer, RenderedAnswer, encode_each, scored_chat, scored_plain
from fourfold.model.tokenizer import Tokenizer
from fourfold_reward.job import Job
from fourfold_reward.protocol import Outcome

if TYPE_CHECKING:
    from fourfold_reward.models.steps import StepText

_NO_TOKENS: Final = "prompt and completion are empty: there is no token to score"


class TextEncoder:
    """Turns jobs into token ids of the reward model. Its methods may be called in any thread."""

    def __init__(self, tokenizer: Tokenizer, *, chat: bool, vocabulary_size: int, max_tokens: int | None) -> None:
        """Describe the texts.

        Args:
            chat: render messages with the tokenizer's chat template.
            vocabulary_size: token ids must be below.
            max_tokens: longest text; None: no limit.
        """
        self._tokenizer = tokenizer
        self._chat = chat
        self._vocabulary_size = vocabulary_size
        self._max_tokens = max_tokens

    def encode(self, jobs: Sequence[Job]) -> Sequence[Int32Array | StepText | Outcome]:
        """Return the tokens of each job, or the error of one that cannot be scored."""
        texts = [self._text(job) for job in jobs]
        encoded = encode_each([text for text in texts if not isinstance(text, Outcome)], self._tokenizer)
        return [
            text if isinstance(text, Outcome) else self._finished(job, next(encoded))
            for job, text in zip(jobs, texts, strict=True)
        ]

    def _text(self, job: Job) -> RenderedAnswer | Outcome:
        """Return the text of a job. A completion cannot make special tokens, with which it could end its message."""
        completion = valid_text(job.completion)
        if not self._chat or not job.messages_json:
            return scored_plain(valid_text(job.prompt), completion, self._tokenizer)
        try:
            answer = {"role": "assistant", "content": completion}
            return scored_chat([*parse_messages(job.messages_json), answer], (), self._tokenizer)
        except ValueError as error:  # InvalidInput is one
            return Outcome.error("BAD_TEXT", f"prompt_messages_json: {error}")

    def _finished(self, job: Job, encoded: EncodedAnswer | InvalidInput) -> Int32Array | StepText | Outcome:
        assert isinstance(encoded, EncodedAnswer), "no piece must end with an end token"
        if not len(ids := encoded.token_ids):
            return Outcome.error("BAD_TEXT", _NO_TOKENS)
        if self._max_tokens is not None and len(ids) > self._max_tokens:
            return Outcome.error(
                "TOO_LONG",
                f"the text has {len(ids)} tokens of the reward model; at most {self._max_tokens} fit: shorten it, "
                f"raise reward.model.max_tokens if it is set, or use a model with more positions",
            )
        if int(ids.max()) >= self._vocabulary_size:  # on a GPU, such an index ends the process
            return Outcome.error(
                "BAD_TEXT",
                f"the text has the token {int(ids.max())}, and the reward model has {self._vocabulary_size}: its "
                f"tokenizer.json belongs to another model",
            )
        return ids


def valid_text(text: str) -> str:
    """Return the text without half characters, which no tokenizer reads and with which `Tokenizer.escape` marks."""
    return text.encode("utf-8", "replace").decode()


def parse_messages(text: str) -> list[dict[str, Any]]:
    """Parse the messages of a prompt. Raises InvalidInput: they are no list of objects, or not text."""
    try:
        messages = json.loads(text)
        json.dumps(messages, ensure_ascii=False).encode()  # finds half characters
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"it is not JSON: {type(error).__name__}; send a list of chat messages") from None
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise InvalidInput("it is not a list of chat messages; send objects with role and content")
    return messages
