"""Requests that decode all the time over gRPC, when their tokens came, and whether all came.

What came is compared twice: each request that ended at its limit with that limit, and all together with what the
service says it sampled.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration

from fourfold.rollout.client import AsyncRolloutClient
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold_bench.shapes import SHAPES
from fourfold_bench.weights.settings import Settings

_PROMPT_TOKENS: Final = 16
_STREAM_SECONDS: Final = 3600.0
_RECENT_GAPS: Final = 500
_ASK_SECONDS: Final = 10.0


class Streams:
    """All streams of a benchmark. Belongs to one event loop."""

    def __init__(self, settings: Settings, client: AsyncRolloutClient) -> None:
        self.times: list[list[float]] = [[] for _ in range(settings.streams)]
        """When each stream got its tokens, in seconds of `time.perf_counter`."""
        self._gaps: list[list[tuple[float, float]]] = [[] for _ in self.times]  # times of two tokens of one request
        self.first_token: list[float] = []
        """Seconds from each request to its first token."""
        self.received = 0
        """Tokens that came."""
        self.uneven = 0
        """By how many tokens requests that ended at their limit missed it, above or below."""
        self._settings, self._client = settings, client
        self._ending = False
        self._sampled_before = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Send every stream's first request."""
        self._sampled_before = await self._sampled()
        self._tasks = [asyncio.create_task(self._stream(index)) for index in range(self._settings.streams)]

    async def wait_for(self, count: int, *, timeout: float) -> None:
        """Wait until each has got that many tokens more.

        Raises:
            FourfoldError: a stream failed.
            TimeoutError: they did not come in time.
        """
        goals = [len(times) + count for times in self.times]
        async with asyncio.timeout(timeout):
            while any(len(times) < goal for times, goal in zip(self.times, goals, strict=True)):
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.005)

    def longest_gap(self, began: float, end: float) -> float:
        """Return the longest time between two tokens of one request that touches [began, end]; 0: none does."""
        recent = (gap for gaps in self._gaps for gap in gaps[-_RECENT_GAPS:])
        return max((b - a for a, b in recent if b >= began and a <= end), default=0.0)

    def end(self) -> None:
        """Begin no request any more: what the service gives up now is the last of its stream."""
        self._ending = True

    async def account(self, *, timeout: float) -> dict[str, int]:
        """Wait for the last token of every stream after `end`; return what was sampled, received and lost."""
        if self._tasks:
            done, _ = await asyncio.wait(self._tasks, timeout=timeout)
            for task in done:
                task.result()
        sampled = await self._sampled() - self._sampled_before
        lost = abs(sampled - self.received) + self.uneven
        return {"sampled": sampled, "received": self.received, "lost": lost}

    async def stop(self) -> None:
        """Cancel what still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _sampled(self) -> int:
        async with aclosing(self._client.watch_load(timeout=_ASK_SECONDS)) as reports:
            return (await anext(reports)).sampled_token_count

    async def _stream(self, index: int) -> None:
        count = 0
        while not self._ending:
            request = self._request(index, count)
            began, tokens, finish = time.perf_counter(), 0, rollout.FINISH_REASON_UNSPECIFIED
            async with aclosing(self._client.generate(request, timeout=_STREAM_SECONDS)) as chunks:
                async for chunk in chunks:
                    now = time.perf_counter()
                    if tokens:
                        self._gaps[index].append((self.times[index][-1], now))
                    else:
                        self.first_token.append(now - began)
                    tokens += len(chunk.token_ids) // 4
                    self.times[index].append(now)
                    finish = chunk.finish_reason
            self.received += tokens
            if finish == rollout.FINISH_REASON_LENGTH:
                self.uneven += abs(request.sampling_params.max_tokens - tokens)
            count += 1

    def _request(self, index: int, count: int) -> rollout.GenerateRequest:
        settings, flush = self._settings, Duration()
        flush.FromNanoseconds(int(settings.flush_seconds * 1e9))
        vocabulary: Any = SHAPES[settings.shape]["vocab_size"]
        # Streams begin at different places, so that they do not all end, and start anew, in one step.
        less = settings.context // 2 * index // settings.streams if not count else 0
        return rollout.GenerateRequest(
            request_id=f"stream-{index}-{count}",
            prompt_token_ids=[(7 * index + i) % vocabulary for i in range(_PROMPT_TOKENS)],
            sampling_params=rollout.SamplingParams(max_tokens=settings.context - _PROMPT_TOKENS - 1 - less),
            flush_interval=flush,
        )
