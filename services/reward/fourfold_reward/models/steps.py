"""Cuts completions into steps for a process reward model, and gives the scores of steps to sampled tokens.

    completion --separator--> steps --> tokens of the model, with the end of each step --> a score per step
    score of the last step    score of the sample, which the trainer pays at the last sampled token
    scores of earlier steps   token rewards, at the sampled token in which the separator after the step ends

Needs no torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fourfold.arrays import Float32Array, Int32Array, Int64Array
from fourfold.errors import InvalidInput
from fourfold.model.conversation import EncodedAnswer, RenderedAnswer, scored_steps
from fourfold.model.tokenizer import Tokenizer
from fourfold_reward.job import Job
from fourfold_reward.models.texts import TextEncoder, parse_messages, valid_text
from fourfold_reward.protocol import Outcome


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepText:
    """The text of a sample, in tokens of the reward model, with k steps."""

    token_ids: Int32Array  # [n]
    ends: Int64Array  # [k], last token of each step
    rewarded: Int64Array  # [k - 1], sampled token of the policy that gets the score of each step but the last
    sampled_count: int  # sampled tokens of the policy

    def __len__(self) -> int:
        return len(self.token_ids)

    def outcome(self, scores: Float32Array) -> Outcome:
        """Return the outcome of the sample from the scores of its steps, [k]."""
        if not np.isfinite(scores).all():
            return Outcome.error("NOT_FINITE", f"the scores of the steps are {scores.tolist()}; they must be finite")
        rewards = np.zeros(self.sampled_count, np.float32)
        np.add.at(rewards, self.rewarded, scores[:-1])
        return Outcome(
            score=float(scores[-1]),
            components={"steps": float(len(scores)), "step_min": float(scores.min())},
            token_rewards=rewards.tolist() if len(self.rewarded) else (),
        )


class StepEncoder(TextEncoder):
    """Turns jobs into texts whose steps are scored. Its methods may be called in any thread."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat: bool,
        vocabulary_size: int,
        max_tokens: int | None,
        separator: str,
        policy: Tokenizer,
    ) -> None:
        """Describe the texts as `TextEncoder`; `policy` made the sampled tokens of the jobs."""
        super().__init__(tokenizer, chat=chat, vocabulary_size=vocabulary_size, max_tokens=max_tokens)
        self._separator, self._policy = separator, policy

    def _text(self, job: Job) -> RenderedAnswer | Outcome:
        steps = [text for text, _ in split_steps(valid_text(job.completion), self._separator)]
        try:
            chat = self._chat and bool(job.messages_json)
            prompt = parse_messages(job.messages_json) if chat else valid_text(job.prompt)
            return scored_steps(prompt, (), steps, self._separator, self._tokenizer)
        except ValueError as error:  # InvalidInput is one
            return Outcome.error("BAD_TEXT", f"prompt_messages_json: {error}")

    def _finished(self, job: Job, encoded: EncodedAnswer | InvalidInput) -> StepText | Outcome:
        ids = super()._finished(job, encoded)
        if isinstance(ids, Outcome):
            return ids
        assert isinstance(encoded, EncodedAnswer) and isinstance(ids, np.ndarray)
        completion = valid_text(job.completion)
        steps = split_steps(completion, self._separator)
        if len(encoded.spans) != len(steps):
            return Outcome.error("BAD_TEXT", "the first step is the first token of the text, and nothing is before it")
        sampled = job.completion_ids
        if len(steps) > 1 and not sampled:
            return Outcome.error(
                "BAD_TOKEN_REWARDS",
                f"the item has {len(steps)} steps and no sampled tokens that could get their scores; send its arrays",
            )
        return StepText(
            token_ids=ids,
            ends=np.array([end - 1 for _, end in encoded.spans], np.int64),
            rewarded=tokens_at([end for _, end in steps[:-1]], completion, sampled, self._policy),
            sampled_count=len(sampled),
        )


def split_steps(completion: str, separator: str) -> list[tuple[str, int]]:
    """Return the steps of a completion, each with the place after its separator; blank ones are left out.

    A completion of blanks has one empty step, so that every sample has a score.
    """
    found, at = list[tuple[str, int]](), 0
    for part in completion.split(separator):
        at = min(at + len(part) + len(separator), len(completion))
        if part.strip():
            found.append((part, at))
    return found or [("", len(completion))]


def tokens_at(ends: Sequence[int], text: str, token_ids: Sequence[int], tokenizer: Tokenizer) -> Int64Array:
    """Return the token that has the character before each place of a text, int64 [k]; `token_ids` are those of it."""
    if not ends:
        return np.empty(0, np.int64)
    size = {i: len(tokenizer.token_bytes(i)) for i in set(token_ids)}
    sizes = np.cumsum([size[i] for i in token_ids], dtype=np.int64)
    if len(sizes) and sizes[-1] == len(text.encode()):
        found = np.searchsorted(sizes, [len(text[:end].encode()) for end in ends])
    else:  # tokens whose text depends on their neighbours

        def length(index: int) -> int:
            return len(tokenizer.decode(token_ids[: index + 1]).rstrip("\ufffd"))

        found = np.array([bisect_left(range(len(token_ids)), end, key=length) for end in ends])
    return np.minimum(found, max(len(token_ids) - 1, 0)).astype(np.int64)
