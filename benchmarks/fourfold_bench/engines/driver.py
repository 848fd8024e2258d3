"""Simulates rollout services: real gRPC servers and leases, and engines that only wait.

    python -m fourfold_bench.engines.driver PLAN.json    serves the engines of a `DriverPlan` until its parent ends it

An engine with a speed shares it equally among its samples, as a GPU does; an engine without one answers each request
after a fixed time. What an engine sends is encoded once, so that this process takes little of the machine's CPU time.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np

from fourfold.coordinator.client import MembershipClient
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.host.process import raise_file_limit
from fourfold.host.process_tree import die_with_parent
from fourfold.rollout.v1 import rollout_control_service_pb2 as control
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rpc.channel import SERVER_OPTIONS, open_channel
from fourfold.rpc.codec import pack_floats
from fourfold.service.membership import Membership

VOCABULARY_SIZE: Final = 49_152
_RATE_SECONDS: Final = 1.0
_ADDRESS_POLL_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverPlan:
    """The engines of one driver process."""

    names: tuple[str, ...]
    address_file: str  # of the coordinator
    tokenizer_sha256: str  # hexadecimal
    tokens: int  # mean tokens of a sample
    latency: float  # seconds of a request to an engine without a speed
    ends: int  # times at which the samples of such a request end
    capacity: int  # samples of one engine
    speeds: tuple[float, ...] = ()  # tokens per second, one for each name; empty: engines without a speed
    silent: bool = False  # without load reports

    def write(self, path: Path) -> Path:
        """Write the plan for `read`; return the path."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> DriverPlan:
        """Return the plan of a file."""
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return cls(**fields)


class SharedSpeed:
    """Samples that share one engine's speed equally. Virtual time is the tokens that each sample has got so far."""

    def __init__(self, speed: float) -> None:
        self.speed, self.sampled = speed, 0.0
        self._virtual, self._now = 0.0, time.monotonic()
        self._queue: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._changed = asyncio.Event()

    @property
    def running(self) -> int:
        return len(self._queue)

    def advance(self) -> None:
        """Move the virtual time to the present, and end the samples that have all their tokens."""
        now = time.monotonic()
        while self._queue:
            rate, end = self.speed / len(self._queue), self._queue[0][0]
            seconds = (end - self._virtual) / rate
            if self._now + seconds > now:
                self.sampled += (now - self._now) * self.speed
                self._virtual += (now - self._now) * rate
                break
            self.sampled += seconds * self.speed
            self._now, self._virtual = self._now + seconds, end
            future = heapq.heappop(self._queue)[2]
            if not future.done():
                future.set_result(None)
        self._now = now

    def add(self, tokens: int) -> asyncio.Future[None]:
        """Add a sample; the future is done when it has its tokens."""
        self.advance()
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (self._virtual + tokens, next(self._numbers), future))
        self._changed.set()
        return future

    async def run(self) -> None:
        """End samples in time, until cancelled."""
        while True:
            self.advance()
            wait = 1.0
            if self._queue:
                wait = (self._queue[0][0] - self._virtual) * len(self._queue) / self.speed
            self._changed.clear()
            try:
                async with asyncio.timeout(max(wait, 0.001)):
                    await self._changed.wait()
            except TimeoutError:
                pass


@lru_cache(maxsize=64)
def _finished(first: int, count: int, tokens: int) -> bytes:
    """Return the encoded response that ends `count` samples with `tokens` tokens each."""
    rng = np.random.default_rng(tokens)
    ids = rng.integers(300, VOCABULARY_SIZE, tokens, dtype=np.int32).tobytes()
    logprobs = (-rng.exponential(size=tokens)).astype(np.float32).tobytes()
    reason = rollout.FINISH_REASON_LENGTH
    chunks = [
        rollout.SampleChunk(sample_index=first + i, token_ids=ids, logprobs=logprobs, finish_reason=reason)
        for i in range(count)
    ]
    return rollout.GenerateResponse(chunks=chunks).SerializeToString()


