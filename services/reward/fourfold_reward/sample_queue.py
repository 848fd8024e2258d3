"""A bounded queue of samples for backends that score them in workers, or in slots.

    score() --> bounded queue --> slot 0 --> score_batch([sample, ...])
                              `-> slot 1 --> score_batch([sample, ...])

A slot takes one sample, or several at a time if more samples wait than slots are free.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Final

from fourfold.host.timing import Histogram
from fourfold.workers.queue import BatchQueue
from fourfold.workers.tasks import Tasks
from fourfold_reward.backend import MAX_WAITING_SAMPLES, check_room
from fourfold_reward.job import Job
from fourfold_reward.protocol import Outcome

MAX_BATCH_BYTES: Final = 4 << 20
_NEWEST_WEIGHT: Final = 0.1


class QueuedScorer:
    """Base of the backends with a queue; see `fourfold_reward.backend.Backend`. Use it from one event loop."""

    pure = False
    """Its scores may depend on more than the sample: a program or a server may read other data, and a model rounds
    differently in another batch."""

    def __init__(self, *, workers: int, title: str, remedy: str, max_waiting: int = MAX_WAITING_SAMPLES) -> None:
        """Create an empty queue.

        Args:
            workers: batches that are scored at the same time.
            title: of the workers, in messages.
            remedy: what the operator can do when too many samples wait.
        """
        self._worker_count, self._max_waiting = workers, max_waiting
        self._advice = f"{workers} {title}: try again, give the call more time, or {remedy}"
        self._queue = BatchQueue[Job, Outcome](self._on_filled)
        self._filled = asyncio.Event()
        self._idle = 0  # workers that wait for samples
        self._mean_seconds = 0.0  # of a sample
        self.busy = 0  # samples that are being scored
        self.seconds = Histogram()  # of each sample

    @property
    def waiting_samples(self) -> int:
        return len(self._queue)

    async def score(self, jobs: Sequence[Job], *, timeout: float) -> list[Outcome]:
        """Score at least one sample and return the outcomes in order; those missing after `timeout` s are errors.

        Raises Overloaded: the queue is full. No sample was queued.
        """
        check_room(
            jobs,
            waiting=len(self._queue),
            waiting_bytes=self._queue.size_bytes,
            max_waiting=self._max_waiting,
            seconds_per_sample=self._mean_seconds / self._worker_count,
        )
        outcomes = await self._queue.put(jobs, timeout=timeout)
        return [outcome or self._too_late() for outcome in outcomes]

    def _on_filled(self) -> None:
        self._filled.set()

    async def _wait_for_samples(self) -> None:
        while not self._queue:
            self._filled.clear()
            self._idle += 1
            try:
                await self._filled.wait()
            finally:
                self._idle -= 1

    @property
    def _share(self) -> int:
        """Return the number of samples for the worker that takes some now."""
        return -(-len(self._queue) // (1 + self._idle))

    def _too_late(self) -> Outcome:
        return Outcome.error(
            "TIMEOUT",
            f"not scored before the call's deadline; {len(self._queue)} samples wait for {self._advice}",
            code="UNAVAILABLE",
        )


class SlotScorer(QueuedScorer):
    """Base of the backends with slots."""

    def __init__(self, *, slots: int, on_failure: Callable[[str], None], batch: int = 1) -> None:
        """Create a queue; `start_slots` starts the slots.

        Args:
            slots: number of batches that are scored at the same time.
            on_failure: called with a message if a slot ends because of a bug.
            batch: most samples of one batch.
        """
        super().__init__(workers=slots, title="slots", remedy="start more reward services")
        self._batch = batch
        self._slots = Tasks("scorer", on_failure)

    @abstractmethod
    async def score_batch(self, jobs: Sequence[Job]) -> Sequence[Outcome]:
        """Return one outcome for each sample, never later than at a time limit of its own."""

    def start_slots(self) -> None:
        """Start the slots."""
        for _ in range(self._worker_count):
            self._slots.add(self._run_slot())

    async def close(self) -> None:
        """Stop the slots. Queued samples get no outcome."""
        await self._slots.close()

    async def _run_slot(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wait_for_samples()
            if not (taken := self._queue.take(min(self._batch, self._share), MAX_BATCH_BYTES)):
                continue  # their call ended just now
            self.busy += len(taken)
            started = loop.time()
            try:
                outcomes = await self.score_batch([entry.item for entry in taken])
            finally:
                self.busy -= len(taken)
            seconds = loop.time() - started
            self._mean_seconds += _NEWEST_WEIGHT * (seconds / len(taken) - self._mean_seconds)
            for entry, outcome in zip(taken, outcomes, strict=True):
                self.seconds.add(seconds)
                entry.set_result(outcome)
