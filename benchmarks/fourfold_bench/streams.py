"""Runs interactive callers of a rollout service: each decodes all the time, request after request.

The callers record when their tokens come. Two comparisons show lost or repeated tokens: each request that ends at its
limit must have that many tokens, and all requests together as many as the service reports as sampled.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Final

from google.protobuf.duration_pb2 import Duration

from fourfold.rollout.client import AsyncRolloutClient
from fourfold.rollout.v1 import rollout_service_pb2 as pb

_RECENT: Final = 500  # newest gaps of a caller in which the longest gap is sought
_LOAD_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.005
_TOKEN_BYTES: Final = 4

RequestMaker = Callable[[int, int], pb.GenerateRequest]
"""Makes request number `count` of caller `index`, from (index, count)."""


class Streams:
    """All callers of one event loop."""

    def __init__(self, client: AsyncRolloutClient, make_request: RequestMaker, *, callers: int, timeout: float) -> None:
        """Prepare the callers; `timeout` is that of one request, in seconds."""
        self.times: list[list[float]] = [[] for _ in range(callers)]
        """When each caller got a message with tokens, in seconds of `time.perf_counter`."""
        self.first_token: list[float] = []
        """Seconds from each request to its first token."""
        self._gaps: list[list[tuple[float, float]]] = [[] for _ in self.times]  # times of two messages of one request
        self._received = 0
        self._uneven = 0  # missing or surplus tokens of requests that ended at their limit
        self._client, self._make_request, self._timeout = client, make_request, timeout
        self._ending = False
        self._sampled_before = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Send the first request of every caller."""
        self._sampled_before = await self._sampled()
        self._tasks = [asyncio.create_task(self._call(index)) for index in range(len(self.times))]

    async def wait_for(self, count: int, *, timeout: float) -> None:
        """Wait until each caller has got `count` messages more.

        Raises:
            FourfoldError: a caller failed.
            TimeoutError: the messages did not come in time.
        """
        goals = [len(times) + count for times in self.times]
        async with asyncio.timeout(timeout):
            while any(len(times) < goal for times, goal in zip(self.times, goals, strict=True)):
                self.check()
                await asyncio.sleep(_POLL_SECONDS)

    def check(self) -> None:
        """Raise the error of a caller that failed."""
        for task in self._tasks:
            if task.done():
                task.result()

    def forget(self) -> None:
        """Drop the times that were recorded so far."""
        self.first_token.clear()
        for gaps in self._gaps:
            gaps.clear()

    def gaps(self) -> list[float]:
        """Return the seconds between two messages of one request."""
        return [b - a for gaps in self._gaps for a, b in gaps]

    def longest_gaps(self, began: float, end: float) -> list[float]:
        """Return, by caller, the longest time between two messages of a request that touches [began, end]; 0: none."""
        return [max((b - a for a, b in gaps[-_RECENT:] if b >= began and a <= end), default=0.0) for gaps in self._gaps]

    def end(self) -> None:
        """Send no further request."""
        self._ending = True

    async def account(self, *, timeout: float) -> dict[str, int]:
        """Wait for the last token of every caller after `end`; return the tokens sampled, received and lost."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)
            self.check()
        sampled = await self._sampled() - self._sampled_before
        lost = abs(sampled - self._received) + self._uneven
        return {"sampled": sampled, "received": self._received, "lost": lost}

    async def stop(self) -> None:
        """Cancel all requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _sampled(self) -> int:
        async with aclosing(self._client.watch_load(timeout=_LOAD_SECONDS)) as reports:
            return (await anext(reports)).sampled_token_count

    async def _call(self, index: int) -> None:
        for count in itertools.count():
            if self._ending:
                return
            await self._sample(index, self._make_request(index, count))

    async def _sample(self, index: int, request: pb.GenerateRequest) -> None:
        before, tokens, finish = time.perf_counter(), 0, pb.FINISH_REASON_UNSPECIFIED
        async with aclosing(self._client.generate(request, timeout=self._timeout)) as chunks:
            async for chunk in chunks:
                finish = chunk.finish_reason
                if not chunk.token_ids:
                    continue
                now = time.perf_counter()
                if tokens:
                    self._gaps[index].append((before, now))
                else:
                    self.first_token.append(now - before)
                self.times[index].append(now)
                tokens, before = tokens + len(chunk.token_ids) // _TOKEN_BYTES, now
        self._received += tokens
        if finish == pb.FINISH_REASON_LENGTH:
            self._uneven += abs(request.sampling_params.max_tokens - tokens)


async def first_token_seconds(client: AsyncRolloutClient, request: pb.GenerateRequest, *, timeout: float) -> float:
    """Return the seconds to the first token of one request, which runs to its end."""
    began, first = time.perf_counter(), 0.0
    async with aclosing(client.generate(request, timeout=timeout)) as chunks:
        async for chunk in chunks:
            if chunk.token_ids and not first:
                first = time.perf_counter() - began
    return first


def streaming_request(
    request_id: str, prompt: Sequence[int], params: pb.SamplingParams, *, flush_seconds: float
) -> pb.GenerateRequest:
    """Return a request whose tokens come every `flush_seconds`."""
    flush = Duration()
    flush.FromNanoseconds(int(flush_seconds * 1e9))
    return pb.GenerateRequest(
        request_id=request_id, prompt_token_ids=prompt, sampling_params=params, flush_interval=flush
    )
