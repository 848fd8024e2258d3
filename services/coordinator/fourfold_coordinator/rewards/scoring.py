"""Scores the samples of a group with all scorers of the run, and mixes their scores (`outcome.mix`).

    trajectories --> scorers with a gate --> pass? --> the other scorers --> mix --> score, terms
                      |
                      '- each by its live services, or by its canary

The scorers of a sample are those whose `where` fits its row, or, with `data.scorers_field`, those that the row names.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fourfold.answers import find_last_number
from fourfold.config.reward import ANSWER_VERIFIERS, RewardConfig
from fourfold.config.schema import Config
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import ConfigError, FourfoldError, WrongState
from fourfold.text import clean

from ..data.prompts import Prompt, PromptSet
from ..routing.replica import RetryBudget
from ..routing.router import Router
from ..routing.trainer_session import leaves
from ..state.ledger import NOT_SELECTED
from ..state.samples import SampleGroup, Trajectory
from .deployment_calls import DeploymentCalls
from .outcome import Outcome, mix, passes_gates, without_scores
from .scorers import Deployment, Scorer, ScorerTable

_Asked = list[tuple[RewardConfig, Outcome]]  # the outcomes of one sample, gates first


class Scoring:
    """The scores of a run. Implements `Scores` (training/ports.py)."""

    def __init__(self, config: Config, router: Router, table: ScorerTable, *, run: str) -> None:
        """Prepare calls; `run` is the name of the run's folder."""
        self._config, self._router, self._table, self._run = config, router, table, run
        self._calls: dict[tuple[str, bool], DeploymentCalls] = {}  # by pool, and whether it is a shadow
        table.check = self._check_scores

    # -- scores -----------------------------------------------------------------------------------------------------

    async def score(
        self, trajectories: Sequence[Trajectory], budget: RetryBudget, *, evaluation: bool = False
    ) -> list[Trajectory]:
        if self._config.algorithm.distills and not self._table.scorers:  # a teacher takes the place of scores
            return [t if t.sample.score is not None else t.with_values(score=0.0) for t in trajectories]
        fresh = [without_scores(t) for t in trajectories]
        asked: dict[str, _Asked] = {t.sample.sample_id: [] for t in fresh}
        scorers = self.scorers_of(fresh[0].prompt)
        for gates in (True, False):
            stage = [s for s in scorers if (s.table.gate is not None) is gates]
            # All trajectories of a group have one prompt, and therefore the same scorers.
            passed = fresh if gates else [t for t in fresh if passes_gates(asked[t.sample.sample_id])]
            if not stage or not passed:
                continue
            calls = [self._ask(scorer.name, passed, budget, evaluation=evaluation) for scorer in stage]
            for scorer, outcomes in zip(stage, await _all(calls), strict=True):
                for name, outcome in outcomes.items():
                    asked[name].append((scorer.table, outcome))
        return [mix(t, asked[t.sample.sample_id]) for t in fresh]

    def scorers_of(self, prompt: Prompt) -> list[Scorer]:
        """Return the scorers of the samples of a prompt."""
        scorers = self._table.scorers
        names = scorer_names([s.table for s in scorers], prompt, self._config.data.scorers_field)
        return [s for s in scorers if s.table.name in names]

    def check_prompts(self, prompts: PromptSet) -> list[str]:
        """Return the warnings of `check_scorers`."""
        return check_scorers(self._config, self._table.tables, prompts)

    async def _ask(
        self, name: str, trajectories: Sequence[Trajectory], budget: RetryBudget, *, evaluation: bool
    ) -> Mapping[str, Outcome]:
        """Return the outcomes of one scorer, by sample id; none if it was removed meanwhile."""
        while (scorer := self._table.get(name)) is not None:
            group_id = trajectories[0].sample.group_id
            deployment = scorer.live if evaluation else scorer.deployment_for(group_id)
            work = self.calls_of(scorer, deployment).outcomes(trajectories, replace(budget))
            if (result := await self._table.while_in_use(deployment, work)) is not None:
                return result[0]
            self._calls.pop((deployment.pool, False), None)
        return {}

    def calls_of(self, scorer: Scorer, deployment: Deployment) -> DeploymentCalls:
        """Return the calls to a deployment of a scorer. A failing shadow neither blocks nor ends the run."""
        shadow = deployment == scorer.shadow
        if (calls := self._calls.get((deployment.pool, shadow))) is None:
            table = scorer.table.model_copy(update={"on_error": "drop"}) if shadow else scorer.table
            calls = self._calls[deployment.pool, shadow] = DeploymentCalls(
                self._config, table, deployment, self._router, self._table.costs, run=self._run
            )
        return calls

    def is_current(self, group: SampleGroup) -> bool:
        if group.revision != self._table.revision:
            return False
        # Samples that are not selected keep their scores.
        scored_again = (t for t in group.trajectories if t.dropped != NOT_SELECTED)
        used = {(term.name, term.scorer) for t in scored_again for term in t.sample.terms}
        for name, version in used:
            if (scorer := self._table.get(name)) is None:
                return False
            deployments = [d for d in (scorer.live, scorer.canary) if d is not None]
            versions = {self.calls_of(scorer, deployment).version for deployment in deployments}
            if version not in versions and "" not in versions:
                return False
        # The samples of a group are compared with each other.
        return len({name for name, _ in used}) == len(used)

    @property
    def revision(self) -> int:
        return self._table.revision

    async def _check_scores(self, table: RewardConfig, deployment: Deployment) -> None:
        """Raise WrongState if new services cannot score a sample that had a score."""
        scorer = self._table.get(table.name)
        live = None if scorer is None else self.calls_of(scorer, scorer.live)
        if live is None or live.scored is None:
            return
        for replica in self._router.replicas(Role.ROLE_REWARD, deployment.pool):
            try:
                await live.probe(replica, live.scored)
            except FourfoldError as error:
                raise WrongState(
                    f"{replica.title} does not score a sample that the present scorer scores: {error}; repair it first",
                    reason="SCORER_FAILS",
                ) from error


