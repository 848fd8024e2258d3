"""Evaluates the policy on held-out sets: mean score, pass@k and maj@k of sampled answers, with 95 % intervals.

All evaluations of a run and `fourfold eval` use the same request seeds, so that two of them differ only by the weights.
Answers of one task group are not independent: the intervals are clustered by group.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

from fourfold.answers import final_answer
from fourfold.config.schema import Config
from fourfold.seeds import derive_seed
from fourfold.text import format_score

from ...data.prompts import HeldOutSet, Prompt
from ...reporting.estimators import clustered_interval, majority_at_k, pass_at_k, sample_sizes
from ...routing.replica import GivenUp, ReplicaKey, RetryBudget
from ...state.eval_results import AtK, EvalRow, Evaluation, SetResult, half_width, mean_of_sets
from ...state.samples import Trajectory
from ...tasks.task_queue import TaskGroup, TaskQueue
from ..service_calls import ServiceCalls
from .answers import answer_prompt

log = logging.getLogger("fourfold.coordinator")

EXAMPLE_COUNT: Final = 10

_Answers = list[Trajectory]
RunAll = Callable[[Iterable[Coroutine[Any, Any, _Answers]]], Awaitable[list[_Answers]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredSet:
    """The answers to a held-out set."""

    held_out: HeldOutSet
    answers: list[list[Trajectory]]  # by prompt, in order; those without a score are dropped with the reason
    seconds: float  # from the start of the evaluation to the last score of this set

    def result(self, success: float) -> SetResult | None:
        """Return the result; None if no answer has a score. `success` is the lowest score of a success."""
        prompts = [[a for a in answers if a.sample.score is not None] for answers in self.answers]
        scored = [(a, a.sample.score) for answers in prompts for a in answers if a.sample.score is not None]
        if not scored:
            return None
        mean, interval = clustered_interval([score for _, score in scored], [a.prompt.group_key for a, _ in scored])
        pass_at, majority_at = _estimates(prompts, self.held_out.rule.samples_per_prompt, success)
        return SetResult(
            name=self.held_out.name,
            score=mean,
            half_width=half_width(interval),
            interval=interval,
            answer_count=len(scored),
            missing_count=self.held_out.answer_count - len(scored),
            tokens_per_answer=fmean(answer.token_count for answer, _ in scored),
            seconds=round(self.seconds, 3),
            pass_at=pass_at,
            majority_at=majority_at,
        )

    def versions(self) -> list[int]:
        """Return the policy versions that sampled a token of a scored answer."""
        scored = (a for answers in self.answers for a in answers if a.sample.score is not None)
        spans = (span for a in scored for segment in a.segments for span in segment.version_spans)
        return [span.policy_version for span in spans if span.policy_version >= 0]

    def examples(self, seed: int) -> list[dict[str, Any]]:
        """Return the first answer to each of a few prompts, the same prompts in every evaluation of a run."""
        first = [answers[0] for answers in self.answers if answers]
        order = [prompt.index for prompt in self.held_out.prompts]
        random.Random(derive_seed(seed, "shown")).shuffle(order)
        place = {index: number for number, index in enumerate(order)}
        first.sort(key=lambda answer: place[answer.prompt.index])
        return [
            {"prompt": a.prompt_text, "completion": a.completion, "answer": a.prompt.answer, "score": a.sample.score}
            for a in first[:EXAMPLE_COUNT]
        ]


def _estimates(
    prompts: Sequence[Sequence[Trajectory]], most: int, success: float
) -> tuple[tuple[AtK, ...], tuple[AtK, ...]]:
    """Return pass@k and maj@k; a prompt with fewer than k scored answers is left out of both."""
    pass_at, majority_at = list[AtK](), list[AtK]()
    rows = [
        (
            answers[0].prompt.group_key,
            [final_answer(a.completion, a.prompt.answer, prompt=a.prompt_text) for a in answers],
            [(a.sample.score or 0.0) >= success for a in answers],
        )
        for answers in prompts
        if answers
    ]
    for k in sample_sizes(most):
        fitting = [row for row in rows if len(row[1]) >= k]
        if not fitting:
            break
        clusters = [cluster for cluster, _, _ in fitting]
        for found, values in (
            (pass_at, [pass_at_k(sum(passed), len(passed), k) for _, _, passed in fitting]),
            (majority_at, [majority_at_k(texts, passed, k) for _, texts, passed in fitting]),
        ):
            value, bounds = clustered_interval(values, clusters)
            count, width = len(fitting), half_width(bounds)
            found.append(AtK(k=k, value=value, half_width=width, prompt_count=count, interval=bounds))
    return tuple(pass_at), tuple(majority_at)


class Evaluator:
    """Implements `PolicyEvaluator` (training/ports.py)."""

    def __init__(
        self,
        config: Config,
        sets: Sequence[HeldOutSet],
        *,
        service_calls: ServiceCalls,
        tasks: TaskQueue,
        run_all: RunAll,
    ) -> None:
        """Prepare evaluations; `run_all` awaits coroutines at the same time, and the first error ends all."""
        self._config, self.sets = config, tuple(sets)
        self._service_calls, self._tasks, self._run_all = service_calls, tasks, run_all
        self._by_agents = config.agents.source == "tasks"

    async def run(
        self, *, step: int, version: int, engine: ReplicaKey | None, on_progress: Callable[[int, int], None]
    ) -> Evaluation | None:
        answered = await self.answer(step=step, version=version, engine=engine, on_progress=on_progress)
        results = [each.result(self._config.evaluation.success) for each in answered]
        found = [result for result in results if result is not None]
        if not answered or len(found) < len(results):
            return None
        used = [version for each in answered for version in each.versions()]
        if max(used) > version:
            log.warning(
                "evaluation used newer weights, as no engine kept those of its step: step=%d policy_version=%d "
                "used_versions=%d..%d",
                step, version, min(used), max(used),
            )  # fmt: skip
        score, interval = mean_of_sets(found)
        scored, missing = (sum(getattr(each, name) for each in found) for name in ("answer_count", "missing_count"))
        log.info("evaluation finished: step=%d held_out=%s", step, format_score(score, interval, scored, missing))
        row = EvalRow(
            step=step,
            score=score,
            half_width=half_width(interval),
            answer_count=scored,
            missing_count=missing,
            answers=[example for each in answered for example in each.examples(self._config.seed)],
            sets=tuple(found),
        )
        return Evaluation(row=row, oldest_version=min(used), newest_version=max(used))

    async def answer(
        self, *, step: int, version: int, engine: ReplicaKey | None, on_progress: Callable[[int, int], None]
    ) -> list[AnsweredSet]:
        """Sample and score answers to the prompts of all sets at the same time; the arguments are those of `run`."""
        began, done, total = time.monotonic(), 0, sum(held_out.answer_count for held_out in self.sets)
        seconds = dict.fromkeys((held_out.name for held_out in self.sets), 0.0)

        async def answer_prompt(held_out: HeldOutSet, prompt: Prompt) -> list[Trajectory]:
            nonlocal done
            answers = await self._answer(held_out, prompt, step=step, version=version, engine=engine)
            done, seconds[held_out.name] = done + held_out.rule.samples_per_prompt, time.monotonic() - began
            on_progress(done, total)
            return answers

        work = [answer_prompt(held_out, prompt) for held_out in self.sets for prompt in held_out.prompts]
        by_prompt = iter(await self._run_all(work))
        found = []
        for held_out in self.sets:
            answers = [next(by_prompt) for _ in held_out.prompts]
            scored = sum(a.sample.score is not None for several in answers for a in several)
            if missing := held_out.answer_count - scored:
                log.warning(
                    "evaluation left out answers without a score: step=%d set=%s answers=%d",
                    step, held_out.name, missing,
                )  # fmt: skip
            found.append(AnsweredSet(held_out=held_out, answers=answers, seconds=seconds[held_out.name]))
        return found

    async def _answer(
        self, held_out: HeldOutSet, prompt: Prompt, *, step: int, version: int, engine: ReplicaKey | None
    ) -> list[Trajectory]:
        """Return the answers to one prompt, those without a score as dropped; empty when a service failed too often."""
        budget, count = self._service_calls.budget(), held_out.rule.samples_per_prompt
        name = f"eval{step}-{held_out.name}-{prompt.index}"
        seed = derive_seed(self._config.seed, "eval", prompt.index)
        try:
            if self._by_agents:
                return await self._attempt(prompt, name, budget, count=count, seed=seed)
            return await answer_prompt(
                self._service_calls,
                prompt,
                name=name,
                count=count,
                seed=seed,
                version=version,
                budget=budget,
                held_out=held_out.rule,
                engine=engine,
            )
        except GivenUp as error:
            log.warning(
                "evaluation gave up a prompt: step=%d set=%s prompt=%d reason=%s",
                step, held_out.name, prompt.index, error,
            )  # fmt: skip
            return []

    async def _attempt(
        self, prompt: Prompt, name: str, budget: RetryBudget, *, count: int, seed: int
    ) -> list[Trajectory]:
        """Return the attempts of agents at one prompt, those without a score as dropped; raise GivenUp."""
        name = f"{name}-{secrets.token_hex(4)}"  # a Put for an interrupted evaluation must not match this one
        group = TaskGroup(
            group_id=name,
            prompt=prompt,
            task_ids=[f"{name}-{index}" for index in range(count)],
            seed=seed,
            evaluation=True,
        )
        await self._tasks.collect(group)
        arrived = [attempt.trajectory for attempt in group.attempts if attempt.trajectory is not None]
        attempts = await self._service_calls.with_completions(arrived)
        unscored = [attempt for attempt in attempts if attempt.sample.score is None]
        scored = await self._service_calls.score(unscored, budget, evaluation=True) if unscored else []
        return [attempt for attempt in attempts if attempt.sample.score is not None] + scored
