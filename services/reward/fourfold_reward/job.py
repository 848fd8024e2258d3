"""Defines one sample to score, as the parts of a reward service pass it on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
    size_bytes: int
