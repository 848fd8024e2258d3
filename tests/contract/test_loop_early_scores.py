"""The real coordinator with samples that finish one after the other: scores and reference of the first come early."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fourfold.errors import Unavailable
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.sample import Sample
from fourfold_coordinator.training import groups
from tests.contract.test_loop import BEFORE, digest
from tests.contract.test_loop_filter import constant_at
from tests.fakes.stage import Stage, until
from tests.fakes.toy_scorers import FakeReference

NEVER: dict[str, Any] = {"evaluation": {"every_steps": 100}}
LAST = 3  # index in a group of four


@pytest.fixture(autouse=True)
def slow_scorer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each scorer count as a slow one."""
    monkeypatch.setattr(groups, "_SLOW_SECONDS", 0.0)
    monkeypatch.setattr(groups, "_GATHER_SECONDS", 0.0)


class Tail:
    """A stage in which `on_last` is awaited before the last sample of each group ends, from the second step on."""

    def __init__(self, stage: Stage, on_last: Callable[[str], Any] | None = None) -> None:
        self.stage, self.on_last = stage, on_last
        self.on_next_to_last: Callable[[str], Any] | None = None  # the same for the sample before it
        self.calls: list[list[str]] = []  # the samples of each Score call, without those of evaluations
        self.scored: list[str] = []  # those that an outcome was sent for
        self._answer = stage.reward.Score
        stage.reward.Score = self._score  # type: ignore[method-assign]
        stage.rollouts[0].on_finish = self._finish

    async def _score(self, request: reward.ScoreRequest, context: Any) -> reward.ScoreResponse:
        names = [item.experience.sample_id for item in request.items]
        if names[0].startswith("eval"):
            return await self._answer(request, context)
        self.calls.append(names)
        response = await self._answer(request, context)
        self.scored += names
        return response

    async def _finish(self, request: rollout.GenerateRequest, index: int) -> None:
        group = request.request_id.rpartition("-")[0]
        hook = {LAST: self.on_last, LAST - 1: self.on_next_to_last}.get(index)
        if self.stage.trainer.batches and group.startswith("p") and hook is not None:
            await hook(group)

    def others(self, group: str) -> set[str]:
        return {f"{group}-{index}" for index in range(LAST)}

    async def until_scored(self, group: str) -> None:
        """Wait for the scores of all samples but the last."""
        await until(lambda: self.others(group) <= set(self.scored))


def with_reference(stage: Stage) -> FakeReference:
    reference = FakeReference("reference-0", stage.config)
    stage.others.append(reference)
    return reference


async def test_scores_and_reference_come_while_the_slowest_sample_runs(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=3, algorithm={"kl": {"coef": 0.1}}, **NEVER)
    reference, samples = with_reference(stage), list[Sample]()
    stage.trainer.on_batch = samples.extend
    waited: list[str] = []

    async def on_last(group: str) -> None:
        await tail.until_scored(group)
        await until(lambda: tail.others(group) <= set(reference.asked))
        waited.append(group)

    tail = Tail(stage, on_last)
    await stage.complete()
    assert len(waited) == 6, "all groups but those of the first step, whose scorer is not known yet"
    for group in waited:
        calls = [names for names in tail.calls if names[0].startswith(group)]
        assert calls[-1] == [f"{group}-{LAST}"] and len(calls) <= 3, "log2(4) + 1"
    assert sorted(tail.scored) == sorted(reference.asked) == sorted(s.sample_id for s in samples)
    assert all(len(s.reference_logprobs) == len(s.token_ids) and s.score is not None for s in samples)


async def test_the_reference_waits_for_a_filter(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=2, algorithm={"kl": {"coef": 0.1}, "filter": {"keep": "varied", "max_rounds": 8}}, **NEVER)
    reference = with_reference(stage)
    early: list[str] = []

    async def on_last(group: str) -> None:
        await tail.until_scored(group)
        early.extend(name for name in reference.asked if name.startswith(group))

    tail = Tail(stage, on_last)
    await stage.complete()
    assert early == []
    trained = {name for names in stage.trainer.batches.values() for name in names}
    assert set(reference.asked) == trained, "none of a group that was filtered out"


async def test_samples_that_finish_together_are_scored_in_one_call(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "_GATHER_SECONDS", 60.0)
    stage = make_stage(steps=3, batch={"group_size": 3}, **NEVER)
    tail, (engine,) = Tail(stage), stage.rollouts
    in_order = engine._answers
    monkeypatch.setattr(engine, "_answers", lambda request: in_order(request)[::-1])
    await stage.complete()
    assert len(tail.calls) == 9 and all(len(names) == 3 for names in tail.calls)
    assert all(names == sorted(names) for names in tail.calls), "in order of their index"


