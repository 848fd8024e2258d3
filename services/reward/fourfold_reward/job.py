"""Defines one sample to score, as the parts of a reward service pass it on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fourfold_reward.loader import Verifier


@dataclass(slots=True, kw_only=True)  # a frozen one would take three times as long to make
class Job:
    """One sample to score; do not change it."""

    sample_id: str
    prompt: str
    completion: str
    answer: str
    # Parsed in the worker only, because they come from callers.
    metadata_json: str
    messages_json: str = ""
    completion_ids: Sequence[int] = ()
    verifier: Verifier | None = None  # the function; None for a backend that is no function
    size_bytes: int

    @property
    def function(self) -> Verifier:
        """Return the function that scores it."""
        assert self.verifier is not None, "a pool gets no other jobs"
        return self.verifier
