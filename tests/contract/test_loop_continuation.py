"""The real coordinator with engines that die, drain, are updated or hang while they sample: what a run keeps of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from fourfold.rollout.v1 import rollout_control_service_pb2 as control
from fourfold.sample import Sample
from fourfold_coordinator.training import group_sampling
from tests.fakes.stage import Stage, check_books
from tests.fakes.toy import START
from tests.fakes.toy_rollout import FakeRollout

NEVER = {"evaluation": {"every_steps": 100}}


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_sampling, "FLUSH_SECONDS", (0.01, 0.01))


def two_engines(make_stage: Callable[..., Stage], **changes: Any) -> tuple[Stage, FakeRollout, FakeRollout]:
    rollouts = {"replicas": 2, **changes.pop("rollout", {})}
    # On a busy machine an engine may get no sample in the second step.
    stage = make_stage(**{"rollout": rollouts, "steps": 5, **changes})
    return stage, stage.rollouts[0], stage.rollouts[1]


def collect(stage: Stage) -> list[Sample]:
    """Return the list that gets the samples that the trainer trains on."""
    trained: list[Sample] = []
    stage.trainer.on_batch = trained.extend
    return trained


def continued(engine: FakeRollout) -> list[list[int]]:
    """Return the ids after the prompt of the requests that continue a sample."""
    prompts = [list(request.prompt_token_ids) for request in engine.requests]
    rest = [ids[len(ids) - ids[::-1].index(START) :] for ids in prompts]
    return [ids for ids in rest if ids]


def check(stage: Stage, trained: list[Sample]) -> None:
    """Check that every step is whole, that nothing was trained twice, and that each token has one version."""
    check_books(stage)
    assert stage.report()["dropped"] == {}
    assert Counter(len(ids) for ids in stage.trainer.batches.values()) == {12: stage.config.steps}
    for sample in trained:
        assert sum(span.token_count for span in sample.version_spans) == len(sample.token_ids)
        assert (sample.behavior_logprobs[sample.action_mask] < 0).all()


def total(stage: Stage, name: str) -> float:
    return float(sum(row.get(name, 0.0) for row in stage.lines("metrics.jsonl")))


async def test_samples_of_an_engine_that_is_killed_continue_on_another(make_stage: Callable[..., Stage]) -> None:
    stage, dying, other = two_engines(make_stage, **NEVER)
    trained = collect(stage)

    async def die() -> bool:
        if stage.trainer.batches:
            await asyncio.sleep(0.1)  # the tokens are on their way
            asyncio.get_running_loop().create_task(dying.kill())
            await asyncio.sleep(30)
        return False

    dying.on_partial = die
    await stage.complete()
    check(stage, trained)
    assert continued(other) and all(len(ids) == 1 for ids in continued(other))
    assert total(stage, "rollout/continued_tokens") == len(continued(other))


async def test_samples_that_an_update_aborts_continue_with_the_new_weights(make_stage: Callable[..., Stage]) -> None:
    keys: dict[str, Any] = {"asynchrony": {"max_policy_lag": 2}, "weights": {"pause": "abort", "timeout_seconds": 5.0}}
    stage = make_stage(steps=5, retry={"infrastructure": 0, "service_wait_seconds": 20.0}, **keys, **NEVER)
    (only,), trained = stage.rollouts, collect(stage)

    async def until_begin() -> bool:
        """Run on for a while; end when an update begins meanwhile."""
        begun = len(only.begun)
        for _ in range(50):
            await asyncio.sleep(0.002)
            if len(only.begun) > begun:
                return True
        return False

    only.on_partial = until_begin
    await stage.complete()
    check(stage, trained)
    assert set(only.pause_modes) == {control.PAUSE_MODE_ABORT}
    versions = [
        [span.policy_version for span in sample.version_spans if span.policy_version >= 0] for sample in trained
    ]
    assert any(len(found) == 2 and found[0] < found[1] for found in versions), versions
    assert continued(only)
