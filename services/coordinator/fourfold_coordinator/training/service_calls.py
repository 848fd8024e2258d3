"""Calls the rollout, reward and reference services for one prompt: completions, scores, reference log-probabilities."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace

from fourfold.arrays import Int32Array, Sample
from fourfold.bounds import MAX_NUMBER
from fourfold.config import Config
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.rollout.client import Completion
from fourfold.rollout.v1 import rollout_service_pb2 as rollout

from ..data.prompts import Prompt
from ..routing.replica import Replica, RetryBudget
from ..routing.router import Router
from ..routing.scheduling import CompletionLengths, Demand, prefix_keys
from ..state.samples import Trajectory, build_sample, check_completions, sampling_params
from .scoring import Scoring


class ServiceCalls:
    """Calls to the services of a run; each spends tries of its group's budget."""

    def __init__(
        self,
        config: Config,
        router: Router,
        decode: Callable[[Sequence[Int32Array]], list[str]],
        *,
        newest_version: Callable[[], int] = lambda: MAX_NUMBER,
    ) -> None:
        """Prepare calls.

        `decode` returns the texts of token ids, and is called in other threads. `newest_version` returns the highest
        policy version that an engine may have received.
        """
        self._config, self._router, self._decode = config, router, decode
        self._newest_version = newest_version
        self.score = Scoring(config, router).score
        self._lengths = CompletionLengths()

    def budget(self) -> RetryBudget:
        """Return a fresh retry budget for one group."""
        return RetryBudget(infrastructure=self._config.retry.infrastructure, data=self._config.retry.data)

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
        on_try: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> list[Trajectory]:
        """Sample the completions of one prompt in one call.

        Args:
            sample_ids: One completion is sampled for each, in order of their index.
            seed: Of the request, in [0, 2^52).
            version: Lowest policy version that the engine may have.
            greedy: Take the likeliest token at each position.
            on_try: Returns the context that one try runs in.

        Raises:
            GivenUp: The budget is used up.
            ServiceMissing: No service came in time.
        """
        params, name = sampling_params(self._config, prompt, seed), group_id
        timeout = self._config.trainer.step_timeout_seconds
        if greedy:  # the sampled completions of the group are requested at the same time, under the plain name
            params.temperature, name = 0.0, f"{group_id}-greedy"
        tries = itertools.count()  # a new request id for every try: the request of a lost try may still run

        async def work(replica: Replica) -> list[Completion]:
            request = rollout.GenerateRequest(
                request_id=f"{name}-{next(tries)}",
                prompt_token_ids=prompt.token_ids.tolist(),
                sampling_params=params,
                sample_count=len(sample_ids),
                min_policy_version=version,
            )
            completions = await replica.rollout.complete(request, timeout=timeout)
            check_completions(
                completions,
                peer=replica.member.peer,
                vocabulary_size=replica.vocabulary_size,
                newest_version=self._newest_version(),
            )
            return completions

        demand = self._demand(prompt, len(sample_ids), params.max_tokens)
        completions = await self._router.call(
            Role.ROLE_ROLLOUT, work, demand=demand, spend=budget.spend, version=version, on_try=on_try
        )
        self._lengths.add(len(completion.token_ids) for completion in completions)
        temperature = 1.0 if greedy else self._config.sampling.temperature  # engines report greedy tokens at 1
        named = zip(sample_ids, completions, strict=True)
        samples = [build_sample(prompt, c, sample_id=i, group_id=group_id, temperature=temperature) for i, c in named]
        return await self.with_texts(prompt, samples)

    def room(self, prompt: Prompt, samples: int, *, version: int) -> float:
        """Return how many calls such as `samples` of a prompt the engines of this version or later would begin now."""
        longest = sampling_params(self._config, prompt, 0).max_tokens
        return self._router.room(Role.ROLE_ROLLOUT, self._demand(prompt, samples, longest), version=version)

    def _demand(self, prompt: Prompt, samples: int, longest: int) -> Demand:
        """Return what samples of at most `longest` tokens bring to an engine."""
        # Samples share the blocks of their prompt; engines count it once per sample in their load report, though.
        tokens = samples * (len(prompt.token_ids) + self._lengths.expected(longest))
        return Demand(samples=samples, tokens=tokens, prefix=prefix_keys(prompt.token_ids))

    async def with_texts(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Trajectory]:
        """Return the trajectories of samples of one prompt; the tokens are decoded in another thread."""
        ids = [sample.token_ids[len(prompt.token_ids) :] for sample in samples]
        texts = await asyncio.to_thread(self._decode, ids)
        return [
            Trajectory(prompt=prompt, sample=sample, completion=text)
            for sample, text in zip(samples, texts, strict=True)
        ]

    async def reference(self, trajectories: Sequence[Trajectory], budget: RetryBudget) -> list[Trajectory]:
        """Return the trajectories with their log-probabilities under the frozen reference policy.

        Raises the errors of `generate`.
        """
        samples = [t.sample for t in trajectories]
        timeout = self._config.trainer.step_timeout_seconds
        rows = await self._router.call(
            Role.ROLE_REFERENCE,
            lambda replica: replica.reference.compute_logprobs(samples, timeout=timeout),
            demand=Demand(samples=len(samples)),
            spend=budget.spend,
        )
        return [
            replace(t, sample=replace(t.sample, reference_logprobs=row))
            for t, row in zip(trajectories, rows, strict=True)
        ]