async def test_a_fast_scorer_gets_one_call_for_each_group(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "_SLOW_SECONDS", 60.0)
    stage = make_stage(steps=2, **NEVER)

    async def on_last(group: str) -> None:
        await asyncio.sleep(0.05)  # time enough for calls that do not come
        assert not tail.others(group) & set(tail.scored)

    tail = Tail(stage, on_last)
    await stage.complete()
    assert stage.report()["faults"] == []


async def test_the_last_call_does_not_wait_for_an_early_one(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=2, **NEVER)

    def called(group: str, last: bool) -> bool:
        return any(names[0].startswith(group) and (f"{group}-{LAST}" in names) == last for names in tail.calls)

    async def on_last(group: str) -> None:
        await until(lambda: called(group, last=False))

    async def on_score() -> None:
        group = tail.calls[-1][0].rpartition("-")[0] if tail.calls else ""
        if stage.trainer.batches and not called(group, last=True):
            await until(lambda: called(group, last=True))

    tail = Tail(stage, on_last)
    stage.reward.on_score = on_score
    await stage.complete()


@pytest.mark.parametrize("kind", BEFORE)
async def test_early_scores_change_nothing_that_the_trainer_receives(
    make_stage: Callable[..., Stage], kind: str
) -> None:
    changes, before = BEFORE[kind]
    stage, batches = make_stage(steps=6, **changes), list[list[Sample]]()
    if kind == "filter":
        stage.reward.outcome = constant_at(every=3)
    stage.trainer.on_batch = batches.append
    tail = Tail(stage)
    tail.on_last = tail.until_scored
    await stage.complete()
    assert digest(batches) == before


async def test_samples_with_an_error_are_dropped_while_others_of_their_group_run(
    make_stage: Callable[..., Stage],
) -> None:
    stage = make_stage(steps=2, **NEVER)
    broken, bad = reward.SampleError(code=2, reason="RAISED", message="why"), "p0000004-0"
    stage.reward.outcome = lambda item: (
        reward.SampleScore(error=broken)
        if item.experience.sample_id.startswith(bad) and not item.experience.sample_id.endswith(f"-{LAST}")
        else None
    )
    tail = Tail(stage)
    tail.on_last = tail.until_scored
    # A call of its own for this one, after the retry of those before it.
    tail.on_next_to_last = lambda group: until(lambda: tail.scored.count(f"{group}-0") >= 1 + (group == bad))
    await stage.complete()
    assert stage.report()["dropped"] == {"RAISED": 3, "GROUP_TOO_SMALL": 1}
    assert all(tail.scored.count(name) == 2 for name in tail.others(bad)), "each has its own retry"


async def test_an_early_call_that_is_given_up_ends_the_sampling_of_its_group(
    make_stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_stage(steps=2, reward={"on_error": "drop"}, retry={"infrastructure": 0}, **NEVER)
    ended, bad, finished = list[str](), "p0000004-0", list[str]()
    add = groups._FinishedSamples.add

    def note(self: Any, sample: Sample) -> None:
        finished.append(sample.sample_id)
        add(self, sample)

    monkeypatch.setattr(groups._FinishedSamples, "add", note)

    def begun() -> bool:
        return any(names[0].startswith(bad) for names in tail.calls)

    async def on_next_to_last(group: str) -> None:
        if group == bad:
            await until(begun)

    async def on_last(group: str) -> None:
        if group == bad:
            try:
                await asyncio.sleep(30)
            finally:
                ended.append(group)

    async def on_score() -> None:
        if tail.calls and tail.calls[-1][0].startswith(bad):
            await until(lambda: f"{bad}-{LAST - 1}" in finished)
            raise Unavailable("gone")

    tail = Tail(stage, on_last)
    tail.on_next_to_last = on_next_to_last
    stage.reward.on_score = on_score
    await stage.complete()
    assert ended == [bad], "the engine's call was cancelled"
    lines = {line["sample_id"]: line["dropped"] for line in stage.lines("samples.jsonl")}
    assert {lines[name] for name in tail.others(bad)} == {"UNAVAILABLE"}, (
        "each that was sampled, with a call or without"
    )
    assert f"{bad}-{LAST}" not in lines


async def test_a_call_that_fails_repeats_only_what_is_not_finished(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=3, **NEVER)
    failed: list[str] = []

    async def on_last(group: str) -> None:
        await tail.until_scored(group)
        if group not in failed:
            failed.append(group)
            raise Unavailable("the engine lost its samples")

    tail = Tail(stage, on_last)
    await stage.complete()
    assert len(failed) == 6 and stage.report()["dropped"] == {}
    trained = [name for names in stage.trainer.batches.values() for name in names]
    assert sorted(tail.scored) == sorted(trained), "each sample is scored once"
    again = [r for r in stage.rollouts[0].requests if r.request_id.endswith("-1")]
    assert [r.sample_count for r in again] == [1] * 6
