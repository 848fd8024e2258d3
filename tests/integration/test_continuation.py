"""Two real vLLM engines on CPU: one is killed while it samples a group, and the other continues its samples."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, nullcontext
from pathlib import Path

import numpy as np
import pytest

from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.host.clock import SYSTEM_CLOCK
from fourfold.rollout.client import AsyncRolloutClient, Completion, RolloutControlClient
from fourfold.rollout.group_requests import GroupRequest
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rpc.channel import open_channel
from fourfold_coordinator.routing.registry import Member, Registry
from fourfold_coordinator.routing.replica import RetryBudget
from fourfold_coordinator.routing.router import Router
from fourfold_coordinator.training import group_sampling
from fourfold_coordinator.training.group_sampling import GroupSampler
from tests.support.rollout_process import Service, start
from tests.support.tiny_models import VOCABULARY_SIZE

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

SAMPLES = 8
TOKENS = 440
END = 2  # of the tiny models
FLUSH_SECONDS = 0.1
PROMPT = np.random.default_rng(5).integers(3, VOCABULARY_SIZE, 12).astype(np.int32)


async def test_a_killed_engine_loses_few_tokens_and_no_sample(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_sampling, "FLUSH_SECONDS", (FLUSH_SECONDS, FLUSH_SECONDS))
    model, folders = tiny_model("qwen2"), [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    services = await asyncio.gather(*(asyncio.to_thread(start, model, folder) for folder in folders))
    try:
        samples, metrics = await _kill_one(services)
        channel = open_channel(services[1].target, None)
        control = RolloutControlClient(channel, peer="b")
        for sample in samples:
            given = await control.probe(np.concatenate([PROMPT, sample.token_ids]), timeout=30)
            difference = np.abs(given[len(PROMPT) :] - sample.logprobs)
            shifted = np.abs(given[len(PROMPT) :] - np.roll(sample.logprobs, 1))
            assert difference.mean() < 0.05 < 0.2 < shifted.mean(), "each token has its own log-probability"
        await channel.close()
    finally:
        for service in services:
            service.close()
    assert [sample.sample_index for sample in samples] == list(range(SAMPLES))
    for sample in samples:
        count, stopped = len(sample.token_ids), sample.finish_reason == pb.FINISH_REASON_STOP
        assert stopped or (count, sample.finish_reason) == (TOKENS, pb.FINISH_REASON_LENGTH)
        assert END not in sample.token_ids[:-1] and (sample.token_ids[-1] == END) == stopped
        assert [(span.policy_version, span.token_count) for span in sample.version_spans] == [(0, count)]
    assert len({sample.token_ids.tobytes() for sample in samples}) == SAMPLES
    assert metrics["rollout/continued_tokens"] >= SAMPLES * 10


async def _kill_one(services: list[Service]) -> tuple[list[Completion], dict[str, float]]:
    """Sample a group, and kill the engine that has it in the middle; return the samples and the token counts."""
    channels = [open_channel(service.target, None) for service in services]
    clients = [AsyncRolloutClient(channel, peer="engine") for channel in channels]
    sha256 = (await clients[0].get_info(timeout=30)).tokenizer_sha256
    registry = Registry(clock=SYSTEM_CLOCK, tokenizer_sha256=sha256, ttl=600)
    router = Router(registry, open_channel=lambda member: open_channel(member.target, None), wait_seconds=30)
    running = asyncio.create_task(router.run())
    for name, service in zip("ab", services, strict=True):
        registry.register(
            Member(
                member_id=name,
                incarnation=name * 32,
                role=Role.ROLE_ROLLOUT,
                target=service.target,
                tokenizer_sha256=sha256,
            )
        )
    replicas = router.replicas(Role.ROLE_ROLLOUT)
    async with asyncio.timeout(30):
        while not all(replica.present for replica in replicas):
            await asyncio.sleep(0.01)
    for replica in replicas:
        replica.version = 0
        router.set_unusable_reason(replica, "")
    # Ties go by name, so that engine a has the group.
    _kill_after(SAMPLES * 30, replicas[0].rollout, services[0])
    sampler = GroupSampler(router, timeout=300, newest_version=lambda: 0)
    params = pb.SamplingParams(max_tokens=TOKENS, seed=1)
    request = GroupRequest(name="g", prompt_token_ids=PROMPT, params=params, count=SAMPLES, version=0)
    budget = RetryBudget(infrastructure=1, data=0)
    finished: list[Completion] = []
    group = asyncio.create_task(
        sampler.sample(request, spend=budget.spend, on_try=nullcontext, on_finished=finished.append)
    )
    try:
        await asyncio.wait_for(group, 180)
        return sorted(finished, key=lambda completion: completion.sample_index), router.engine_metrics()
    finally:
        group.cancel()
        running.cancel()
        await asyncio.gather(group, running, return_exceptions=True)
        for channel in channels:
            await channel.close()


def _kill_after(tokens: int, client: AsyncRolloutClient, service: Service) -> None:
    """Kill an engine when its client has received so many tokens."""
    generate, received = client.generate, 0

    async def counted(
        request: pb.GenerateRequest, *, timeout: float | None = None
    ) -> AsyncGenerator[pb.SampleChunk, None]:
        nonlocal received
        async with aclosing(generate(request, timeout=timeout)) as chunks:
            async for chunk in chunks:
                yield chunk
                received += len(chunk.token_ids) // 4  # int32
                if received >= tokens and service.process.poll() is None:
                    os.kill(service.process.pid, signal.SIGKILL)

    client.generate = counted  # type: ignore[method-assign]
