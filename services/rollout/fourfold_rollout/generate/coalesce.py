"""Submits calls that arrive at the same time as one batch, so that a seeded batch is reproducible.

A kernel may round a row differently in a batch of another shape, and one different token makes two runs diverge.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from fourfold_rollout.engine import EngineSample, RolloutEngine, SampleRequest

# Calls of one training step arrive well below a millisecond apart, also on a busy machine.
_QUIET_SECONDS: Final = 0.008
_LONGEST_SECONDS: Final = 0.08


@dataclass(slots=True)
class _Waiting:
    requests: Sequence[SampleRequest]
    samples: asyncio.Future[Sequence[EngineSample]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    task: asyncio.Task[None] | None = None  # submits the requests


class RequestCoalescer:
    """Submits all requests of an engine. Belongs to one event loop.

    If the engine is idle, calls wait a few milliseconds for each other and join one engine step, ordered by request
    id. Calls do not wait when the engine is busy or when a caller streams tokens.
    """

    def __init__(
        self, engine: RolloutEngine, *, quiet: float = _QUIET_SECONDS, longest: float = _LONGEST_SECONDS
    ) -> None:
        """Wait until no call has come for `quiet` seconds, at most `longest` seconds."""
        self._engine = engine
        self._quiet, self._longest = quiet, longest
        self._waiting: list[_Waiting] = []
        self._end = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, requests: Sequence[SampleRequest], *, at_once: bool) -> Sequence[EngineSample]:
        """Start samples and return them. When cancelled, it returns after the engine has dropped them."""
        entry = _Waiting(requests)
        if at_once or (self._engine.running_count and not self._waiting):
            self._start([entry])
        else:
            self._wait(entry)
        try:
            return await entry.samples  # cancelling cancels the future, which `_submit` checks
        except asyncio.CancelledError:
            if entry.task is not None:
                await asyncio.wait({entry.task})
            if not entry.samples.cancelled() and entry.samples.exception() is None:  # they arrived at the same moment
                await self._engine.abandon(entry.samples.result())
            raise

    def _wait(self, entry: _Waiting) -> None:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            self._end = loop.time() + self._longest
        self._waiting.append(entry)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(min(loop.time() + self._quiet, self._end), self._start_waiting)

    def _start_waiting(self) -> None:
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
        """Submit all entries in one batch; each of them raises the engine's error."""
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
