"""Defines the argument and the return types of reward functions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fourfold.text import is_reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreInput:
    """One sample to score."""

    sample_id: str
    prompt: str
    """Prompt as text, with the chat template applied."""
    completion: str
    """Text that the policy generated, without special tokens."""
    answer: str = ""
    """Reference answer; empty if the task has none. An answer that is no text in the data is written as JSON."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of the data set's row."""
    messages: Sequence[Mapping[str, Any]] = ()
    """Chat messages of the prompt, for functions of TRL; empty: the prompt is a plain text."""
    completion_ids: Sequence[int] = ()
    """Tokens that the policy sampled, for functions with the attribute `reads_tokens`, or of TRL."""
    answer_value: Any = None
    """Reference answer as the data has it: a text, number, bool, list or dictionary; None if the task has none."""

    def __post_init__(self) -> None:
        """Take the text if the answer is one."""
        if self.answer_value is None and self.answer:
            object.__setattr__(self, "answer_value", self.answer)


@dataclass(frozen=True, slots=True)
class Score:
    """A score with components for the logs."""

    score: float
    components: Mapping[str, float] = field(default_factory=dict)
    """At most 64 numbers by name. These and all other numbers must be finite."""
    token_rewards: Sequence[float] = ()
    """A reward for each of `completion_ids`, beside the score; empty: none. The function needs `reads_tokens`."""
    turn_rewards: Sequence[float] = ()
    """A reward for each turn of the sample, beside the score; empty: none."""


@dataclass(frozen=True, slots=True)
class Abstain:
    """The function cannot judge this sample. The run drops the sample and counts the reason."""

    reason: str
    """UPPER_SNAKE_CASE, at most 63 characters."""

    def __post_init__(self) -> None:
        if not is_reason(self.reason):
            raise ValueError(f"abstain reason {self.reason!r}: it must be UPPER_SNAKE_CASE of at most 63 characters")


# None abstains. A mapping has the key "score" and may have the other fields of Score; its other numbers are components.
Result: TypeAlias = float | Score | Abstain | Mapping[str, Any] | None
RewardFunction: TypeAlias = Callable[[ScoreInput], Result | Awaitable[Result]]
