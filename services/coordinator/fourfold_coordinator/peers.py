"""What the loop asks of rollout, reward and reference services: one prompt's answers, scores, reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from google.rpc import code_pb2

from fourfold.config import Config
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import FourfoldError, InvalidInput, Unavailable
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.rollout.client import Completion
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.types.v1.experience_pb2 import Experience
from fourfold.wire import encode

from .choice import Demand, Lengths, call_tokens, prefix_keys
from .prompts import Prompt
from .replica import Budget, GivenUp, Replica
from .routing import Router
from .samples import Trajectory, build_sample, check_completions, sampling_params

# Time for transport and queues on top of what scoring itself may take.
_SLACK_SECONDS: Final = 30.0
# Of a per-sample error: the service's trouble, not the sample's. A time-out is the sample's: a function that hangs on
# it hangs again, and another try costs the whole time once more.
_SERVICE_TROUBLE: Final = (code_pb2.UNAVAILABLE,)


class Decoder(Protocol):
    """What is asked of `fourfold.tokenizer.Tokenizer`."""

    def decode(self, token_ids: Sequence[int], /) -> str:
        """Return the text, special tokens skipped."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What scoring one sample came to: a score, or a reason why there is none."""

    score: float | None = None
    scorer: str = ""
    reason: str = ""
    abstained: bool = False
    error: FourfoldError | None = None
    """What went wrong; set when another try may help."""


class Peers:
    """Calls to the services of a run, each with its retry budget."""

    def __init__(self, config: Config, router: Router, decoder: Decoder) -> None:
        self._config = config
        self._router = router
        self._decoder = decoder
        self._lengths = Lengths()

    def budget(self) -> Budget:
        """Return the tries that one group may lose."""
        return Budget(infrastructure=self._config.retry.infrastructure, data=self._config.retry.data)

    async def generate(
        self,
        prompt: Prompt,
        *,
        group_id: str,
        sample_ids: Sequence[str],
        seed: int,
        version: int,
        budget: Budget,
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
        tries = iter(range(1 << 30))  # every try has an id of its own: the lost one may still be live

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
                    max_tokens=params.max_tokens,
                )
            return completions

        demand = self._demand(prompt, samples=len(sample_ids), longest=params.max_tokens)
        completions = await self._router.call(Role.ROLE_ROLLOUT, work, demand=demand, budget=budget, version=version)
        self._lengths.saw(len(completion.token_ids) for completion in completions)
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

    async def score(self, trajectories: Sequence[Trajectory], budget: Budget) -> list[Outcome]:
        """Score trajectories, in order. Errors are tried again as far as the budget goes; a missing score is no zero.

        Raises:
            GivenUp: the services failed too often.
            ServiceMissing: no reward service came in time.
        """
        outcomes: dict[str, Outcome] = {}
        pending = list(trajectories)
        while pending:
            answers = await self._score_once(pending, budget)
            outcomes |= answers
            again = _worth_a_try({name: o.error for name, o in answers.items() if o.error is not None}, budget)
            pending = [t for t in pending if t.sample.sample_id in again]
        return [outcomes[t.sample.sample_id] for t in trajectories]

    async def _score_once(self, trajectories: Sequence[Trajectory], budget: Budget) -> Mapping[str, Outcome]:
        timeout = self._config.reward.timeout_seconds * self._config.batch.samples_per_step + _SLACK_SECONDS

        async def work(replica: Replica) -> dict[str, Outcome]:
            items = [_score_item(t, with_tokens=replica.reads_tokens) for t in trajectories]
            scores = await replica.reward.score(items, timeout=timeout, max_sample_count=replica.max_items)
            return {score.sample_id: _outcome(score, replica.scorer) for score in scores}

        return await self._router.call(Role.ROLE_REWARD, work, demand=Demand(samples=len(trajectories)), budget=budget)

    async def reference(self, trajectories: Sequence[Trajectory], budget: Budget) -> list[Trajectory]:
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
        return [t.referenced(row) for t, row in zip(trajectories, rows, strict=True)]


def _worth_a_try(errors: Mapping[str, FourfoldError], budget: Budget) -> set[str]:
    """Take one try off the budget for each kind of error; return the samples whose kind had one left."""
    again: set[str] = set()
    for data in (False, True):
        kind = {name: error for name, error in errors.items() if isinstance(error, InvalidInput) is data}
        if kind:
            with suppress(GivenUp):
                budget.lose(next(iter(kind.values())))
                again |= kind.keys()
    return again


def _score_item(trajectory: Trajectory, *, with_tokens: bool) -> reward.ScoreItem:
    prompt, sample = trajectory.prompt, trajectory.sample
    ids_alone = Experience(sample_id=sample.sample_id, group_id=sample.group_id)
    return reward.ScoreItem(
        experience=encode(sample) if with_tokens else ids_alone,
        prompt_text=prompt.text,
        completion_text=trajectory.completion,
        answer=prompt.answer,
        metadata_json=prompt.metadata_json,
    )


def _outcome(score: reward.SampleScore, scorer: str) -> Outcome:
    match score.WhichOneof("outcome"):
        case "score":
            # The shortest decimal of the float32: 0.3 and not 0.30000001192092896, the same bits on the wire.
            return Outcome(score=float(str(np.float32(score.score))), scorer=scorer)
        case "abstain_reason":
            return Outcome(reason=score.abstain_reason or "ABSTAINED", abstained=True)
    reason = score.error.reason or "SCORE_ERROR"
    text = f"sample {score.sample_id}: {reason}: {score.error.message}"
    kind = Unavailable if score.error.code in _SERVICE_TROUBLE else InvalidInput
    return Outcome(reason=reason, error=kind(text, reason=reason))
