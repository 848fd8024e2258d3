"""Samples and scores answers that nothing is trained on, for evaluations and for `fourfold sample`."""

from __future__ import annotations

from fourfold.config.sources import EvalSet

from ...data.prompts import Prompt
from ...routing.replica import ReplicaKey, RetryBudget
from ...state.ledger import SampleState
from ...state.samples import Trajectory
from ..service_calls import ServiceCalls


async def answer_prompt(
    calls: ServiceCalls,
    prompt: Prompt,
    *,
    name: str,
    count: int,
    seed: int,
    version: int,
    budget: RetryBudget,
    held_out: EvalSet | None = None,
    engine: ReplicaKey | None = None,
) -> list[Trajectory]:
    """Return scored answers to a prompt, those without a score as dropped.

    `name` is that of the group, and `count` the number of answers. For the other arguments and the errors see
    `ServiceCalls.generate`.
    """
    sample_ids = [f"{name}-{index}" for index in range(count)]
    with calls.traces.evaluation(sample_ids):
        samples = await calls.generate(
            prompt,
            group_id=name,
            sample_ids=sample_ids,
            seed=seed,
            version=version,
            budget=budget,
            held_out=held_out,
            engine=engine,
        )
        texts = await calls.with_texts(prompt, samples)
        calls.traces.move(sample_ids, SampleState.ROLLED, "")
        return await calls.score(texts, budget, evaluation=True)
