"""Evaluates the policy on held-out prompts: mean score of sampled answers, with a 95 % interval.

Every evaluation of a run uses the same request seeds, so that two of them differ by the weights alone. Answers of one
task group are not independent: the interval is clustered by group.
"""

from __future__ import annotations

import logging
import math
import random
import secrets
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final

from fourfold.seeds import derive_seed

from ..data.prompts import Prompt
from ..routing.replica import GivenUp, ReplicaKey, RetryBudget
from ..state.ledger import EvalRow
from ..state.samples import Trajectory
from ..tasks.board import TaskGroup
from .context import RunContext

log = logging.getLogger("fourfold.coordinator")

EXAMPLE_COUNT: Final = 10
# Two-sided 95 % quantiles of Student's t for degrees of freedom at which the expansion below is coarse.
_SMALL_T: Final = {1: 12.706205, 2: 4.302653, 3: 3.182446, 4: 2.776445, 5: 2.570582, 6: 2.446912}


def clustered_interval(scores: Sequence[float], clusters: Sequence[str]) -> tuple[float, float | None]:
    """Return the mean of `scores` and the half width of its 95 % interval; only the clusters count as independent.

    With G clusters, n scores and the sum r_g of the residuals in cluster g, the variance is
    G / (G - 1) * sum_g r_g^2 / n^2. The interval uses Student's t with G - 1 degrees of freedom. The half width is
    None with a single cluster, which has no spread.
    """
    count = len(scores)
    mean = math.fsum(scores) / count
    residuals: defaultdict[str, float] = defaultdict(float)
    for score, cluster in zip(scores, clusters, strict=True):
        residuals[cluster] += score - mean
    groups = len(residuals)
    if groups < 2:
        return mean, None
    variance = groups / (groups - 1) * math.fsum(r * r for r in residuals.values()) / count**2
    return mean, student_t(groups - 1) * math.sqrt(variance)


def student_t(degrees: int) -> float:
    """Return the two-sided 95 % quantile of Student's t, to 3 digits or better."""
    if degrees in _SMALL_T:
        return _SMALL_T[degrees]
    z = NormalDist().inv_cdf(0.975)
    terms = (  # Fisher's expansion around the normal quantile
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return math.fsum(term / degrees**power for power, term in enumerate(terms))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result of an evaluation, and the policy versions that sampled its answers."""

    row: EvalRow
    oldest_version: int
    newest_version: int


class Evaluator:
    """Evaluates the policy on the held-out prompts of a run."""

    def __init__(self, context: RunContext) -> None:
        self._config, self._prompts = context.config, context.prompts.held_out
        self._service_calls, self._session = context.service_calls, context.session
        self._tasks, self._by_agents = context.tasks, context.config.agents.source == "tasks"

    async def run(
        self, *, step: int, version: int, engine: ReplicaKey | None, on_progress: Callable[[float], None]
    ) -> Evaluation | None:
        """Evaluate the weights of `version` after `step` steps.

        `engine` answers as long as it is usable; then, or if it is None, any engine with this version or a later one.
        A warning in the log tells that later ones answered.

        Returns None without held-out prompts, or when no answer got a score. `on_progress` is called with the share
        that is done, in [0, 1].
        """
        if not self._prompts:
            return None
        done = 0

        async def evaluate_prompt(prompt: Prompt) -> list[Trajectory]:
            nonlocal done
            answers = await self._answer(prompt, step=step, version=version, engine=engine)
            done += 1
            on_progress(done / len(self._prompts))
            return answers

        found = await self._session.run_all(evaluate_prompt(prompt) for prompt in self._prompts)
        answers = [answer for several in found for answer in several]
        scored = [(a, a.sample.score) for a in answers if a.sample.score is not None]
        missing = len(self._prompts) * self._config.evaluation.samples_per_prompt - len(scored)
        if missing:
            log.warning("evaluation left out answers without a score: step=%d answers=%d", step, missing)
        if not scored:
            return None
        mean, half_width = clustered_interval([score for _, score in scored], [a.prompt.group_key for a, _ in scored])
        spans = [span for a, _ in scored for segment in a.segments for span in segment.version_spans]
        used = [span.policy_version for span in spans if span.policy_version >= 0]
        if max(used) > version:
            log.warning(
                "evaluation used newer weights, as no engine kept those of its step: step=%d policy_version=%d "
                "used_versions=%d..%d",
                step, version, min(used), max(used),
            )  # fmt: skip
        row = EvalRow(
            step=step,
            score=mean,
            half_width=half_width,
            answer_count=len(scored),
            missing_count=missing,
            answers=self._examples(answers),
        )
        return Evaluation(row=row, oldest_version=min(used), newest_version=max(used))

    async def _answer(self, prompt: Prompt, *, step: int, version: int, engine: ReplicaKey | None) -> list[Trajectory]:
        """Return the answers to one prompt, those without a score as dropped; none when a service failed too often."""
        budget = self._service_calls.budget()
        name = f"eval{step}-{prompt.index}"
        try:
            if self._by_agents:
                return await self._attempt(prompt, name, budget)
            answers = await self._service_calls.generate(
                prompt,
                group_id=name,
                sample_ids=[f"{name}-{index}" for index in range(self._config.evaluation.samples_per_prompt)],
                seed=derive_seed(self._config.seed, "eval", prompt.index),
                version=version,
                engine=engine,
                budget=budget,
            )
            texts = await self._service_calls.with_texts(prompt, answers)
            return await self._service_calls.score(texts, budget, evaluation=True)
        except GivenUp as error:
            log.warning("evaluation gave up a prompt: step=%d prompt=%d reason=%s", step, prompt.index, error)
            return []

    async def _attempt(self, prompt: Prompt, name: str, budget: RetryBudget) -> list[Trajectory]:
        """Return the attempts of agents at one prompt, those without a score as dropped; raise GivenUp."""
        name = f"{name}-{secrets.token_hex(4)}"  # a Put for an evaluation that was interrupted must not fit this one
        group = TaskGroup(
            group_id=name,
            prompt=prompt,
            task_ids=[f"{name}-{index}" for index in range(self._config.evaluation.samples_per_prompt)],
            seed=derive_seed(self._config.seed, "eval", prompt.index),
            evaluation=True,
        )
        await self._tasks.collect(group)
        arrived = [attempt.trajectory for attempt in group.attempts if attempt.trajectory is not None]
        attempts = await self._service_calls.with_completions(arrived)
        unscored = [attempt for attempt in attempts if attempt.sample.score is None]
        scored = await self._service_calls.score(unscored, budget, evaluation=True) if unscored else []
        return [attempt for attempt in attempts if attempt.sample.score is not None] + scored

    def _examples(self, answers: Sequence[Trajectory]) -> list[dict[str, Any]]:
        """Return the first answer to each of a few prompts, the same prompts in every evaluation."""
        first: dict[int, Trajectory] = {}
        for answer in answers:
            first.setdefault(answer.prompt.index, answer)
        order = [prompt.index for prompt in self._prompts]
        random.Random(derive_seed(self._config.seed, "shown")).shuffle(order)
        examples = [first[index] for index in order if index in first][:EXAMPLE_COUNT]
        return [
            {"prompt": a.prompt_text, "completion": a.completion, "answer": a.prompt.answer, "score": a.sample.score}
            for a in examples
        ]
