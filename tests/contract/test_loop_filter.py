"""Dynamic sampling: groups without differing scores are replaced, counted, and never trained on."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from fourfold.reward.v1 import reward_service_pb2 as reward
from tests.fakes.stage import Stage, check_books, fresh_processes
from tests.fakes.toy_scorers import FakeReference

VARIED = {"filter": {"keep": "varied", "max_rounds": 3}}
Outcome = Callable[[reward.ScoreItem], reward.SampleScore | None]


def position_of(sample_id: str) -> int:
    return int(sample_id[1:8])


def constant_at(*positions: int, every: int = 0) -> Outcome:
    """Scores 1, 0, 1, 0 in a group, and 0 alone in the groups of some positions."""

    def outcome(item: reward.ScoreItem) -> reward.SampleScore | None:
        name = item.experience.sample_id
        if name.startswith("eval"):
            return None
        position = position_of(name)
        if position in positions or (every and position % every == 1):
            return reward.SampleScore(score=0.0)
        return reward.SampleScore(score=float(int(name[-1]) % 2 == 0))

    return outcome


def trained_positions(stage: Stage) -> dict[int, list[int]]:
    return {step: sorted({position_of(name) for name in ids}) for step, ids in stage.trainer.batches.items()}


async def test_a_group_that_is_filtered_out_is_replaced_and_counted(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=1, algorithm=VARIED | {"kl": {"coef": 0.1}})
    reference = FakeReference("reference-0", stage.config)
    stage.others.append(reference)
    stage.reward.outcome = constant_at(0, 2, 3)
    await stage.complete()
    assert trained_positions(stage) == {1: [1, 4, 5]}, "the batch keeps its size"
    assert stage.report()["dropped"] == {"FILTERED": 12}
    filtered = [line for line in stage.lines("samples.jsonl") if line["dropped"] == "FILTERED"]
    assert sorted({position_of(line["sample_id"]) for line in filtered}) == [0, 2, 3]
    assert [line["score"] for line in filtered] == [0.0] * 12, "written with their scores"
    metrics = stage.lines("metrics.jsonl")[0]
    assert (metrics["groups/filter_accept_rate"], metrics["groups/prompts_consumed"]) == (0.5, 6)
    assert (metrics["reward/mean"], metrics["groups/useful"]) == (0.25, 0.5), "before the filter"
    assert metrics["samples/dropped"] == 12 and metrics["diagnosis"] == "", "which is no trouble"
    assert {position_of(name) for name in reference.asked} == {1, 4, 5}, "the reference reads what is trained on"
    ledger = stage.ledger()
    assert ledger.steps()[0].data_position == 6
    ledger.close()


async def test_the_batch_is_the_same_whichever_answers_come_first(make_stage: Callable[..., Stage]) -> None:
    batches = []
    for seed in range(2):
        stage = make_stage(steps=2, algorithm=VARIED)
        delays = random.Random(seed)
        stage.rollouts[0].on_generate = lambda delays=delays: asyncio.sleep(delays.random() / 20)
        stage.reward.outcome = constant_at(every=2)
        await stage.complete()
        batches.append(stage.trainer.batches)
    assert batches[0] == batches[1]


async def test_a_step_goes_on_with_what_it_has_when_too_many_prompts_were_drawn(
    make_stage: Callable[..., Stage], caplog: pytest.LogCaptureFixture
) -> None:
    stage = make_stage(steps=1, algorithm=VARIED)
    stage.reward.outcome = constant_at(0, *range(2, 100))
    await stage.start()
    with caplog.at_level(logging.WARNING):
        assert await stage.finish() == 0
    check_books(stage)
    assert trained_positions(stage) == {1: [1]}
    assert "batch is incomplete: step=1 groups=1 wanted=3 prompts=9 lost=0 filtered=8" in caplog.text
    assert stage.lines("metrics.jsonl")[0]["groups/prompts_consumed"] == 9, "max_rounds * prompts_per_step"


@pytest.mark.parametrize("rule", ["varied", "mean-inside"])
async def test_a_step_without_any_group_is_skipped_and_the_run_goes_on(
    make_stage: Callable[..., Stage], caplog: pytest.LogCaptureFixture, rule: str
) -> None:
    """With mean-inside the scores of a group that is filtered out may differ: it must not be trained on either."""
    keep = {"keep": rule, "low": 0.6, "high": 1.0, "max_rounds": 2}
    stage = make_stage(steps=2, algorithm={"filter": keep, "kl": {"coef": 0.1}})
    stage.others.append(FakeReference("reference-0", stage.config))
    stage.reward.outcome = constant_at(*range(6)) if rule == "varied" else constant_at()
    sent: list[tuple[bool, bool]] = []
    stage.trainer.on_batch = lambda samples: sent.extend(
        (bool(s.loss_mask.any()), len(s.reference_logprobs) > 0) for s in samples
    )
    await stage.start()
    with caplog.at_level(logging.WARNING):
        assert await stage.finish() == 0
    check_books(stage)
    assert "step has nothing to learn: step=1 prompts=6" in caplog.text
    assert sent[:12] == [(False, True)] * 12, "no token to train on, and all that the trainer asks for"
    assert trained_positions(stage)[1] == [3, 4, 5], "the last of them"
    steps = stage.ledger().steps()
    assert (steps[0].policy_version, steps[0].skipped_reason, steps[0].data_position) == (0, "NO_ACTION_TOKENS", 6)
    assert stage.lines("metrics.jsonl")[0]["groups/filter_accept_rate"] == 0
    if rule == "varied":
        assert trained_positions(stage)[2] == [6, 7, 8] and stage.trainer.version == 1
    else:
        assert stage.trainer.version == stage.rollouts[0].version == 0 and stage.report()["skipped_steps"] == 2


async def test_a_run_that_is_killed_while_it_filters_goes_on_as_if_it_was_not(
    make_stage: Callable[..., Stage],
) -> None:
    whole = make_stage(steps=6, algorithm=VARIED)
    whole.reward.outcome = constant_at(every=3)
    await whole.start()
    assert await whole.finish() == 0
    stage = make_stage(steps=6, algorithm=VARIED)
    stage.reward.outcome = constant_at(every=3)
    reached, calls = asyncio.Event(), 0

    async def stop() -> None:
        nonlocal calls
        if len(stage.trainer.batches) == 3:
            calls += 1
            if calls == 4:  # the first replacement of a filtered group
                reached.set()
                await asyncio.sleep(30)

    stage.rollouts[0].on_generate = stop
    await stage.start()
    async with asyncio.timeout(10):
        await reached.wait()
    await stage.kill()
    await fresh_processes(stage)
    stage.reward.outcome = constant_at(every=3)
    await stage.complete()
    assert stage.trainer.loaded == [2]
    assert trained_positions(stage) == trained_positions(whole)
    assert books(stage) == books(whole), "data positions and counts"


def books(stage: Stage) -> list[tuple[Any, ...]]:
    names = ("groups/prompts_consumed", "groups/filter_accept_rate", "samples/dropped")
    ledger = stage.ledger()
    rows = [(row.step, row.data_position, *(row.metrics[name] for name in names)) for row in ledger.steps()]
    ledger.close()
    return rows


async def test_lost_and_filtered_groups_are_told_apart(
    make_stage: Callable[..., Stage], caplog: pytest.LogCaptureFixture
) -> None:
    stage = make_stage(steps=1, algorithm={"filter": {"keep": "varied", "max_rounds": 2}})
    constant = constant_at(1, 3, 4, 5)

    def outcome(item: reward.ScoreItem) -> reward.SampleScore | None:
        if item.experience.sample_id.startswith("p0000000-"):
            return reward.SampleScore(abstain_reason="NO_IDEA")
        return constant(item)

    stage.reward.outcome = outcome
    await stage.start()
    with caplog.at_level(logging.WARNING):
        assert await stage.finish() == 0
    check_books(stage)
    # No prompt is drawn after the fourth group without use. Whether the sixth was drawn before depends on their order.
    (found,) = re.findall(
        r"batch is incomplete: step=1 groups=1 wanted=3 prompts=(\d) lost=1 filtered=(\d)", caplog.text
    )
    assert found in (("5", "3"), ("6", "4"))
    assert stage.report()["dropped"] == {"FILTERED": 4 * int(found[1]), "NO_IDEA": 4}
    assert "4 NO_IDEA" in stage.lines("metrics.jsonl")[0]["diagnosis"]
    assert "FILTERED" not in stage.lines("metrics.jsonl")[0]["diagnosis"]