class SimulatedEngine:
    """One rollout service."""

    def __init__(self, plan: DriverPlan, index: int) -> None:
        self._plan, self.name = plan, plan.names[index]
        self._shared = SharedSpeed(plan.speeds[index]) if plan.speeds else None
        self._running = self._sampled = 0
        self.finished = 0  # samples
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler("fourfold.rollout.v1.RolloutService", self._rollout_methods()),
                grpc.method_handlers_generic_handler("fourfold.rollout.v1.RolloutControlService", self._control()),
            )
        )

    def _rollout_methods(self) -> dict[str, Any]:
        return {
            "GetInfo": grpc.unary_unary_rpc_method_handler(self._get_info),
            "Generate": grpc.unary_stream_rpc_method_handler(
                self._generate, request_deserializer=rollout.GenerateRequest.FromString
            ),
            "WatchLoad": grpc.unary_stream_rpc_method_handler(
                self._watch_load, request_deserializer=rollout.WatchLoadRequest.FromString
            ),
        }

    def _control(self) -> dict[str, Any]:
        return {
            "DescribeEngine": grpc.unary_unary_rpc_method_handler(self._describe),
            "ProbeLogprobs": grpc.unary_unary_rpc_method_handler(
                self._probe, request_deserializer=control.ProbeLogprobsRequest.FromString
            ),
        }

    async def start(self) -> str:
        """Listen; return HOST:PORT."""
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def run(self) -> None:
        """Sample until cancelled."""
        if self._shared is not None:
            await self._shared.run()

    async def _get_info(self, request: bytes, context: Any) -> bytes:
        return rollout.GetInfoResponse(
            model="simulated",
            tokenizer_sha256=bytes.fromhex(self._plan.tokenizer_sha256),
            max_context_tokens=1 << 16,
            vocabulary_size=VOCABULARY_SIZE,
            max_concurrent_samples=self._plan.capacity,
        ).SerializeToString()

    async def _generate(self, request: rollout.GenerateRequest, context: Any) -> AsyncIterator[bytes]:
        count = request.sample_count
        self._running += count
        try:
            if self._shared is None:
                async for response in self._after_latency(count):
                    yield response
            else:
                async for response in self._shared_samples(self._shared, request):
                    yield response
        finally:
            self._running -= count

    async def _after_latency(self, count: int) -> AsyncIterator[bytes]:
        plan, ends = self._plan, min(self._plan.ends, count)
        for part in range(ends):
            await asyncio.sleep(plan.latency / ends)
            first, last = count * part // ends, count * (part + 1) // ends
            yield _finished(first, last - first, plan.tokens)
            self._sampled += (last - first) * plan.tokens
            self.finished += last - first

    async def _shared_samples(self, shared: SharedSpeed, request: rollout.GenerateRequest) -> AsyncIterator[bytes]:
        """End each sample on its own; the lengths are even from half to one and a half of the mean."""
        rng = np.random.default_rng(request.sampling_params.seed)
        lengths = rng.integers(self._plan.tokens // 2, self._plan.tokens * 3 // 2 + 1, request.sample_count).tolist()
        waiting = {asyncio.ensure_future(shared.add(n)): (index, n) for index, n in enumerate(lengths)}
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                index, tokens = waiting.pop(future)
                self.finished += 1
                yield _finished(index, 1, tokens)

    async def _watch_load(self, request: rollout.WatchLoadRequest, context: Any) -> AsyncIterator[bytes]:
        period, rate, before = request.period.ToNanoseconds() / 1e9, 0.0, 0.0
        if self._plan.silent:
            await asyncio.Event().wait()
        while True:
            sampled, running = float(self._sampled), self._running
            if self._shared is not None:
                self._shared.advance()
                sampled, running = self._shared.sampled, self._shared.running
            if running or sampled > before:  # as the real service: seconds without samples say nothing
                rate = (sampled - before) / period
            before = sampled
            yield rollout.WatchLoadResponse(
                running_sample_count=running, token_rate=rate, sampled_token_count=int(sampled)
            ).SerializeToString()
            await asyncio.sleep(period)

    async def _describe(self, request: bytes, context: Any) -> bytes:
        return control.DescribeEngineResponse(
            host_id="here",
            backends=["gloo"],
            weight_state=control.WEIGHT_STATE_CLEAN,
            worker_count=1,
            device_type="cpu",
        ).SerializeToString()

    async def _probe(self, request: control.ProbeLogprobsRequest, context: Any) -> bytes:
        return control.ProbeLogprobsResponse(logprobs=probe_logprobs(len(request.token_ids) // 4)).SerializeToString()


def probe_logprobs(count: int) -> bytes:
    """Return the encoded log-probabilities that trainer and engines give `count` tokens of the probe."""
    values = np.full(count, -1.0, np.float32)
    values[0] = np.nan
    return pack_floats(values)


def wait_for_address(file: Path) -> str:
    """Return the coordinator's address when its file is there; the benchmark ends a process that waits too long."""
    while not file.is_file():
        time.sleep(_ADDRESS_POLL_SECONDS)
    return file.read_text(encoding="utf-8").strip()


async def _serve(plan: DriverPlan) -> None:
    engines = [SimulatedEngine(plan, index) for index in range(len(plan.names))]
    targets = [await engine.start() for engine in engines]
    print(f"READY {targets[0]}", flush=True)
    address = await asyncio.to_thread(wait_for_address, Path(plan.address_file))
    channels = [open_channel(address, None) for _ in engines]
    members = [
        Membership(
            MembershipClient(channel, peer="coordinator"),
            member_id=engine.name,
            role=Role.ROLE_ROLLOUT,
            target=target,
            tokenizer_sha256=bytes.fromhex(plan.tokenizer_sha256),
            on_drain=lambda: None,
        )
        for engine, target, channel in zip(engines, targets, channels, strict=True)
    ]
    counts = Path(plan.address_file).parent / f"finished-{plan.names[0]}.json"

    async def write_counts() -> None:
        while True:
            await asyncio.sleep(0.5)
            document = json.dumps({engine.name: engine.finished for engine in engines})
            await asyncio.to_thread(counts.write_text, document, encoding="utf-8")

    await asyncio.gather(write_counts(), *(m.run() for m in members), *(e.run() for e in engines))


if __name__ == "__main__":
    die_with_parent()
    raise_file_limit()
    asyncio.run(_serve(DriverPlan.read(Path(sys.argv[1]))))
