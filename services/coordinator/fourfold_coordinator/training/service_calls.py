"""Calls the rollout, reward and reference services for one prompt: completions, scores, reference log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Final, TypeVar

import numpy as np

from fourfold.arrays import Float32Array, Int32Array
from fourfold.bounds import MAX_NUMBER
from fourfold.config.schema import Config
from fourfold.config.sources import EvalSet
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.reference.client import AsyncReferenceClient
from fourfold.rollout.client import Completion
from fourfold.rollout.group_requests import GroupRequest
from fourfold.sample import Sample

from ..data.prompts import Prompt
from ..data.texts import TextDecoder
from ..routing.replica import Replica, ReplicaKey, RetryBudget
from ..routing.router import Router
from ..routing.scheduling import Demand
from ..routing.trainer_session import leaves
from ..state.sample_traces import REFERENCE, SampleTraces
from ..state.samples import Trajectory, build_sample, last_turn, prompt_length, sampling_params
from .group_sampling import GroupSampler
from .ports import Scores

T = TypeVar("T")

_PART_TOKENS: Final = 1 << 13  # of a call: the forward passes of a batch of the service, and all replicas get some


class ServiceCalls:
    """Calls to the services of a run; each spends tries of its group's budget."""

    def __init__(
        self,
        config: Config,
        router: Router,
        decode: Callable[[Sequence[Int32Array]], list[str]],
        scoring: Scores,
        *,
        newest_version: Callable[[], int] = lambda: MAX_NUMBER,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        """Prepare calls.

        `decode` returns the texts of token ids, and is called in other threads. `newest_version` returns the highest
        policy version that an engine may have received. `stop_token_ids` are the model's own.
        """
        self._config, self._router, self._texts = config, router, TextDecoder(decode)
        self.scoring = scoring
        self._sampler = GroupSampler(
            router,
            timeout=config.trainer.step_timeout_seconds,
            newest_version=newest_version,
            stop_token_ids=(*stop_token_ids, *config.sampling.stop_token_ids),
        )

    def budget(self) -> RetryBudget:
        """Return a fresh retry budget for one group."""
        return RetryBudget(infrastructure=self._config.retry.infrastructure, data=self._config.retry.data)

    @property
    def traces(self) -> SampleTraces:
        """Traces of the samples whose calls are made here."""
        return self._router.traces

    async def generate(
        self,
        prompt: Prompt,
        *,
        group_id: str,
        sample_ids: Sequence[str],
        seed: int,
        version: int,
        budget: RetryBudget,
        greedy: bool = False,
        held_out: EvalSet | None = None,
        engine: ReplicaKey | None = None,
        on_try: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
        on_finished: Callable[[Sample], None] = lambda _sample: None,
    ) -> list[Sample]:
        """Sample the completions of one prompt; unfinished samples of a call continue on another engine.

        Args:
            sample_ids: One completion is sampled for each, in order of their index.
            seed: Of the request, in [0, 2^52).
            version: Lowest policy version that the engine may have.
            engine: The one to ask as long as it is usable; None for any.
            greedy: Take the likeliest token at each position.
            held_out: Sample as this held-out set says; None: as in training.
            on_try: Returns the context that one try runs in.
            on_finished: Called with each sample when it is finished, within a try.

        Returns:
            One sample for each id, in order.

        Raises:
            GivenUp: The budget is used up.
            ServiceMissing: No service came in time.
        """
        params, name = sampling_params(self._config, prompt, seed, held_out=held_out), group_id
        if greedy:  # the plain name is the request id of the group's sampled completions
            params.temperature, name = 0.0, f"{group_id}-greedy"
        request = GroupRequest(
            name=name,
            prompt_token_ids=prompt.token_ids,
            params=params,
            count=len(sample_ids),
            version=version,
            sample_ids=tuple(sample_ids),
            engine=engine,
        )
        greedy = not params.temperature
        temperature = 1.0 if greedy else (held_out or self._config.sampling).temperature  # engines report greedy at 1
        samples: dict[int, Sample] = {}

        def finish(completion: Completion) -> None:
            index = completion.sample_index
            samples[index] = build_sample(
                prompt, completion, sample_id=sample_ids[index], group_id=group_id, temperature=temperature
            )
            on_finished(samples[index])

        await self._sampler.sample(request, spend=budget.spend, on_try=on_try, on_finished=finish)
        return [samples[index] for index in range(len(sample_ids))]

    def room(self, prompt: Prompt, samples: int, *, version: int) -> float:
        """Return how many calls for `samples` of a prompt engines of this version or later would start now."""
        longest = sampling_params(self._config, prompt, 0).max_tokens
        demand = self._sampler.demand(prompt.token_ids, [0] * samples, longest)
        return self._router.room(Role.ROLE_ROLLOUT, demand, version=version)

    async def with_texts(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Trajectory]:
        """Return the trajectories of samples of one prompt; decode the tokens in another thread."""
        ids = [sample.token_ids[prompt_length(sample) :] for sample in samples]
        texts = await self._texts.decode(ids)
        return [
            Trajectory(prompt=prompt, segments=(sample,), completion=text)
            for sample, text in zip(samples, texts, strict=True)
        ]

    async def with_completions(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return trajectories of agents with their texts: the first prompt, the last segment and its last turn."""
        sequences = list[Int32Array]()
        for trajectory in trajectories:
            last, first = trajectory.segments[-1], trajectory.sample.token_ids[: prompt_length(trajectory.sample)]
            task = trajectory.prompt.token_ids  # empty: the agent described the problem itself
            own = len(task) > 0 and not np.array_equal(first, task)
            completion, turn = last.token_ids[prompt_length(last) :], last.token_ids[last_turn(last)]
            sequences += (first if own else first[:0], completion, turn)
        texts = iter(await self._texts.decode(sequences))
        return [
            replace(t, first_prompt=prompt, completion=completion, last_turn=turn)
            for t, prompt, completion, turn in zip(trajectories, texts, texts, texts, strict=True)
        ]

    async def score(
        self, trajectories: Sequence[Trajectory], budget: RetryBudget, *, evaluation: bool = False
    ) -> list[Trajectory]:
        """Return trajectories of one group with their scores; see `Scores.score`."""
        return await self.scoring.score(trajectories, budget, evaluation=evaluation)

    async def reference(self, samples: Sequence[Sample], budget: RetryBudget) -> list[Float32Array]:
        """Return the log-probabilities of samples under the frozen reference policy, float32 [n] each.

        Raises the errors of `generate`.
        """
        timeout = self._config.trainer.step_timeout_seconds
        return await self.ask_reference(
            samples, budget, lambda client: client.compute_logprobs(samples, timeout=timeout)
        )

    async def ask_reference(
        self, samples: Sequence[Sample], budget: RetryBudget, ask: Callable[[AsyncReferenceClient], Awaitable[T]]
    ) -> T:
        """Return what `ask` returns for samples with the client of a reference service, as `reference`."""
        names = [sample.sample_id for sample in samples]

        async def work(replica: Replica) -> T:
            with self._router.traces.call(REFERENCE, names, replica.member.member_id):
                return await ask(replica.reference)

        return await self._router.call(
            Role.ROLE_REFERENCE,
            work,
            demand=Demand(samples=len(samples)),
            spend=budget.spend,
        )


async def in_parts(samples: Sequence[Sample], ask: Callable[[Sequence[Sample]], Awaitable[Sequence[T]]]) -> list[T]:
    """Return what `ask` returns for each of some samples, in order, with calls for parts of about equal work at once.

    The first error of a call is raised, and cancels the others.
    """

    async def call(part: Sequence[Sample]) -> Sequence[T]:
        return await ask(part)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call(part)) for part in _parts(samples)]
    except BaseExceptionGroup as errors:
        raise next(leaves(errors)) from None
    return [found for task in tasks for found in task.result()]


def _parts(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    part, tokens = list[Sample](), 0
    for sample in samples:
        if part and tokens + len(sample.token_ids) > _PART_TOKENS:
            yield part
            part, tokens = [], 0
        part.append(sample)
        tokens += len(sample.token_ids)
    yield part
