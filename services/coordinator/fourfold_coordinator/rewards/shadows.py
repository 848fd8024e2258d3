"""Lets shadows score the groups that live services have scored, and compares the scores.

A shadow can neither delay nor stop a run. Only with a comparison of gradients does a step wait for its scores, at most
as long as one sample may take.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from fourfold import metrics as m
from fourfold.errors import FourfoldError
from fourfold.sample.sample import shortest

from ..routing.replica import RetryBudget
from ..state.samples import SampleGroup, Trajectory
from .agreement import AgreementMeter
from .scorers import Scorer, ScorerTable
from .scoring import Scoring

log = logging.getLogger("fourfold.coordinator")

_MAX_GROUPS: Final = 64  # most groups that shadows score at the same time; further groups are skipped
_MAX_KEPT: Final = 4096  # most groups with shadow scores that wait for their step
_SLACK_SECONDS: Final = 10.0


class Shadows:
    """The shadows of a run. Implements `ShadowScores` (training/ports.py)."""

    def __init__(self, table: ScorerTable, scoring: Scoring) -> None:
        self._table, self._scoring = table, scoring
        self._meters: dict[str, AgreementMeter] = {}  # by pool of the shadow
        self._tasks: dict[tuple[str, str], asyncio.Task[dict[str, float]]] = {}  # by scorer and group

    def agreement(self, scorer: Scorer) -> AgreementMeter | None:
        """Return the comparison of a scorer's shadow with its live services; None without a shadow."""
        return None if scorer.shadow is None else self._meters.setdefault(scorer.shadow.pool, AgreementMeter())

    def start(self, group: SampleGroup) -> None:
        for scorer in self._table.scorers:
            alive = [t for t in group.trajectories if not t.dropped and _term(t, scorer.name) is not None]
            if scorer.shadow is None or not alive:
                continue
            if len(self._tasks) >= _MAX_GROUPS and not scorer.compares_gradients:
                self._meters.setdefault(scorer.shadow.pool, AgreementMeter()).skipped += len(alive)
                continue
            key = (scorer.name, alive[0].sample.group_id)
            task = self._tasks[key] = asyncio.create_task(self._score(scorer, alive))
            if not scorer.compares_gradients:
                task.add_done_callback(partial(self._forget, key))

    def _forget(self, key: tuple[str, str], task: asyncio.Task[dict[str, float]]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]

    async def _score(self, scorer: Scorer, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Return the scores of a shadow, by sample id, and compare them; after a failure, scores are missing."""
        meter, shadow = self.agreement(scorer), scorer.shadow
        assert meter is not None and shadow is not None
        try:
            calls = self._scoring.calls_of(scorer, shadow)
            work = calls.outcomes(trajectories, RetryBudget(infrastructure=1, data=0))
            result = await self._table.while_in_use(shadow, work)
        except FourfoldError as error:
            log.info("shadow has no scores: scorer=%s: %s", scorer.name, error)
            meter.missing += len(trajectories)
            return {}
        if result is None:
            return {}
        scores = {name: outcome.score for name, outcome in result[0].items() if outcome.score is not None}
        live = {t.sample.sample_id: _term(t, scorer.name) for t in trajectories if t.sample.sample_id in scores}
        meter.missing += len(trajectories) - len(scores)
        if scores:
            meter.add_group([score for score in live.values() if score is not None], [scores[name] for name in live])
        return scores

    def metrics(self, trained: Mapping[str, float]) -> dict[str, float]:
        result = dict[str, float]()
        for scorer in self._table.scorers:
            if (meter := self.agreement(scorer)) is None:
                continue
            if scorer.compares_gradients and (cosine := trained.get(m.SHADOW_COSINE)) is not None:
                meter.gradient_cosine = cosine
            prefix = f"shadows/{scorer.name}"
            result |= {f"{prefix}/missing": float(meter.missing), f"{prefix}/skipped": float(meter.skipped)}
            if meter.count:
                result |= {f"{prefix}/samples": float(meter.count), f"{prefix}/flip_share": meter.flip_share()}
                result[f"{prefix}/mean_shift"] = meter.mean_shift()
                if (correlation := meter.rank_correlation()) is not None:
                    result[f"{prefix}/rank_correlation"] = correlation
        return result

    async def with_shadow_scores(self, groups: Sequence[SampleGroup]) -> list[SampleGroup]:
        scorer = next((s for s in self._table.scorers if s.compares_gradients), None)
        if scorer is None:
            self._tasks = {key: task for key, task in self._tasks.items() if not task.done()}
            return list(groups)
        keys = [(scorer.name, group.trajectories[0].sample.group_id) for group in groups]
        tasks = [self._tasks[key] for key in keys if key in self._tasks]
        if tasks:
            await asyncio.wait(tasks, timeout=scorer.table.timeout_seconds + _SLACK_SECONDS)
        scores = {name: score for task in tasks if task.done() for name, score in task.result().items()}
        for key in keys:
            if (task := self._tasks.pop(key, None)) is not None:
                task.cancel()
        for key in [key for key, task in self._tasks.items() if task.done()][:-_MAX_KEPT]:
            del self._tasks[key]  # scores of groups that became too old for a step
        if any(sample.sample_id not in scores for group in groups for sample in group.samples):
            log.info("gradients are not compared: a sample has no score of the shadow: scorer=%s", scorer.name)
            return list(groups)
        return [
            replace(group, trajectories=tuple(_with_shadow(t, scorer.name, scores) for t in group.trajectories))
            for group in groups
        ]


def _term(trajectory: Trajectory, name: str) -> float | None:
    return next((term.score for term in trajectory.sample.terms if term.name == name), None)


def _with_shadow(trajectory: Trajectory, name: str, scores: dict[str, float]) -> Trajectory:
    """Return a trajectory with the score that it would have if the shadow were live."""
    sample = trajectory.sample
    if trajectory.dropped or sample.sample_id not in scores:
        return trajectory
    terms = ((scores[sample.sample_id] if t.name == name else t.score, t.weight) for t in sample.terms)
    return trajectory.with_values(shadow_score=shortest(sum(value * weight for value, weight in terms)))
