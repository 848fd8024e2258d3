"""Calls an engine in one of the ways of `fourfold bench gateway`; one process of several that share the requests.

    python -m fourfold_bench.gateway.client SETTINGS INDEX WAY TARGETS OUT

TARGETS is a JSON object: host:port by way. Closed loop: each of the process's requests is followed by the next one. The
first ones have different lengths, so that requests end at different times, as in a run. Open loop: requests have
their times, and latency counts from these; blocks of direct calls and blocks of WAY take turns.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from fourfold.agent.client import AsyncAgentClient
from fourfold.agent.v1 import agent_service_pb2 as agent
from fourfold.errors import Internal
from fourfold.host.process_tree import die_with_parent
from fourfold.rollout.client import AsyncRolloutClient
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rpc.channel import open_channel
from fourfold_bench.gateway.benchmark import BARE_PROXY, DIRECT, GatewaySettings
from fourfold_bench.models import text_of
from fourfold_bench.processes import meet

_CALL_SECONDS: Final = 300.0
_BLOCK: Final = 50  # requests of a way in a row, in the open loop
_COUNT: Final = re.compile(rb'"completion_tokens":\s*(\d+)')


class Caller(Protocol):
    """One way."""

    def make(self, name: str, prompt: list[int], new_tokens: int) -> Any:
        """Return a request."""
        ...

    async def call(self, request: Any) -> int:
        """Send a request; return the number of tokens of the answer."""
        ...


class DirectCaller:
    """Calls a rollout service."""

    def __init__(self, target: str) -> None:
        self._client = AsyncRolloutClient(open_channel(target, None), peer="rollout")

    def make(self, name: str, prompt: list[int], new_tokens: int) -> rollout.GenerateRequest:
        params = rollout.SamplingParams(temperature=1.0, max_tokens=new_tokens)
        return rollout.GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params, sample_count=1)

    async def call(self, request: rollout.GenerateRequest) -> int:
        (completion,) = await self._client.complete(request, timeout=_CALL_SECONDS)
        return len(completion.token_ids)


class GatewayCaller:
    """Calls a gateway over gRPC."""

    def __init__(self, target: str) -> None:
        self._client = AsyncAgentClient(open_channel(target, None), peer="gateway")

    def make(self, name: str, prompt: list[int], new_tokens: int) -> agent.GenerateRequest:
        params = agent.SamplingParams(temperature=1.0, max_tokens=new_tokens)
        return agent.GenerateRequest(token_ids=agent.TokenIds(ids=prompt), sampling_params=params)

    async def call(self, request: agent.GenerateRequest) -> int:
        count = 0
        async for chunk in self._client.generate(request, timeout=_CALL_SECONDS):
            count += len(chunk.token_ids) // 4
        return count


class HttpCaller:
    """Calls an OpenAI-compatible server over connections that stay open."""

    def __init__(self, target: str, *, logprobs: bool) -> None:
        host, _, port = target.rpartition(":")
        self._address, self._logprobs = (host, int(port)), logprobs
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    def make(self, name: str, prompt: list[int], new_tokens: int) -> bytes:
        body = {
            "model": "bench",
            "messages": [{"role": "user", "content": text_of(prompt)}],
            "max_tokens": new_tokens,
            "temperature": 1.0,
            "logprobs": self._logprobs,
        }
        data = json.dumps(body).encode()
        head = ["POST /v1/chat/completions HTTP/1.1", "host: 127.0.0.1", "content-type: application/json"]
        head += [f"content-length: {len(data)}", "", ""]
        return "\r\n".join(head).encode() + data

    async def call(self, request: bytes) -> int:
        reader, writer = (
            self._idle.pop() if self._idle else await asyncio.open_connection(*self._address, limit=1 << 24)
        )
        writer.write(request)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = next((int(line[15:]) for line in answer.split(b"\r\n") if line.startswith(b"content-length:")), -1)
        content = await reader.readexactly(length) if length >= 0 else b""
        found = _COUNT.search(content)
        if not answer.startswith(b"http/1.1 200") or found is None:
            raise Internal(f"the server answered {(answer + content)[:1000]!r}")
        self._idle.append((reader, writer))
        return int(found[1])


def make_caller(way: str, targets: Mapping[str, str]) -> Caller:
    """Return the caller of a way."""
    if way in (DIRECT, BARE_PROXY):
        return DirectCaller(targets[way])
    if way == "grpc":
        return GatewayCaller(targets[way])
    return HttpCaller(targets[way], logprobs=way != "http")


class Client:
    """The requests of one process."""

    def __init__(self, settings: GatewaySettings, index: int, way: str, targets: Mapping[str, str]) -> None:
        self._settings, self._index, self._way = settings, index, way
        self._targets = targets
        self._number = 0

    async def closed(self, folder: Path) -> dict[str, Any]:
        """Return the times at which requests ended after the warm-up, and their latencies, in seconds."""
        settings, caller = self._settings, make_caller(self._way, self._targets)
        slots = range(self._index, settings.concurrency, settings.clients)
        await asyncio.to_thread(meet, folder, f"begin-{self._way}", self._index, settings.clients)
        begin = time.perf_counter() + settings.warm_up
        end = begin + settings.seconds
        latencies: list[float] = []

        async def work(slot: int) -> None:
            length = max(1, settings.new_tokens * (slot + 1) // settings.concurrency)
            while time.perf_counter() < end:
                request = self._make(caller, self._way, length)
                sent = time.perf_counter()
                await self._call(caller, self._way, request, length)
                done = time.perf_counter()
                if begin <= done < end:
                    latencies.append(done - sent)
                length = settings.new_tokens

        async with asyncio.TaskGroup() as tasks:
            for slot in slots:
                tasks.create_task(work(slot))
        return {"latencies": {self._way: latencies}}

    async def open(self) -> dict[str, Any]:
        """Send requests at their times, direct ones and those of the way in turns; return the latencies in seconds."""
        settings, ways = self._settings, (DIRECT, self._way)
        callers = {way: make_caller(way, self._targets) for way in ways}
        latencies: dict[str, list[float]] = {way: [] for way in ways}
        skipped = int(settings.rate * settings.warm_up)
        count = skipped + int(settings.rate * settings.seconds) * len(ways)
        begin = time.perf_counter()

        async def send(number: int, way: str, request: Any, due: float) -> None:
            await self._call(callers[way], way, request, settings.new_tokens)
            if number >= skipped:
                latencies[way].append(time.perf_counter() - due)

        async with asyncio.TaskGroup() as tasks:
            for number in range(count):
                way, due = ways[number // _BLOCK % len(ways)], begin + number / settings.rate
                request = self._make(callers[way], way, settings.new_tokens)
                await asyncio.sleep(max(due - time.perf_counter(), 0))
                tasks.create_task(send(number, way, request, due))
        return {"latencies": latencies, "calls": count - sum(1 for n in range(count) if not n // _BLOCK % len(ways))}

    def _make(self, caller: Caller, way: str, new_tokens: int) -> Any:
        self._number += 1
        prompt = self._settings.prompt(way, self._index, self._number)
        return caller.make(f"bench-{way}-{self._index}-{self._number}", prompt, new_tokens)

    async def _call(self, caller: Caller, way: str, request: Any, new_tokens: int) -> None:
        count = await caller.call(request)
        if count != new_tokens:
            raise Internal(f"{way}: {count} tokens instead of {new_tokens}")


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return percentiles in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50_ms": 1e3 * cuts[49], "p95_ms": 1e3 * cuts[94], "p99_ms": 1e3 * cuts[98]}


async def _main(client: Client, settings: GatewaySettings, folder: Path) -> dict[str, Any]:
    return await client.open() if settings.rate else await client.closed(folder)


if __name__ == "__main__":
    die_with_parent()
    given, out = GatewaySettings.read(Path(sys.argv[1])), Path(sys.argv[5])
    callers = Client(given, int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
    out.write_text(json.dumps(asyncio.run(_main(callers, given, out.parent))), encoding="utf-8")
