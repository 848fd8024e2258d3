"""A bounded queue of samples with slots that score them, for backends without worker processes of their own.

    score() --> bounded queue --> slot 0 --> score([sample, ...])
                              `-> slot 1 --> score([sample, ...])

A slot takes one sample, or several at a time if more samples wait than slots are free.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from fourfold.host.timing import Histogram
from fourfold.workers.queue import BatchQueue, Entry
from fourfold_reward.backend import MAX_WAITING_SAMPLES, check_room
from fourfold_reward.job import Job
from fourfold_reward.protocol import Outcome

_log = logging.getLogger(__name__)

MAX_BATCH_BYTES: Final = 4 << 20
_NEWEST_WEIGHT: Final = 0.1

ScoreBatch = Callable[[Sequence[Job]], Awaitable[Sequence[Outcome]]]
"""Scores the samples of one slot; it returns one outcome for each, and never later than its own time limit."""


class SampleQueue:
    """The queue and its slots. Use it from one event loop."""

    def __init__(
        self,
        score_batch: ScoreBatch,
        *,
        slots: int,
        on_failure: Callable[[str], None],
        batch: int = 1,
        max_waiting: int = MAX_WAITING_SAMPLES,
    ) -> None:
        """Create a queue; `start` starts the slots.

        Args:
            slots: number of batches that are scored at the same time.
            on_failure: called with a message if a slot ends because of a bug.
            batch: most samples of one batch.
        """
        self._score_batch, self._slot_count, self._batch = score_batch, slots, batch
        self._on_failure, self._max_waiting = on_failure, max_waiting
        self._filled = asyncio.Event()
        self._queue = BatchQueue[Job, Outcome](self._filled.set)
        self._slots: list[asyncio.Task[None]] = []
        self._mean_seconds = 0.0
        self._busy_slots = 0
        self.busy = 0  # samples that are being scored
        self.seconds = Histogram()  # of each sample

    def start(self) -> None:
        """Start the slots."""
        for _ in range(self._slot_count):
            slot = asyncio.create_task(self._run_slot())
            slot.add_done_callback(self._on_slot_end)
            self._slots.append(slot)

    async def close(self) -> None:
        """Stop the slots. Queued samples get no outcome."""
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        self._slots.clear()

    @property
    def waiting_samples(self) -> int:
        return len(self._queue)

    @property
    def slot_count(self) -> int:
        return self._slot_count

    async def score(self, jobs: Sequence[Job], *, timeout: float) -> list[Outcome]:
        """Score samples and return their outcomes in order; one without an outcome after `timeout` s gets an error.

        Raises Overloaded: the queue is full. No sample was queued.
        """
        check_room(
            jobs,
            waiting=len(self._queue),
            waiting_bytes=self._queue.size_bytes,
            max_waiting=self._max_waiting,
            seconds_per_sample=self._mean_seconds / self._slot_count,
        )
        outcomes = await self._queue.put(jobs, timeout=timeout)
        return [outcome or self._too_late() for outcome in outcomes]

    async def _run_slot(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._queue:
                self._filled.clear()
                await self._filled.wait()
            if not (taken := self._take()):  # their call ended just now
                continue
            self.busy += len(taken)
            self._busy_slots += 1
            started = loop.time()
            try:
                outcomes = await self._score_batch([entry.item for entry in taken])
            finally:
                self.busy -= len(taken)
                self._busy_slots -= 1
            seconds = loop.time() - started
            self._mean_seconds += _NEWEST_WEIGHT * (seconds / len(taken) - self._mean_seconds)
            for entry, outcome in zip(taken, outcomes, strict=True):
                self.seconds.add(seconds)
                entry.set_result(outcome)

    def _take(self) -> list[Entry[Job, Outcome]]:
        """Remove the next batch from the queue: the share of one of the slots that are free."""
        free = self._slot_count - self._busy_slots
        return self._queue.take(min(self._batch, max(-(-len(self._queue) // free), 1)), MAX_BATCH_BYTES)

    def _too_late(self) -> Outcome:
        return Outcome.error(
            "TIMEOUT",
            f"not scored before the call's deadline; {len(self._queue)} samples wait for {self._slot_count} slots: "
            "try again, give the call more time, or start more reward services",
            code="UNAVAILABLE",
        )

    def _on_slot_end(self, slot: asyncio.Task[None]) -> None:
        if not slot.cancelled() and (error := slot.exception()) is not None:
            _log.error("slot of the sample queue failed", exc_info=error)
            self._on_failure(f"the scorer failed: {type(error).__name__}: {error}")


class QueuedScorer:
    """Base of the backends with a SampleQueue; see `fourfold_reward.backend.Backend`."""

    pure = False
    """Its scores may depend on more than the sample: a program or a server may read other data, and a model rounds
    differently in another batch."""

    def __init__(self, queue: SampleQueue) -> None:
        self._queue = queue
        self.seconds = queue.seconds

    @property
    def busy(self) -> int:
        return self._queue.busy

    @property
    def waiting_samples(self) -> int:
        return self._queue.waiting_samples

    async def score(self, jobs: Sequence[Job], *, timeout: float) -> list[Outcome]:
        return await self._queue.score(jobs, timeout=timeout)
