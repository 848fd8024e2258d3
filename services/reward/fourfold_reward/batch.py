"""Scores a batch of samples in one worker process, with a time limit for each of them.

    send all samples --> read the outcomes that have arrived --> wait for more --> ... --> all have one
                           |  the next sample runs from now on
                           |- for long              it is stuck; those behind it go to other workers (`on_stuck`)
                           '- for the time limit    TimeoutError; the pool kills the worker

The worker writes each outcome before it begins the next sample, so an outcome shows which sample runs and since when.
For fast functions the outcomes are collected for some milliseconds, because each read costs more than such a sample.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from fourfold.workers import frames
from fourfold.workers.child import Child, WorkerDied
from fourfold.workers.queue import Entry
from fourfold_reward import protocol
from fourfold_reward.job import Job
from fourfold_reward.protocol import Outcome

STUCK_SECONDS: Final = 0.1
"""A sample that runs for a shorter time never counts as stuck."""
# A function may load a model at its first sample in a process. More workers would load it, too.
_FIRST_STUCK_SECONDS: Final = 1.0
_FIRST_STUCK_SHARE: Final = 0.5  # of the time limit, if that is longer
_STUCK_FACTOR: Final = 20.0  # of the mean time of the function's samples
_COLLECT_SECONDS: Final = 0.005  # longest time for which outcomes are collected
_COLLECTED_SAMPLES: Final = 16  # fewer samples are not worth a wait
_NEWEST_WEIGHT: Final = 0.1
_NUMBER_BITS: Final = 48


QueuedJob = Entry[Job, Outcome]


@dataclass(slots=True)
class FunctionTimes:
    """The running mean of the time of a function's samples, without the first one in each process."""

    mean: float = 0.0  # seconds; 0: none has ended yet

    @property
    def stuck_seconds(self) -> float:
        """Return the time after which a sample counts as stuck, unless it is the first one in its process."""
        return max(STUCK_SECONDS, _STUCK_FACTOR * self.mean) if self.mean else _FIRST_STUCK_SECONDS

    def add(self, count: int, seconds: float) -> None:
        """Add `count` samples that took `seconds` together. One long sample counts as at most a stuck one."""
        each = min(seconds / count, self.stuck_seconds)
        weight = 1 - (1 - _NEWEST_WEIGHT) ** count
        self.mean += (weight if self.mean else 1.0) * (each - self.mean)


class Worker(Child):
    """A process of `fourfold_reward.worker`."""

    warm = False  # its function has scored a sample


class Batch:
    """One batch in one worker, which has loaded the function."""

    def __init__(
        self,
        worker: Worker,
        entries: Sequence[QueuedJob],
        times: FunctionTimes,
        *,
        timeout: float,
        on_scored: Callable[[int, float], None],
        on_stuck: Callable[[Batch], None],
        on_moving: Callable[[], None],
    ) -> None:
        """Make a batch; `run` scores it.

        Args:
            times: of the function; kept up to date.
            timeout: seconds for each sample.
            on_scored: gets the number of samples that got outcomes, and the seconds that they took together.
            on_stuck: called when a sample runs for long; it may take the samples behind it away with `give_up_rest`.
            on_moving: called when that sample has ended, also when it was killed.
        """
        self._worker, self._entries, self._times = worker, entries, times
        self._timeout, self._on_scored, self._on_stuck, self._on_moving = timeout, on_scored, on_stuck, on_moving
        # Code in a worker can write replies, but does not know the numbers of later batches.
        self._first = secrets.randbits(_NUMBER_BITS)
        self._position = 0  # of the sample that runs
        self._began = 0.0  # when it began
        self._stuck = self._over = False
        self._given_up = len(entries)  # position of the first sample that other workers score

    @property
    def current(self) -> QueuedJob | None:
        """Return the sample that runs; None if all have outcomes, or if it was given to other workers."""
        return self._entries[self._position] if self._position < self._given_up else None

    @property
    def rest(self) -> Sequence[QueuedJob]:
        """Return the samples that have not begun."""
        return self._entries[self._position + 1 : self._given_up]

    def give_up_rest(self) -> Sequence[QueuedJob]:
        """Tell the worker to stop after this sample; return those behind it, which it may still score by accident."""
        rest = self.rest
        if rest:
            self._given_up = self._position + 1
            self._worker.send(frames.pack({"drop": self._first}))
        return rest

    async def run(self) -> None:
        """Score the samples.

        Raises:
            TimeoutError: `current` ran for longer than the time limit. Kill the worker.
            WorkerDied: the worker ended, or broke the protocol, while `current` ran.
        """
        loop = asyncio.get_running_loop()
        self._worker.send(protocol.pack_batch(self._first, [entry.item for entry in self._entries]))
        self._began = loop.time()
        try:
            while not self._over:
                expected = self._times.mean * (len(self._entries) - self._position)
                if len(self._entries) - self._position >= _COLLECTED_SAMPLES and not self._stuck:
                    await asyncio.sleep(min(expected, _COLLECT_SECONDS))
                replies = self._worker.read()
                if replies:
                    self._take(replies, loop.time())
                else:
                    await self._wait(loop.time())
        except ValueError as error:
            raise WorkerDied(f"the worker sent an invalid reply: {error}") from None
        finally:
            self._set_stuck(False)

    async def _wait(self, now: float) -> None:
        limit, stuck = self._began + self._timeout, self._began + self._stuck_seconds
        if now >= limit:
            raise TimeoutError
        if now >= stuck:
            self._set_stuck(True)
        await self._worker.wait(limit if self._stuck else min(limit, stuck))

    @property
    def _stuck_seconds(self) -> float:
        if self._worker.warm:
            return self._times.stuck_seconds
        return max(_FIRST_STUCK_SECONDS, _FIRST_STUCK_SHARE * self._timeout)

    def _take(self, replies: Sequence[bytes], now: float) -> None:
        """Hand out outcomes. Raises ValueError: they do not belong to the next samples."""
        began = self._position
        for body in replies:
            reply = frames.unpack(body)
            number = reply.pop("n", None)
            if self._over or number != self._first + self._position:
                raise ValueError(f"a reply for sample {number!r:.40} of this worker, which does not run")
            if "dropped" in reply and self._position >= self._given_up:
                self._over = True
                continue
            self._entries[self._position].set_result(Outcome.from_json(reply))
            self._position += 1
            self._over = self._position == len(self._entries)
        if count := self._position - began:
            self._set_stuck(False)
            if self._worker.warm:
                self._times.add(count, now - self._began)
            self._worker.warm = True
            self._on_scored(count, now - self._began)
            self._began = now

    def _set_stuck(self, stuck: bool) -> None:
        if stuck != self._stuck:
            self._stuck = stuck
            if stuck:
                self._on_stuck(self)
            else:
                self._on_moving()
