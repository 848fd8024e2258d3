"""What a reward function is given, and what it may return."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

_REASON: Final = re.compile(r"[A-Z][A-Z0-9_]{0,62}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreInput:
    """One sample to score."""

    sample_id: str
    prompt: str
    """The prompt as text, chat template applied."""
    completion: str
    """What the policy wrote, special tokens removed."""
    answer: str = ""
    """Reference answer of the task; empty when it has none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The task's own fields, as the data set gives them."""


@dataclass(frozen=True, slots=True)
class Score:
    """A score with parts that go to the logs."""

    score: float
    """Finite."""
    components: Mapping[str, float] = field(default_factory=dict)
    """At most 64 finite numbers by name."""


@dataclass(frozen=True, slots=True)
class Abstain:
    """The function has nothing to say of this sample: it is dropped with this reason, and counted."""

    reason: str
    """UPPER_SNAKE_CASE, at most 63 characters."""

    def __post_init__(self) -> None:
        """Refuse a reason that could not travel."""
        if not _REASON.fullmatch(self.reason):
            raise ValueError(f"abstain reason {self.reason!r}: it must be UPPER_SNAKE_CASE of at most 63 characters")


# A number; None, which abstains; or the dictionary {"score": number, "components": {name: number}}.
Result: TypeAlias = float | Score | Abstain | Mapping[str, Any] | None
RewardFunction: TypeAlias = Callable[[ScoreInput], Result | Awaitable[Result]]
