"""What the loop asks of rollout, reward and reference services: one prompt's answers, scores, reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Protocol

from fourfold.bounds import MAX_NUMBER
from fourfold.config import Config
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.rollout.client import Completion
from fourfold.rollout.v1 import rollout_service_pb2 as rollout

from ..data.prompts import Prompt
from ..routing.replica import Replica, RetryBudget
from ..routing.router import Router
from ..routing.scheduling import CompletionLengths, Demand, call_tokens, prefix_keys
from ..state.samples import Trajectory, build_sample, check_completions, sampling_params
from .scoring import ScoreOutcome, Scoring


class Decoder(Protocol):
    """What is asked of `fourfold.model.tokenizer.Tokenizer`."""

    def decode(self, token_ids: Sequence[int], /) -> str:
        """Return the text, special tokens skipped."""
        ...


class ServiceCalls:
    """Calls to the services of a run, each with its retry budget."""

    def __init__(
        self,
        config: Config,
        router: Router,
        decoder: Decoder,
        *,
        newest_version: Callable[[], int] = lambda: MAX_NUMBER,
    ) -> None:
        """Call the replicas of a router.

        Args:
            config: of the run.
            router: knows the replicas.
            decoder: of the run's tokenizer.
            newest_version: returns the highest policy version that any engine may have seen.
        """
        self._config = config
        self._newest_version = newest_version
        self._scoring = Scoring(config, router)
        self._router = router
        self._decoder = decoder
        self._lengths = CompletionLengths()

    def budget(self) -> RetryBudget:
        """Return the tries that one group may lose."""
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
        """Sample answers to one prompt, one for each id, in one call; each try runs in `on_try()`.

        Args:
            prompt: to answer.
            group_id: of the samples.
            sample_ids: of the samples, in order of their index.
            seed: of the request, in [0, 2^52).
            version: of the weights, at least.
            budget: of the group.
            greedy: always take the likeliest token.
            on_try: context of one try.

        Raises:
            GivenUp: the budget is used up.
            ServiceMissing: no rollout service came in time.
        """
        params, timeout = sampling_params(self._config, prompt, seed), self._config.trainer.step_timeout_seconds
        name = group_id
        if greedy:  # runs beside the sampled answers of its group
            params.temperature, name = 0.0, f"{group_id}-greedy"
        tries = itertools.count()  # every try has an id of its own: the lost one may still be live

        async def work(replica: Replica) -> list[Completion]:
            request = rollout.GenerateRequest(
                request_id=f"{name}-{next(tries)}",
                prompt_token_ids=prompt.token_ids.tolist(),
                sampling_params=params,
                sample_count=len(sample_ids),
                min_policy_version=version,
            )
            async with on_try():
                completions = await replica.rollout.complete(request, timeout=timeout)
                check_completions(
                    completions,
                    who=replica.member.peer,
                    vocabulary_size=replica.vocabulary_size,
                    newest_version=self._newest_version(),
                )
            return completions

        demand = self._demand(prompt, samples=len(sample_ids), longest=params.max_tokens)
        completions = await self._router.call(Role.ROLE_ROLLOUT, work, demand=demand, budget=budget, version=version)
        self._lengths.add(len(completion.token_ids) for completion in completions)
        return [
            self._trajectory(prompt, completion, sample_id=sample_id, group_id=group_id, greedy=greedy)
            for sample_id, completion in zip(sample_ids, completions, strict=True)
        ]

    def _demand(self, prompt: Prompt, *, samples: int, longest: int) -> Demand:
        tokens = call_tokens(samples=samples, prompt=len(prompt.token_ids), expected=self._lengths.expected(longest))
        return Demand(samples=samples, tokens=tokens, prefix=prefix_keys(prompt.token_ids))

    def _trajectory(
        self, prompt: Prompt, completion: Completion, *, sample_id: str, group_id: str, greedy: bool
    ) -> Trajectory:
        temperature = 1.0 if greedy else self._config.sampling.temperature  # greedy log-probabilities are those at 1
        sample = build_sample(prompt, completion, sample_id=sample_id, group_id=group_id, temperature=temperature)
        return Trajectory(prompt=prompt, sample=sample, completion=self._decoder.decode(completion.token_ids.tolist()))

    async def score(self, trajectories: Sequence[Trajectory], budget: RetryBudget) -> list[ScoreOutcome]:
        """Score trajectories, in order: `Scoring.score`."""
        return await self._scoring.score(trajectories, budget)

    async def reference(self, trajectories: Sequence[Trajectory], budget: RetryBudget) -> list[Trajectory]:
        """Return the trajectories with their log-probabilities under the frozen reference.

        Raises:
            GivenUp: the budget is used up.
            ServiceMissing: no reference service came in time.
        """
        samples = [t.sample for t in trajectories]
        timeout = self._config.trainer.step_timeout_seconds
        rows = await self._router.call(
            Role.ROLE_REFERENCE,
            lambda replica: replica.reference.compute_logprobs(samples, timeout=timeout),
            demand=Demand(samples=len(samples)),
            budget=budget,
        )
        return [t.with_reference_logprobs(row) for t, row in zip(trajectories, rows, strict=True)]
