"""Interactive callers: each wants its tokens as they come, and asks again when its sample has ended."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration

from fourfold.rollout.client import AsyncRolloutClient
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold_bench.rollout.settings import Settings

_STREAM_PROMPTS: Final = 200_000
_IDLE_CALLS: Final = 10
_IDLE_TOKENS: Final = 2


class Streams:
    """All interactive callers of one process."""

    def __init__(self, settings: Settings, rollout: AsyncRolloutClient) -> None:
        self._settings = settings
        self._rollout = rollout
        self._tasks: list[asyncio.Task[None]] = []
        self._first: list[float] = []
        self._gaps: list[float] = []

    async def start(self) -> None:
        """Start them; returns when each has had a token."""
        self._tasks = [asyncio.create_task(self._call(index)) for index in range(self._settings.streams)]
        async with asyncio.timeout(self._settings.timeout):
            while len(self._first) < self._settings.streams:
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.01)
        self._first.clear()
        self._gaps.clear()

    async def stop(self) -> dict[str, Any]:
        """End them; return times to the first token and gaps between messages, in seconds, since all had started."""
        failed = [task for task in self._tasks if task.done()]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for task in failed:
            task.result()
        return {"first_token": self._first, "gaps": self._gaps}

    async def _call(self, index: int) -> None:
        count = 0
        while True:
            await self._sample(index, count)
            count += 1

    async def _sample(self, index: int, count: int) -> None:
        request = stream_request(
            self._settings, f"stream-{index}-{count}", _STREAM_PROMPTS + count, index, tokens=self._settings.new_tokens
        )
        before, first = time.perf_counter(), True
        async with aclosing(self._rollout.generate(request, timeout=self._settings.timeout)) as chunks:
            async for chunk in chunks:
                if not chunk.token_ids:
                    continue
                now = time.perf_counter()
                (self._first if first else self._gaps).append(now - before)
                before, first = now, False


async def first_tokens(settings: Settings, rollout: AsyncRolloutClient) -> list[float]:
    """Return the seconds to the first token of single calls, one after the other: nothing else runs."""
    seconds = []
    for call in range(_IDLE_CALLS):
        request = stream_request(settings, f"idle-{call}", _STREAM_PROMPTS - 1, call, tokens=_IDLE_TOKENS)
        began, first = time.perf_counter(), 0.0
        async with aclosing(rollout.generate(request, timeout=settings.timeout)) as chunks:
            async for chunk in chunks:
                if chunk.token_ids and not first:
                    first = time.perf_counter() - began
        seconds.append(first)
    return seconds


def stream_request(settings: Settings, name: str, number: int, index: int, *, tokens: int) -> pb.GenerateRequest:
    """Return the call of an interactive caller."""
    flush = Duration()
    flush.FromNanoseconds(int(settings.flush_seconds * 1e9))
    return pb.GenerateRequest(
        request_id=name,
        prompt_token_ids=settings.prompt(number, index),
        sampling_params=pb.SamplingParams(temperature=settings.temperature, max_tokens=tokens),
        flush_interval=flush,
    )
