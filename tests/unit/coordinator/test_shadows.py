"""The scores of shadows that a step takes to compare gradients."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from fourfold.config import RewardConfig
from fourfold.sample import Sample, ScoreTerm, VersionSpan
from fourfold_coordinator.data.prompts import Prompt
from fourfold_coordinator.rewards.outcome import Outcome
from fourfold_coordinator.rewards.scorers import Deployment, Scorer
from fourfold_coordinator.rewards.shadows import Shadows
from fourfold_coordinator.state.samples import SampleGroup, Trajectory

MASK = np.array([0, 1], np.bool_)
NAMES = ("judged", "checked")


def group() -> SampleGroup:
    terms = tuple(ScoreTerm(name=name, scorer=f"{name}@1", score=1.0, weight=1.0) for name in NAMES)
    sample = Sample(
        sample_id="s",
        group_id="g",
        token_ids=np.arange(2, dtype=np.int32),
        behavior_logprobs=np.array([np.nan, -1], np.float32),
        action_mask=MASK,
        loss_mask=MASK,
        version_spans=(VersionSpan(policy_version=-1, token_count=1), VersionSpan(policy_version=0, token_count=1)),
        temperature=1.0,
        score=2.0,
        terms=terms,
    )
    ids = np.arange(1, dtype=np.int32)
    prompt = Prompt(index=0, text="?", token_ids=ids, answer="", metadata_json="{}", group_key="")
    trajectory = Trajectory(prompt=prompt, segments=(sample,), completion="!")
    return SampleGroup(position=0, seed=1, trajectories=(trajectory,))


def shadows_of(score: Callable[[str], Awaitable[float]]) -> Shadows:
    """Two scorers with a shadow each; the gradients of the first one's are compared."""

    def scorer(name: str) -> Scorer:
        table = RewardConfig.model_validate({"name": name, "function": "exact_match"})
        live, shadow = Deployment(pool=name), Deployment(pool=f"{name}.1")
        return Scorer(table=table, live=live, shadow=shadow, compares_gradients=name == NAMES[0])

    def calls_of(scorer: Scorer, _deployment: Deployment) -> Any:
        async def outcomes(trajectories: Sequence[Trajectory], _budget: Any) -> dict[str, Outcome]:
            return {t.sample.sample_id: Outcome(score=await score(scorer.name)) for t in trajectories}

        return SimpleNamespace(outcomes=outcomes)

    async def while_in_use(_deployment: Deployment, work: Awaitable[Any]) -> tuple[Any]:
        return (await work,)

    table: Any = SimpleNamespace(scorers=[scorer(name) for name in NAMES], while_in_use=while_in_use)
    scoring: Any = SimpleNamespace(calls_of=calls_of)
    return Shadows(table, scoring)


async def test_a_comparison_of_gradients_neither_takes_nor_ends_the_scores_of_another_shadow() -> None:
    release = asyncio.Event()

    async def score(name: str) -> float:
        if name == NAMES[0]:
            return 5.0
        await release.wait()
        return 7.0

    shadows = shadows_of(score)
    shadows.start(group())
    async with asyncio.timeout(5):
        (taken,) = await shadows.with_shadow_scores([group()])
    assert taken.trajectories[0].sample.shadow_score == 5.0 + 1.0, "its score, and the live one of the other scorer"
    assert f"shadows/{NAMES[1]}/samples" not in shadows.metrics({})
    release.set()
    await asyncio.sleep(0.01)
    assert shadows.metrics({})[f"shadows/{NAMES[1]}/samples"] == 1.0


async def test_a_quicker_shadow_of_another_scorer_leaves_the_comparison_its_own_scores() -> None:
    async def score(name: str) -> float:
        await asyncio.sleep(0.01 if name == NAMES[0] else 0)
        return 5.0 if name == NAMES[0] else 7.0

    shadows = shadows_of(score)
    shadows.start(group())
    (taken,) = await shadows.with_shadow_scores([group()])
    assert taken.trajectories[0].sample.shadow_score == 6.0
