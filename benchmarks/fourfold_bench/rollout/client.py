"""Calls the rollout service as the coordinator does, with whole groups; one process of several that share the prompts.

    python -m fourfold_bench.rollout.client SETTINGS INDEX HOST:PORT OUT

All clients begin each round together: they meet by files in OUT's folder. Times are `time.perf_counter`, which all
processes of the machine share.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from fourfold.host.process_tree import die_with_parent
from fourfold.rollout.client import AsyncRolloutClient, Completion
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rpc.channel import open_channel
from fourfold_bench.processes import meet
from fourfold_bench.rollout.benchmark import GREEDY_TOKENS, RolloutSettings
from fourfold_bench.streams import Streams, first_token_seconds, streaming_request

# Numbers of rounds, so that no two rounds have the same prompts.
_BESIDE: Final = 100_000
_STREAMS: Final = 200_000
_IDLE_CALLS: Final = 10
_IDLE_TOKENS: Final = 2


@dataclass(slots=True, kw_only=True)
class SampleCheck:
    """Counts samples and their faults."""

    samples: int = 0
    tokens: int = 0
    faults: list[str] = field(default_factory=list)

    def add(self, completion: Completion, *, expected: int) -> None:
        """Check one sample, which must have `expected` tokens."""
        self.samples += 1
        self.tokens += len(completion.token_ids)
        if len(completion.token_ids) != expected:
            self.faults.append(f"{len(completion.token_ids)} tokens instead of {expected}")
        elif not np.isfinite(completion.logprobs).all() or completion.logprobs.max() > 0:
            self.faults.append("log-probabilities that are not finite, or above 0")


class RolloutCaller:
    """The calls of one process. The first one (index 0) also has the interactive callers."""

    def __init__(self, settings: RolloutSettings, index: int, rollout: AsyncRolloutClient, folder: Path) -> None:
        self._settings = settings
        self._index = index
        self._rollout = rollout
        self._folder = folder
        self._check = SampleCheck()

    async def measure(self) -> dict[str, Any]:
        """Run all rounds; return JSON values."""
        settings = self._settings
        streams = Streams(self._rollout, self._streaming, callers=settings.streams, timeout=settings.timeout)
        result: dict[str, Any] = {}
        if not self._index:
            result["greedy"] = await self._greedy()
            result["first_token"] = [await self._first_token(call) for call in range(_IDLE_CALLS)]
        await self._meet("begin")
        plain = [await self._round(number) for number in range(settings.plain_rounds)]
        result["rounds"] = plain[settings.warm_up : settings.warm_up + settings.rounds]
        if settings.streams:
            if not self._index:
                await streams.start()
                await streams.wait_for(1, timeout=settings.timeout)
                streams.forget()
            await self._meet("streams")
            result["beside"] = [await self._round(_BESIDE + number) for number in range(settings.rounds)]
            if not self._index:
                streams.check()
                await streams.stop()
                result["streams"] = {"first_token": streams.first_token, "gaps": streams.gaps()}
        check = self._check
        return result | {"samples": check.samples, "tokens": check.tokens, "faults": check.faults[:5]}

    async def _round(self, number: int) -> list[float]:
        """Sample this process's groups of one round; return begin and end."""
        mine = range(self._index, self._settings.prompts, self._settings.clients)
        requests = [self._request(number, index) for index in mine]
        # The benchmark comes to the profiled round, too, when py-spy has started.
        is_profiled = self._settings.profiled and number == self._settings.plain_rounds - 1
        await self._meet(f"round-{number}", count=self._settings.clients + is_profiled)
        began = time.perf_counter()
        groups = await asyncio.gather(*(self._rollout.complete(r, timeout=self._settings.timeout) for r in requests))
        ended = time.perf_counter()
        for completion in (completion for group in groups for completion in group):
            self._check.add(completion, expected=self._settings.new_tokens)
        return [began, ended]

    def _request(self, number: int, index: int) -> pb.GenerateRequest:
        settings = self._settings
        return pb.GenerateRequest(
            request_id=f"bench-{number}-{index}",
            prompt_token_ids=settings.prompt(number, index),
            # The coordinator's requests have a seed, too.
            sampling_params=pb.SamplingParams(
                temperature=settings.temperature, max_tokens=settings.new_tokens, seed=number * settings.prompts + index
            ),
            sample_count=settings.group_size,
        )

    def _streaming(self, index: int, count: int, *, tokens: int = 0) -> pb.GenerateRequest:
        settings = self._settings
        params = pb.SamplingParams(temperature=settings.temperature, max_tokens=tokens or settings.new_tokens)
        prompt = settings.prompt(_STREAMS + count, index)
        return streaming_request(f"stream-{index}-{count}", prompt, params, flush_seconds=settings.flush_seconds)

    async def _first_token(self, call: int) -> float:
        """Return the seconds to the first token of a single call; nothing else runs."""
        request = self._streaming(call, -1, tokens=_IDLE_TOKENS)
        return await first_token_seconds(self._rollout, request, timeout=self._settings.timeout)

    async def _greedy(self) -> dict[str, list[float]]:
        request = pb.GenerateRequest(
            request_id="greedy",
            prompt_token_ids=self._settings.prompt(-1, 0),
            sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=GREEDY_TOKENS),
        )
        (completion,) = await self._rollout.complete(request, timeout=self._settings.timeout)
        return {"token_ids": completion.token_ids.tolist(), "logprobs": completion.logprobs.tolist()}

    async def _meet(self, place: str, *, count: int = 0) -> None:
        """Return when every client, or `count` processes, have come to this place."""
        await asyncio.to_thread(meet, self._folder, place, self._index, count or self._settings.clients)


async def _measure(settings: RolloutSettings, index: int, target: str, folder: Path) -> dict[str, Any]:
    async with open_channel(target, None) as channel:
        client = AsyncRolloutClient(channel, peer="the rollout service")
        return await RolloutCaller(settings, index, client, folder).measure()


if __name__ == "__main__":
    die_with_parent()
    given, out = RolloutSettings.read(Path(sys.argv[1])), Path(sys.argv[4])
    result = asyncio.run(_measure(given, int(sys.argv[2]), sys.argv[3], out.parent))
    out.write_text(json.dumps(result), encoding="utf-8")
