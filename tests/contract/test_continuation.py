"""Groups on real rollout servicers over loopback whose engines die, drain, are updated or hang in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext

import numpy as np
import pytest

from fourfold.rollout import load
from fourfold.rollout.client import Completion, CompletionDraft
from fourfold.rollout.group_requests import GroupRequest
from fourfold.rollout.v1 import rollout_control_service_pb2 as control_pb
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold_coordinator.routing.replica import RetryBudget
from fourfold_coordinator.training import group_sampling
from fourfold_coordinator.training.group_sampling import GroupSampler
from fourfold_rollout.engine import EngineSample, SampleOutput, SampleRequest
from fourfold_rollout.generate import servicer as servicer_module
from tests.fakes.engine import STOP_TOKEN, FakeEngine, FakeSample
from tests.fakes.fleet import Engine, Fleet
from tests.fakes.rollout import until

PROMPT = np.array([1, 2, 3], np.int32)
TOKENS = 12
TICK_SECONDS = 0.01


class PositionSample(FakeSample):
    """A sample whose tokens depend on nothing but their position after the first prompt."""

    def put(self) -> None:
        """Put the new tokens: at position i the id 10 + i, with log-probability -(i + 1)."""
        first, self.given = self.given, self.tokens
        before = len(self.request.prompt_token_ids) - len(PROMPT)
        positions = np.arange(before + first, before + self.tokens, dtype=np.int32)
        self.request.sink.put(
            self.request.index,
            SampleOutput(token_ids=positions + np.int32(10), logprobs=-(positions + np.float32(1)), finish=self.finish),
        )


class PositionEngine(FakeEngine):
    """An engine with such samples: a continued sample equals one that was never interrupted."""

    async def submit(self, requests: Sequence[SampleRequest]) -> Sequence[EngineSample]:
        """Begin samples."""
        await super().submit([])
        new = [PositionSample(request) for request in requests]
        self.samples += new
        return new


class Groups(Fleet):
    """A fleet with a sampler of groups."""

    def __init__(self) -> None:
        super().__init__(tick_seconds=TICK_SECONDS)
        self.sampler = GroupSampler(self.router, timeout=20, newest_version=lambda: 5, stop_token_ids=[STOP_TOKEN])

    async def start(self, name: str, *, ticks: bool = True) -> Engine:
        return await self.add(name, PositionEngine(), ticks=ticks)

    def begin(self, name: str = "g") -> asyncio.Task[list[Completion]]:
        """Begin a group of three samples."""
        request = GroupRequest(
            name=name, prompt_token_ids=PROMPT, params=pb.SamplingParams(max_tokens=TOKENS, seed=1), count=3, version=0
        )
        budget = RetryBudget(infrastructure=1, data=0)

        async def sample() -> list[Completion]:
            finished: list[Completion] = []
            async with asyncio.timeout(20):
                await self.sampler.sample(request, spend=budget.spend, on_try=nullcontext, on_finished=finished.append)
            return sorted(finished, key=lambda completion: completion.sample_index)

        return asyncio.create_task(sample())


def sampled(engine: Engine) -> int:
    """Return the tokens of the shortest running sample of an engine."""
    return min((sample.given for sample in engine.engine.running), default=0)


@pytest.fixture
async def fleet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Groups]:
    monkeypatch.setattr(group_sampling, "FLUSH_SECONDS", (0.02, 0.02))
    monkeypatch.setattr(servicer_module, "_DRAIN_SECONDS", 0.05)
    fleet = Groups()
    yield fleet
    await fleet.close()


def check(samples: list[Completion]) -> list[list[tuple[int, int]]]:
    """Check that tokens and log-probabilities are those of a sample that was not interrupted; return the versions."""
    for index, sample in enumerate(samples):
        assert sample.sample_index == index
        assert sample.token_ids.tolist() == list(range(10, 10 + TOKENS))
        assert sample.logprobs.tolist() == [-(i + 1) for i in range(TOKENS)]
        assert sample.finish_reason == pb.FINISH_REASON_LENGTH
        assert sum(span.token_count for span in sample.version_spans) == TOKENS
    return [[(span.policy_version, span.token_count) for span in sample.version_spans] for sample in samples]


async def _partly(fleet: Groups, engine: Engine) -> asyncio.Task[list[Completion]]:
    """Begin a group on an engine that does not tick; return when the coordinator has four tokens of each sample."""
    task = fleet.begin()
    await until(lambda: engine.engine.running_count == 3)
    received: list[int] = []
    take = CompletionDraft.add
    with pytest.MonkeyPatch.context() as patch:

        def add(draft: CompletionDraft, chunk: pb.SampleChunk) -> None:
            take(draft, chunk)
            received.append(draft.token_count)

        patch.setattr(CompletionDraft, "add", add)
        engine.engine.tick(4)
        await until(lambda: received.count(4) == 3)
    return task


async def test_a_group_whose_engine_dies_continues_with_newer_weights(fleet: Groups) -> None:
    first = await fleet.start("a", ticks=False)
    task = await _partly(fleet, first)
    other = await fleet.start("b")
    await other.update(2, control_pb.PAUSE_MODE_WAIT)
    await first.server.stop(0)
    assert check(await task) == [[(0, 4), (2, TOKENS - 4)]] * 3
    assert [sample.versions for sample in other.engine.samples] == [[2] * (TOKENS - 4)] * 3
    assert fleet.router.engine_metrics()["rollout/continued_tokens"] == 12


async def test_a_group_whose_engine_drains_continues_at_once(fleet: Groups) -> None:
    first = await fleet.start("a", ticks=False)
    task = await _partly(fleet, first)
    other = await fleet.start("b")
    fleet.registry.deregister(first.token)  # as a service does before it drains
    await first.servicers.rollout.drain()
    assert check(await task) == [[(0, TOKENS)]] * 3
    assert [sample.tokens for sample in other.engine.samples] == [TOKENS - 4] * 3


async def test_a_group_that_updates_abort_continues_on_the_same_engine(fleet: Groups) -> None:
    updates = 3
    only = await fleet.start("a", ticks=False)
    task = await _partly(fleet, only)
    for version in range(1, updates + 1):
        await only.update(version, control_pb.PAUSE_MODE_ABORT)
        await until(lambda: only.engine.running_count == 3)
        only.engine.tick(2)
        await until(lambda: sampled(only) == 2)
    fleet.ticking.add("a")
    newest = [(version, 2) for version in range(1, updates)] + [(updates, TOKENS - 4 - 2 * (updates - 1))]
    assert check(await task) == [[(0, 4), *newest]] * 3, "more updates than tries"
    for samples in (only.engine.samples[i::3] for i in range(3)):
        assert [version for sample in samples for version in sample.versions] == [
            0, 0, 0, 0, *(version for version, count in newest for _ in range(count))
        ]  # fmt: skip


async def test_samples_of_an_engine_that_stalls_continue_on_another(
    fleet: Groups, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its front end answers and reports samples."""
    monkeypatch.setattr(load, "PERIOD_SECONDS", 0.1)
    monkeypatch.setattr(load, "STALL_SECONDS", 1.0)
    hung = await fleet.start("a", ticks=False)
    task = await _partly(fleet, hung)
    other = await fleet.start("b")
    assert check(await task) == [[(0, TOKENS)]] * 3
    assert [sample.tokens for sample in other.engine.samples] == [TOKENS - 4] * 3
    assert "engine samples nothing, its calls go elsewhere: member=a" in caplog.text
    assert fleet.replica("a").breaker.open, "one call at a time must show that it works again"
    await until(lambda: hung.engine.running_count == 0)
