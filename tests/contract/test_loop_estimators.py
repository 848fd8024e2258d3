"""Estimators in the loop: greedy completions to compare with (ReMax), or no group at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.sample import Sample
from tests.fakes.stage import Stage
from tests.fakes.toy_scorers import FakeReference

REMAX = {"advantage": {"kind": "remax"}}


def is_baseline(sample_id: str) -> bool:
    """Of groups of four: the greedy completion has the last id."""
    return not sample_id.startswith("eval") and sample_id.endswith("-4")


async def test_remax_compares_every_sample_with_the_greedy_answer(make_stage: Callable[..., Stage]) -> None:
    stage = make_stage(steps=2, algorithm=REMAX | {"kl": {"coef": 0.1}})
    reference = FakeReference("reference-0", stage.config)
    stage.others.append(reference)
    samples: list[Sample] = []
    stage.trainer.on_batch = samples.extend
    stage.reward.outcome = lambda item: (
        reward.SampleScore(score=float(item.experience.sample_id[1:8]) + 0.25)
        if is_baseline(item.experience.sample_id)
        else None
    )
    await stage.complete()
    assert len(samples) == 24 and not any(is_baseline(s.sample_id) for s in samples), "it is not trained on"
    assert all(s.baseline_score == float(s.sample_id[1:8]) + 0.25 for s in samples), "that of its own prompt"
    assert stage.report()["dropped"] == {"BASELINE": 6}
    lines = [line for line in stage.lines("samples.jsonl") if line["dropped"]]
    assert [line["dropped"] for line in lines] == ["BASELINE"] * 6
    assert all(line["score"] is not None and line["group_id"] in line["sample_id"] for line in lines)
    assert not any(is_baseline(name) for name in reference.asked)
    assert "BASELINE" not in stage.lines("metrics.jsonl")[0]["diagnosis"]
    trained = [r for r in stage.rollouts[0].requests if not r.request_id.startswith("eval")]
    greedy = [r for r in trained if r.sampling_params.temperature == 0]
    assert [r.sample_count for r in greedy] == [1] * 6 and len(trained) == 12
    assert len({r.request_id for r in trained}) == 12, "an engine refuses two live requests with one id"


async def test_the_greedy_answer_is_sampled_and_scored_beside_its_group(make_stage: Callable[..., Stage]) -> None:
    """The group is not answered before its greedy completion was scored: one after the other would wait forever."""
    stage = make_stage(steps=1, algorithm=REMAX, batch={"prompts_per_step": 1})
    scored = asyncio.Event()
    engine = stage.rollouts[0]

    async def wait() -> None:
        request = engine.requests[-1]
        if not request.request_id.startswith("eval") and request.sampling_params.temperature > 0:
            await scored.wait()

    def note(item: reward.ScoreItem) -> None:
        if is_baseline(item.experience.sample_id):
            scored.set()

    engine.on_generate, stage.reward.outcome = wait, note
    await stage.complete()


@pytest.mark.parametrize("trouble", ["score", "sampling"])
async def test_without_its_greedy_answer_a_group_is_lost_and_replaced(
    make_stage: Callable[..., Stage], trouble: str
) -> None:
    stage = make_stage(steps=1, algorithm=REMAX, retry={"infrastructure": 1})
    engine = stage.rollouts[0]

    async def fail() -> None:
        request = engine.requests[-1]
        if request.request_id.startswith("p0000001-0-greedy"):
            request.min_policy_version = 99  # the engine refuses it

    def outcome(item: reward.ScoreItem) -> reward.SampleScore | None:
        silent = item.experience.sample_id.startswith("p0000001-") and is_baseline(item.experience.sample_id)
        return reward.SampleScore(abstain_reason="NO_IDEA") if silent else None

    if trouble == "score":
        stage.reward.outcome = outcome
    else:
        engine.on_generate = fail
    await stage.complete()
    assert {name.rsplit("-", 1)[0] for name in stage.trainer.batches[1]} == {"p0000000-0", "p0000002-0", "p0000003-0"}
    dropped = stage.report()["dropped"]
    assert dropped.pop("BASELINE") == 3
    if trouble == "score":
        assert dropped == {"NO_BASELINE": 4, "NO_IDEA": 1}
    else:
        assert sum(dropped.values()) == 5 and len(dropped) == 1, "the whole group, for one reason"


async def test_a_group_that_shrinks_to_one_is_enough_for_them(make_stage: Callable[..., Stage]) -> None:
    def only_the_first(item: reward.ScoreItem) -> reward.SampleScore | None:
        first = item.experience.sample_id.endswith("-0")
        return None if first else reward.SampleScore(abstain_reason="NO_IDEA")

    for preset, trained in (("reinforce++", 3), ("grpo", 0)):
        stage = make_stage(steps=1, algorithm={"preset": preset, "kl": {"coef": 0}})
        stage.reward.outcome = only_the_first
        await stage.start()
        assert await stage.finish() == (0 if trained else 1)
        assert sum(len(ids) for ids in stage.trainer.batches.values()) == trained