async def _all(calls: Sequence[Coroutine[Any, Any, Mapping[str, Outcome]]]) -> list[Mapping[str, Outcome]]:
    """Await calls at the same time; the first error cancels the others."""
    if len(calls) == 1:
        return [await calls[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as errors:
        raise next(leaves(errors)) from None
    return [task.result() for task in tasks]


def scorer_names(tables: Sequence[RewardConfig], prompt: Prompt, scorers_field: str) -> tuple[str, ...]:
    """Return the names of the tables that score the samples of a prompt."""
    if not scorers_field and not any(table.where for table in tables):
        return tuple(table.name for table in tables)
    row = json.loads(prompt.metadata_json or "{}")
    return tuple(table.name for table in tables if applies(table, row, scorers_field))


def check_scorers(config: Config, tables: Sequence[RewardConfig], prompts: PromptSet) -> list[str]:
    """Return warnings about rows without the reference answer that a scorer needs; their samples are lost.

    Raises ConfigError: none of the tables scores a row, or no row of the training data, or of a held-out set, has the
    reference answer that a scorer needs.
    """
    found = []
    parts = [("the training data", prompts.train), *((f"held-out set {s.name}", s.prompts) for s in prompts.held_out)]
    for where, rows in parts if config.needs_scorer else ():
        scored, unanswered = Counter[str](), Counter[str]()
        for prompt in rows:
            names = scorer_names(tables, prompt, config.data.scorers_field)
            if not names:
                raise ConfigError(
                    f"row {prompt.index} of the data has no scorer: {prompt.metadata_json[:200]}; change `where` of a "
                    f"table [[reward]], or what the row has in data.scorers_field"
                )
            scored.update(names)
            unanswered.update(table.name for table in tables if table.name in names and _lacks_answer(table, prompt))
        for table in (table for table in tables if unanswered[table.name]):
            answer = f"reference answer{' with a number' * (table.function == 'last_number')}"
            if unanswered[table.name] == scored[table.name] and (table.abstain == "drop" or len(tables) == 1):
                columns = ", ".join(json.loads(rows[0].metadata_json)) or "no other"
                raise ConfigError(
                    f"reward.function = {table.function!r} needs a {answer}, and no row of {where} has one; set "
                    f"data.answer_field = {config.data.answer_column!r} to the column with the answers (there are: "
                    f"{clean(columns, 300)}), or use a function that needs none"
                )
            if table.abstain == "drop":
                found.append(
                    f"{unanswered[table.name]:,} of {scored[table.name]:,} rows of {where} have no {answer}, which "
                    f"{table.function} needs: their samples are dropped; remove these rows, or add the answers"
                )
    return found


def _lacks_answer(table: RewardConfig, prompt: Prompt) -> bool:
    if table.function == "last_number":
        return find_last_number(prompt.answer) is None
    if prompt.answer.strip():
        return False
    if table.function == "code_tests":  # the tests may be in a column
        return json.loads(prompt.metadata_json).get(table.options.get("field", "tests")) is None
    return table.function in ANSWER_VERIFIERS


def applies(table: RewardConfig, row: Mapping[str, Any], scorers_field: str) -> bool:
    """Return whether a scorer scores the samples of a row."""
    named = row.get(scorers_field) if scorers_field else None
    if named is not None:  # only texts and lists name scorers
        return table.name in ([named] if isinstance(named, str) else named if isinstance(named, list) else [])
    return all(str(row.get(column)) in values for column, values in table.where.items())
