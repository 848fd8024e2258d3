"""256 streams at once and a weight update in the middle: every token arrives once, under its version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from fourfold.rollout.client import Completion
from fourfold.rollout.v1 import rollout_control_service_pb2 as control_pb
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from tests.conftest import Serve
from tests.fakes.engine import FakeSample
from tests.fakes.rollout import Service, request, rollout_service

STREAMS = 256
TOKENS = 24
FLUSHES = (0.0, 0.01, 5.0, None)

Calls = dict[str, asyncio.Task[Completion]]


@pytest.fixture
async def service(serve: Serve) -> AsyncIterator[Service]:
    async with rollout_service(serve, kv_cache_tokens=STREAMS * 27, max_concurrent_samples=STREAMS) as running:
        yield running


async def start(service: Service) -> Calls:
    """Start all streams: some get tokens one by one, some at intervals, some at the end."""
    calls = {f"s{i}": asyncio.create_task(one(service, f"s{i}", FLUSHES[i % len(FLUSHES)])) for i in range(STREAMS)}
    await service.running(STREAMS)
    return calls


async def one(service: Service, name: str, flush_seconds: float | None) -> Completion:
    params = pb.SamplingParams(max_tokens=TOKENS)
    message = request(name, flush_seconds=flush_seconds, sampling_params=params)
    (completion,) = await service.client.complete(message, timeout=30)
    return completion


async def sample(service: Service, ticks: int) -> None:
    """Sample `ticks` tokens of each sample, with pauses in which chunks travel."""
    for _ in range(ticks):
        service.engine.tick()
        await asyncio.sleep(0.002)


async def update(service: Service, *, hold_ticks: int) -> None:
    """Change the weights under the running streams; sample `hold_ticks` tokens that are held back."""
    await service.pause(1, mode=control_pb.PAUSE_MODE_KEEP)
    await sample(service, 1)  # nothing may be sampled now
    await service.control.receive(epoch=1, policy_version=1, timeout=5)
    await service.control.commit(epoch=1, policy_version=1, hold=True, timeout=5)
    await sample(service, hold_ticks)


async def release(service: Service) -> None:
    await service.control.release(epoch=1, policy_version=1, timeout=5)


def drawn(service: Service) -> dict[str, FakeSample]:
    """Return the engine's samples by the name of their call."""
    return {sample.request.key.removeprefix("local/").removesuffix("-0"): sample for sample in service.engine.samples}


def check(completion: Completion, truth: FakeSample, *, tokens: int) -> None:
    """Check that a completion has the first `tokens` tokens in order, each with the version that sampled it."""
    assert completion.token_ids.tolist() == [10 + i for i in range(tokens)]
    assert completion.logprobs.tolist() == [-(i + 1.0) for i in range(tokens)]
    versions = [span.policy_version for span in completion.version_spans for _ in range(span.token_count)]
    assert versions == truth.versions[:tokens]


async def test_no_token_is_lost_or_doubled(service: Service) -> None:
    calls = await start(service)
    await sample(service, 7)
    await update(service, hold_ticks=5)
    await release(service)
    await sample(service, TOKENS)
    truth = drawn(service)
    assert len(truth) == STREAMS
    for name, call in calls.items():
        completion = await call
        check(completion, truth[name], tokens=TOKENS)
        assert completion.finish_reason == pb.FINISH_REASON_LENGTH
        assert [(s.policy_version, s.token_count) for s in completion.version_spans] == [(0, 7), (1, TOKENS - 7)]
    assert service.engine.running_count == 0
    assert sum(sample.tokens for sample in service.engine.samples) == STREAMS * TOKENS


async def test_whoever_leaves_during_the_update_takes_nobody_along(service: Service) -> None:
    calls = await start(service)
    await sample(service, 3)
    leaving = list(calls)[::2]
    for name in leaving[:64]:
        calls[name].cancel()
    await update(service, hold_ticks=2)
    for name in leaving[64:]:
        calls[name].cancel()
    await service.running(STREAMS - len(leaving))
    await release(service)
    await sample(service, TOKENS)
    truth = drawn(service)
    for name, call in calls.items():
        if name in leaving:
            with suppress(asyncio.CancelledError):
                pytest.fail(f"{name} was cancelled, and answers {await call}")
        else:
            check(await call, truth[name], tokens=TOKENS)
    assert sorted(line for line in service.engine.log if line.startswith("abandon")) == sorted(
        f"abandon local/{name}-0" for name in leaving
    )
