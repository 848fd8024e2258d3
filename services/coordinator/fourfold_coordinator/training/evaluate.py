"""Held-out evaluation: sampled answers to every held-out prompt, their mean score and its interval.

The same request seeds are used every time, so that two evaluations of one run differ by the
weights alone. Answers of one task group are not independent: the interval is clustered by group.
"""

from __future__ import annotations

import logging
import math
import random
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final

from fourfold.config import Config

from ..data.prompts import Prompt, derive_seed
from ..routing.replica import GivenUp
from ..state.ledger import EvalRow
from ..state.samples import Trajectory
from .service_calls import ServiceCalls
from .tasks import all_of

log = logging.getLogger("fourfold.coordinator")

SHOWN_ANSWERS: Final = 10
# Two-sided 95 % quantiles of Student's t where the expansion below is coarse.
_SMALL_T: Final = {1: 12.706205, 2: 4.302653, 3: 3.182446, 4: 2.776445, 5: 2.570582, 6: 2.446912}


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean and the half width of its 95 % interval."""

    mean: float
    half_width: float | None
    """None when there is one cluster alone, which tells nothing of the spread."""
    count: int


def clustered_interval(scores: Sequence[float], clusters: Sequence[str]) -> Interval:
    """Return the mean of `scores` with a 95 % interval in which only clusters are independent.

    With G clusters, n scores and residual sums r_g of each cluster: variance = G / (G - 1) * sum r_g^2 / n^2, and
    Student's t with G - 1 degrees of freedom.

    Args:
        scores: at least one.
        clusters: the cluster of each score.
    """
    count = len(scores)
    mean = math.fsum(scores) / count
    residuals: defaultdict[str, float] = defaultdict(float)
    for score, cluster in zip(scores, clusters, strict=True):
        residuals[cluster] += score - mean
    groups = len(residuals)
    if groups < 2:
        return Interval(mean=mean, half_width=None, count=count)
    variance = groups / (groups - 1) * math.fsum(r * r for r in residuals.values()) / count**2
    return Interval(mean=mean, half_width=student_t(groups - 1) * math.sqrt(variance), count=count)


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


class Evaluator:
    """Evaluates the policy on the held-out prompts."""

    def __init__(self, config: Config, peers: ServiceCalls, prompts: Sequence[Prompt]) -> None:
        self._config = config
        self._peers = peers
        self._prompts = tuple(prompts)

    async def run(
        self,
        *,
        step: int,
        version: int,
        on_progress: Callable[[float], None],
        beside: Callable[[], Coroutine[Any, Any, None]],
    ) -> EvalRow | None:
        """Evaluate the weights of `version`; None when there is nothing to evaluate on, or no answer got a score.

        Args:
            step: after which it is.
            version: of the weights, at least.
            on_progress: told the part that is done, in [0, 1].
            beside: runs along; its error ends the evaluation.

        Raises:
            ServiceMissing: no service of a needed role came in time.
        """
        if not self._prompts:
            return None
        done = 0

        async def one(prompt: Prompt) -> list[Trajectory]:
            nonlocal done
            answers = await self._answers(prompt, step=step, version=version)
            done += 1
            on_progress(done / len(self._prompts))
            return answers

        found = await all_of((one(prompt) for prompt in self._prompts), beside=beside())
        answers = [answer for several in found for answer in several]
        scored = [(a, a.sample.score) for a in answers if a.sample.score is not None]
        missing = len(self._prompts) * self._config.evaluation.samples_per_prompt - len(scored)
        if missing:
            log.warning("evaluation after step %d: %d answers got no score and are left out", step, missing)
        if not scored:
            return None
        interval = clustered_interval([score for _, score in scored], [a.prompt.group_key for a, _ in scored])
        return EvalRow(
            step=step,
            score=interval.mean,
            half_width=interval.half_width,
            answer_count=interval.count,
            missing_count=missing,
            answers=self._shown(answers),
        )

    async def _answers(self, prompt: Prompt, *, step: int, version: int) -> list[Trajectory]:
        """Return the answers to one prompt, with a score where there is one."""
        budget = self._peers.budget()
        name = f"eval{step}-{prompt.index}"
        try:
            answers = await self._peers.generate(
                prompt,
                group_id=name,
                sample_ids=[f"{name}-{index}" for index in range(self._config.evaluation.samples_per_prompt)],
                seed=derive_seed(self._config.seed, "eval", prompt.index),
                version=version,
                budget=budget,
            )
            outcomes = await self._peers.score(answers, budget)
        except GivenUp as error:
            log.warning("evaluation after step %d: prompt %d given up: %s", step, prompt.index, error)
            return []
        return [
            answer.with_drop_reason(outcome.reason)
            if outcome.score is None
            else answer.with_score(outcome.score, outcome.scorer)
            for answer, outcome in zip(answers, outcomes, strict=True)
        ]

    def _shown(self, answers: Sequence[Trajectory]) -> list[dict[str, Any]]:
        """Return the first answer to each of a few prompts, the same prompts every time."""
        first: dict[int, Trajectory] = {}
        for answer in answers:
            first.setdefault(answer.prompt.index, answer)
        wanted = [prompt.index for prompt in self._prompts]
        random.Random(derive_seed(self._config.seed, "shown")).shuffle(wanted)
        shown = [first[index] for index in wanted if index in first][:SHOWN_ANSWERS]
        return [
            {
                "prompt": answer.prompt.text,
                "completion": answer.completion,
                "answer": answer.prompt.answer,
                "score": answer.sample.score,
            }
            for answer in shown
        ]
