"""Defines what a reward service needs of the code that scores its samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fourfold_reward.job import Job
from fourfold_reward.protocol import Outcome
from fourfold_reward.signatures import Reads


class Backend(Protocol):
    """Scores samples: worker processes, a program, a reward model, or a server of another project."""

    reads: Reads
    """What it reads besides texts; known after `start`."""
    pure: bool
    """Whether an outcome depends on the sample alone; known after `start`."""

    @property
    def scorer(self) -> str:
        """Name and version as "name@version"; known after `start`."""

    @property
    def busy(self) -> int:
        """Number of samples that are being scored now."""

    @property
    def waiting_samples(self) -> int:
        """Number of samples in the queue."""

    async def start(self) -> None:
        """Get ready to score; raise ConfigError when that is impossible."""

    async def score(self, jobs: Sequence[Job], *, timeout: float) -> list[Outcome]:
        """Score samples and return their outcomes, in order; one without an outcome after `timeout` s gets an error.

        Raises Overloaded: the queue is full, and no sample was queued.
        """

    async def close(self) -> None:
        """End all work and all processes. Queued samples get no outcome."""
