"""Hands calls that arrive together to the engine together, so that a seeded batch repeats itself.

A kernel may round a row differently in a batch of another shape, and one flipped sample makes
two runs part. So when the engine is idle, a call waits a few milliseconds for the ones that
come with it, and all of them join one engine step, ordered by request id. When the engine is
busy, or a caller wants its tokens as they come, nothing waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from fourfold_rollout.engine import EngineSample, RolloutEngine, SampleRequest

# Calls of one step come well below a millisecond apart, also on a machine that is busy.
_QUIET_SECONDS: Final = 0.008
_LONGEST_SECONDS: Final = 0.08


@dataclass(slots=True)
class _Waiting:
    """The requests of one call."""

    requests: Sequence[SampleRequest]
    samples: asyncio.Future[Sequence[EngineSample]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    task: asyncio.Task[None] | None = None
    """Hands them to the engine."""


class RequestCoalescer:
    """The only one who submits to an engine. Belongs to one event loop."""

    def __init__(
        self, engine: RolloutEngine, *, quiet: float = _QUIET_SECONDS, longest: float = _LONGEST_SECONDS
    ) -> None:
        """Wait until nothing came for `quiet` seconds, `longest` seconds in all."""
        self._engine = engine
        self._quiet, self._longest = quiet, longest
        self._waiting: list[_Waiting] = []
        self._end = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, requests: Sequence[SampleRequest], *, at_once: bool) -> Sequence[EngineSample]:
        """Start samples and return them. Cancelled, it returns when nothing of them is in the engine any more.

        Raises:
            Unavailable: the engine is dead.
        """
        entry = _Waiting(requests)
        if at_once or (self._engine.running_count and not self._waiting):
            self._start([entry])
        else:
            self._wait(entry)
        try:
            return await entry.samples  # cancelling cancels the future, and `_submit` sees that
        except asyncio.CancelledError:
            if entry.task is not None:
                await asyncio.wait({entry.task})
            if not entry.samples.cancelled() and entry.samples.exception() is None:  # they came at the same moment
                await self._engine.abandon(entry.samples.result())
            raise

    def _wait(self, entry: _Waiting) -> None:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            self._end = loop.time() + self._longest
        self._waiting.append(entry)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(min(loop.time() + self._quiet, self._end), self._quiet_now)

    def _quiet_now(self) -> None:
        waiting, self._waiting, self._timer = self._waiting, [], None
        self._start(sorted((w for w in waiting if not w.samples.done()), key=lambda w: w.requests[0].key))

    def _start(self, entries: list[_Waiting]) -> None:
        if entries:
            task = asyncio.get_running_loop().create_task(self._submit(entries))
            for entry in entries:
                entry.task = task
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _submit(self, entries: list[_Waiting]) -> None:
        """Submit all entries as one; what the engine raises is raised by each of them."""
        requests = [request for entry in entries for request in entry.requests]
        (samples,) = await asyncio.gather(self._engine.submit(requests), return_exceptions=True)
        unwanted: list[EngineSample] = []
        for entry in entries:
            if isinstance(samples, BaseException):
                if not entry.samples.done():
                    entry.samples.set_exception(samples)
                continue
            mine, samples = samples[: len(entry.requests)], samples[len(entry.requests) :]
            if entry.samples.done():
                unwanted += mine
            else:
                entry.samples.set_result(mine)
        if unwanted:
            await self._engine.abandon(unwanted)
