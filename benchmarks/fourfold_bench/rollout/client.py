"""One process that calls the rollout service as the coordinator does: groups, whole samples.

    python -m fourfold_bench.rollout.client SETTINGS INDEX HOST:PORT OUT

Several of them share the prompts. They meet before each round by files in OUT's folder, and begin together. The clock
is that of the machine, so that the times of all processes can be compared.
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

from fourfold.errors import DeadlinePassed
from fourfold.host.process_tree import die_with_parent
from fourfold.rollout.client import AsyncRolloutClient, Completion
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rpc.channel import open_channel
from fourfold_bench.rollout.settings import GREEDY_TOKENS, Settings
from fourfold_bench.rollout.streams import Streams, first_tokens

_POLL_SECONDS: Final = 0.001
_MEET_SECONDS: Final = 600.0
_BESIDE: Final = 100_000
"""Number of the first round beside streams: other prompts."""


@dataclass(slots=True, kw_only=True)
class Checked:
    """What is wrong with samples, and how many there were."""

    samples: int = 0
    tokens: int = 0
    faults: list[str] = field(default_factory=list)

    def add(self, completion: Completion, *, expected: int) -> None:
        """Look at one sample."""
        self.samples += 1
        self.tokens += len(completion.token_ids)
        if len(completion.token_ids) != expected:
            self.faults.append(f"{len(completion.token_ids)} tokens where {expected} were asked for")
        elif not np.isfinite(completion.logprobs).all() or completion.logprobs.max() > 0:
            self.faults.append("log-probabilities that are not finite, or above 0")


class Client:
    """Calls of one process."""

    def __init__(self, settings: Settings, index: int, rollout: AsyncRolloutClient, folder: Path) -> None:
        self._settings = settings
        self._index = index
        self._rollout = rollout
        self._folder = folder
        self.checked = Checked()

    async def measure(self) -> dict[str, Any]:
        """Run everything; returns JSON values, times in seconds of the machine's clock."""
        settings, streams = self._settings, Streams(self._settings, self._rollout)
        result: dict[str, Any] = {}
        if not self._index:
            result["greedy"] = await self._greedy()
            result["first_token"] = await first_tokens(settings, self._rollout)
        await self._meet("begin")
        plain = [await self._round(number) for number in range(settings.plain_rounds)]
        result["rounds"] = plain[settings.warm_up : settings.warm_up + settings.rounds]
        if settings.streams:
            if not self._index:
                await streams.start()
            await self._meet("streams")
            result["beside"] = [await self._round(_BESIDE + number) for number in range(settings.rounds)]
            if not self._index:
                result["streams"] = await streams.stop()
        checked = self.checked
        return result | {"samples": checked.samples, "tokens": checked.tokens, "faults": checked.faults[:5]}

    async def _round(self, number: int) -> list[float]:
        """Sample this process's groups of one round; return begin and end."""
        mine = range(self._index, self._settings.prompts, self._settings.clients)
        requests = [self._request(number, index) for index in mine]
        await self._meet(f"round-{number}")
        began = time.perf_counter()
        groups = await asyncio.gather(*(self._rollout.complete(r, timeout=self._settings.timeout) for r in requests))
        ended = time.perf_counter()
        for completion in (completion for group in groups for completion in group):
            self.checked.add(completion, expected=self._settings.new_tokens)
        return [began, ended]

    def _request(self, number: int, index: int) -> pb.GenerateRequest:
        settings = self._settings
        return pb.GenerateRequest(
            request_id=f"bench-{number}-{index}",
            prompt_token_ids=settings.prompt(number, index),
            # With a seed, as the coordinator asks.
            sampling_params=pb.SamplingParams(
                temperature=settings.temperature, max_tokens=settings.new_tokens, seed=number * settings.prompts + index
            ),
            sample_count=settings.group_size,
        )

    async def _greedy(self) -> dict[str, list[float]]:
        request = pb.GenerateRequest(
            request_id="greedy",
            prompt_token_ids=self._settings.prompt(-1, 0),
            sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=GREEDY_TOKENS),
        )
        (completion,) = await self._rollout.complete(request, timeout=self._settings.timeout)
        return {"token_ids": completion.token_ids.tolist(), "logprobs": completion.logprobs.tolist()}

    async def _meet(self, place: str) -> None:
        """Return when every client is there."""
        await asyncio.to_thread(self._wait_for_all, place)

    def _wait_for_all(self, place: str) -> None:
        (self._folder / f"{place}.{self._index}").touch()
        deadline = time.monotonic() + _MEET_SECONDS
        while len(list(self._folder.glob(f"{place}.*"))) < self._settings.clients:
            if time.monotonic() > deadline:
                raise DeadlinePassed(f"another client did not come to {place} in {_MEET_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)


async def _measure(settings: Settings, index: int, target: str, folder: Path) -> dict[str, Any]:
    async with open_channel(target, None) as channel:
        return await Client(settings, index, AsyncRolloutClient(channel, peer="the rollout service"), folder).measure()


if __name__ == "__main__":
    die_with_parent()
    given, out = Settings.read(Path(sys.argv[1])), Path(sys.argv[4])
    result = asyncio.run(_measure(given, int(sys.argv[2]), sys.argv[3], out.parent))
    out.write_text(json.dumps(result), encoding="utf-8")
