"""Defines a call and its samples, as they pass from the event loop through the threads of a reward model and back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from fourfold.arrays import Int32Array
from fourfold_reward.job import Job
from fourfold_reward.protocol import Outcome


class Call:
    """The samples of one `score`. The event loop alone writes it; the threads read `jobs` and `withdrawn`."""

    __slots__ = ("done", "jobs", "outcomes", "remaining", "withdrawn")

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.outcomes: list[Outcome | None] = [None] * len(jobs)
        self.remaining = len(jobs)
        self.withdrawn = False  # nothing waits for its outcomes
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One sample of a call that waits for a forward pass."""

    call: Call
    index: int
    token_ids: Int32Array
