"""Selections in a whole run: answers and pairs of scored groups are trained on, the others are dropped by name."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fourfold.coordinator.client import AsyncScorerClient
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold_coordinator.state.ledger import RecordedSample
from tests.fakes.stage import Stage, fresh_processes, hang_in_step, until
from tests.fakes.toy import write_model
from tests.fakes.toy_scorers import FakeReference, FakeReward

PAIRS: dict[str, Any] = {"preset": "online-dpo"}


def position_of(sample_id: str) -> int:
    return int(sample_id[1:8])


def by_index(*scores: float, alike: tuple[int, ...] = ()) -> Callable[[reward.ScoreItem], reward.SampleScore | None]:
    """Score the samples of a group in their order; those of the positions `alike` are all 0."""

    def outcome(item: reward.ScoreItem) -> reward.SampleScore | None:
        name = item.experience.sample_id
        if name.startswith("eval"):
            return None
        return reward.SampleScore(score=0.0 if position_of(name) in alike else scores[int(name[-1])])

    return outcome


async def test_a_pair_of_each_group_is_trained_on_and_the_others_are_dropped(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=2, algorithm=PAIRS, batch={"tokens_per_micro_batch": 4096})
    reference = FakeReference("reference-0", stage.config)
    stage.others.append(reference)
    stage.reward.outcome = by_index(0.25, 1.0, 0.0, 0.5, alike=(1,))
    await stage.complete()
    assert [sorted({position_of(n) for n in ids}) for ids in stage.trainer.batches.values()] == [[0, 2, 3], [4, 5, 6]]
    chosen = {name[-1] for ids in stage.trainer.batches.values() for name in ids}
    assert chosen == {"1", "2"}, "the greatest and the smallest score"
    assert stage.report()["dropped"] == {"NOT_SELECTED": 2 * 6 + 4}
    lines = stage.lines("samples.jsonl")
    assert Counter(line["dropped"] for line in lines) == {"": 12, "NOT_SELECTED": 16}
    metrics = stage.lines("metrics.jsonl")
    assert metrics[0]["reward/mean"] == pytest.approx((3 * 1.75 + 0) / 16), "of all that were scored"
    assert metrics[0]["groups/filter_accept_rate"] == 0.75 and metrics[0]["diagnosis"] == ""
    assert {name[-1] for name in reference.asked} == {"1", "2"}, "the reference reads what is trained on"


async def test_the_number_of_answers_of_a_step_varies_and_a_killed_run_goes_on_with_the_same(
    make_stage: Callable[..., Stage],
) -> None:
    algorithm = {"preset": "rejection-sampling", "selection": {"kind": "above", "threshold": 0.5}}

    def uneven(item: reward.ScoreItem) -> reward.SampleScore | None:
        name = item.experience.sample_id
        good = int(name[-1]) <= position_of(name) % 4 if not name.startswith("eval") else False
        return reward.SampleScore(score=float(good))

    batches = []
    for stops in (False, True):
        stage = make_stage(steps=4, algorithm=algorithm)
        stage.reward.outcome = uneven
        if stops:
            hangs = hang_in_step(stage, 4)
            await stage.start()
            await asyncio.wait_for(hangs.wait(), 10)
            await stage.kill()
            await fresh_processes(stage)
            stage.reward.outcome = uneven
        await stage.complete()
        # A group that is issued again has another number between its position and the index of the sample.
        batches.append([[(name[:8], name[-1]) for name in ids] for ids in stage.trainer.batches.values()])
        assert [len(ids) for ids in stage.trainer.batches.values()] == [1 + 2 + 3, 4 + 1 + 2, 3 + 4 + 1, 2 + 3 + 4]
        counts = stage.ledger().dropped()
        assert set(counts) <= {"NOT_SELECTED", "TRAINER_RESTORED", "COORDINATOR_RESTARTED"}
    assert batches[0] == batches[1]


async def test_a_step_of_which_nothing_is_selected_is_skipped_with_the_reason(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=1, algorithm=PAIRS | {"filter": {"max_rounds": 2}})
    stage.others.append(FakeReference("reference-0", stage.config))
    stage.reward.outcome = by_index(0.5, 0.5, 0.5, 0.5)
    masks: list[bool] = []
    stage.trainer.on_batch = lambda samples: masks.extend(bool(s.loss_mask.any()) for s in samples)
    await stage.complete()
    assert masks == [False] * 12, "three groups without a token in the loss, as without a group that the filter kept"
    assert stage.report()["dropped"] == {"NOT_SELECTED": 12}
    assert "NO_ACTION_TOKENS" in stage.lines("metrics.jsonl")[0]["diagnosis"]


async def test_a_pair_that_new_scores_make_equal_is_replaced(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=3, algorithm=PAIRS, asynchrony={"max_policy_lag": 1})
    stage.others.append(FakeReference("reference-0", stage.config))
    stage.reward.outcome = by_index(0.25, 1.0, 0.0, 0.5)
    held, go, equal = asyncio.Event(), asyncio.Event(), set[int]()

    async def hold(step: int) -> None:
        if step == 2:
            held.set()
            await go.wait()

    stage.trainer.on_train = hold
    await stage.start()
    await asyncio.wait_for(held.wait(), 10)
    await until(lambda: len({row.position for row in ready(stage)}) >= 6)
    equal.add(min(row.position for row in ready(stage) if row.position > 5))
    other = FakeReward("other-0", stage.config)
    other.name, other.outcome = "new@2", by_index(0.25, 0.0, 2.0, 0.5, alike=tuple(equal))
    await other.start()
    stage.others.append(other)
    async with AsyncScorerClient(stage.address, timeout=10) as client:
        await client.swap("reward", [other.target])
    go.set()
    await stage.check_end()
    last = {(position_of(name), name[-1]) for name in stage.trainer.batches[3]}
    assert not equal & {position for position, _ in last} and len(last) == 6
    assert {(line["sample_id"][-1], line["score"]) for line in of_step(stage, 3)} >= {("1", 0.0), ("2", 2.0)}
    assert set(stage.report()["dropped"]) == {"NOT_SELECTED"}


def ready(stage: Stage) -> list[RecordedSample]:
    ledger = stage.ledger()
    try:
        return ledger.recorded()
    finally:
        ledger.close()


def of_step(stage: Stage, step: int) -> list[dict[str, Any]]:
    return [line for line in stage.lines("samples.jsonl") if line["step"] == step and not line["dropped"]]


async def test_a_teacher_takes_the_place_of_scores(make_stage: Callable[..., Stage], tmp_path: Path) -> None:
    source = str(write_model(tmp_path / "teacher"))
    stage = make_stage(
        steps=3,
        algorithm={"preset": "on-policy-distill"},
        data={"holdout": None},
        reference={"source": source},
        asynchrony={"max_policy_lag": 1},
    )
    reference = FakeReference("reference-0", stage.config)
    stage.others.append(reference)
    sent: list[tuple[float | None, int]] = []
    stage.trainer.on_batch = lambda samples: sent.extend((s.score, len(s.reference_logprobs)) for s in samples)
    await stage.start(join=False)
    for member in stage.members:
        if member is not stage.reward:  # the run waits for none
            await member.join(stage.address)
    assert await stage.finish() == 0
    assert len(sent) == 36 and all(score == 0 and length for score, length in sent)
    assert set(reference.asked) == {name for ids in stage.trainer.batches.values() for name in ids}
    assert all(row["diagnosis"] == "" and "reward/max" not in row for row in stage.lines("metrics.jsonl"))
