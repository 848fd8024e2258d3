"""Defines the interface between a reward service and the code that scores its samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from fourfold.errors import Overloaded
from fourfold_reward.job import Job
from fourfold_reward.protocol import Outcome
from fourfold_reward.signatures import Reads

MAX_WAITING_SAMPLES: Final = 16_384
MAX_WAITING_BYTES: Final = 256 << 20
_MAX_RETRY_AFTER_SECONDS: Final = 30.0


class Backend(Protocol):
    """Scores samples; `backends.py` chooses one of these for a table [[reward]]:

    functions               pool.py                      worker processes; on the queue of sample_queue.py
    programs                scorers/command.py           on sample_queue.py, like the next two
    other projects' servers scorers/openrlhf_server.py
    language-model judges   scorers/judge.py
    reward models           models/backend.py            with a queue of its own
    """

    reads: Reads
    """Inputs besides texts; known after `start`."""
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


def check_room(
    jobs: Sequence[Job], *, waiting: int, waiting_bytes: int, max_waiting: int, seconds_per_sample: float
) -> int:
    """Return the bytes of new samples if they fit into a queue.

    Args:
        waiting: samples in the queue, of `waiting_bytes`.
        seconds_per_sample: mean time in which the queue gets shorter by one sample.

    Raises Overloaded: the queue is full.
    """
    size = sum(job.size_bytes for job in jobs)
    full = waiting + len(jobs) > max_waiting or waiting_bytes + size > MAX_WAITING_BYTES
    if full and waiting:  # an empty queue takes any call; the servicer limits its size
        raise Overloaded(
            f"{waiting} samples wait and {len(jobs)} more do not fit (limit {max_waiting} samples, "
            f"{MAX_WAITING_BYTES >> 20} MiB); come back later, or start more reward services",
            reason="QUEUE_FULL",
            # The expected time until half of the queue is empty.
            retry_after=min(max(seconds_per_sample * waiting / 2, 0.1), _MAX_RETRY_AFTER_SECONDS),
        )
    return size
