"""Scores of trajectories, and what becomes of samples and of the run when a scorer fails (`reward.on_error`).

    Score --> some samples have a score: the scorer works
      |         a sample with an error: once more (retry.data, retry.infrastructure), then it is dropped with its reason
      '-----> none has: is it the scorer, or the samples? The sample that had a score last is scored again
                it has one: the samples are at fault, as above
                it has none: a failed call, like one that was refused, hung or was answered with rubbish

    a failed call   rests the scorer (breaker.py); another one is asked, or the same again, as `reward.on_error` says:
      wait   until one works again, at most reward.wait_seconds; then the run ends
      drop   as long as the tries last (retry.infrastructure); then the groups that wait are dropped
      stop   the same; then the run ends

No way leads from a missing score to a number. A scorer that rests is asked for one sample before it gets more.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from google.rpc import code_pb2

from fourfold.config import Config
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import FourfoldError, InvalidInput, PeerFault, Unavailable
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.rpc.codec import encode
from fourfold.types.v1.experience_pb2 import Experience

from ..routing.replica import FatalRunError, GivenUp, Replica, RetryBudget
from ..routing.router import Router, WaitLimit
from ..routing.scheduling import Demand
from ..state.samples import Trajectory

T = TypeVar("T")

SLACK_SECONDS: Final = 10.0
"""For transport and queues, on top of what scoring itself may take."""
# Of a per-sample error: the service's trouble, not the sample's. A time-out is the sample's: a function that hangs on
# it hangs again, and another try costs the whole time once more.
_SERVICE_TROUBLE: Final = (code_pb2.UNAVAILABLE,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOutcome:
    """What scoring one sample came to: a score, or a reason why there is none."""

    score: float | None = None
    scorer: str = ""
    reason: str = ""
    abstained: bool = False
    error: FourfoldError | None = None
    """What went wrong."""


class ScorerFailed(FatalRunError):
    """There are no scores, and the recipe wants the run to end then."""


class Scoring:
    """Calls to the reward services of a run."""

    def __init__(self, config: Config, router: Router) -> None:
        self._config, self._router = config.reward, router
        self._samples_per_step, self._tries = config.batch.samples_per_step, config.retry.infrastructure
        self._good: dict[bool, reward.ScoreItem] = {}
        """Items that had a score, with tokens or without: they tell a scorer that fails from samples that do."""
        self._troubled_since: float | None = None
        """Since when no call has worked."""
        self._lost: asyncio.Future[FourfoldError] = asyncio.get_running_loop().create_future()
        """Done when the calls that are under way have no tries left; another one takes its place then."""

    async def score(self, trajectories: Sequence[Trajectory], budget: RetryBudget) -> list[ScoreOutcome]:
        """Score trajectories, in order.

        Raises:
            GivenUp: the services failed too often.
            ScorerFailed: the same, and the run is to end then.
            ServiceMissing: no reward service came in time.
        """
        outcomes: dict[str, ScoreOutcome] = {}
        pending = list(trajectories)
        while pending:
            answers = await self._score_once(pending, budget)
            outcomes |= answers
            failed = {name: o.error for name, o in answers.items() if o.error is not None}
            again = _worth_a_try(failed, budget)
            if self._config.on_error == "stop" and (lost := failed.keys() - again):
                raise self._ends(failed[min(lost)], f"sample {min(lost)} has no score")
            pending = [t for t in pending if t.sample.sample_id in again]
        return [outcomes[t.sample.sample_id] for t in trajectories]

    async def _score_once(self, trajectories: Sequence[Trajectory], budget: RetryBudget) -> Mapping[str, ScoreOutcome]:
        async def work(replica: Replica) -> dict[str, ScoreOutcome]:
            async with self._shown_while_silent(replica, len(trajectories)):
                return await self._work(replica, trajectories)

        wait = WaitLimit(max(self._config.wait_seconds, self._router.wait_seconds), "reward.wait_seconds")
        call = self._router.call(
            Role.ROLE_REWARD,
            work,
            demand=Demand(samples=len(trajectories)),
            budget=_Allowance(self, budget),
            wait=wait if self._config.on_error == "wait" else None,
        )
        try:
            outcomes = await self._unless_lost(call)
        except GivenUp as error:
            if self._config.on_error == "stop":
                raise self._ends(error, f"a group of {len(trajectories)} samples has no scores") from error
            raise
        self._troubled_since = None
        return outcomes

    async def _work(self, replica: Replica, trajectories: Sequence[Trajectory]) -> dict[str, ScoreOutcome]:
        """Score once.

        Raises:
            PeerFault: no sample has an outcome that a scorer in order gives.
            FourfoldError: the call failed.
        """
        items = [_item(t, with_tokens=replica.reads_tokens) for t in trajectories]
        if replica.breaker.probing:
            await self._probe(replica, self._good.get(replica.reads_tokens, items[0]))
        # Calls of other groups may be before this one in the service's queue.
        rounds = math.ceil(max(self._samples_per_step, replica.outstanding) / self._config.processes)
        timeout = self._config.timeout_seconds * rounds + SLACK_SECONDS
        try:
            scores = await replica.reward.score(items, timeout=timeout, max_sample_count=replica.max_items)
        except InvalidInput as refusal:
            if await self._works(replica):
                raise
            text = f"Score: it refuses every request: {refusal}"
            raise PeerFault(replica.member.peer, refusal.reason, text) from refusal
        outcomes = {score.sample_id: _outcome(score, replica.scorer) for score in scores}
        errors = [outcome.error for outcome in outcomes.values() if outcome.error is not None]
        if len(errors) == len(outcomes) and not await self._works(replica):
            text = f"Score: none of {len(items)} samples has a score, the first error: {errors[0]}"
            raise PeerFault(replica.member.peer, errors[0].reason, text)
        for error in errors:
            self._router.faults.record(replica.member.member_id, error.reason, error.message)
        if good := next((i for i, s in zip(items, scores, strict=True) if s.HasField("score")), None):
            self._good[replica.reads_tokens] = good
        return outcomes

    async def _works(self, replica: Replica) -> bool:
        """Whether a scorer still scores what it has scored before; not, when it never has."""
        if (item := self._good.get(replica.reads_tokens)) is None:
            return False
        try:
            await self._probe(replica, item)
        except FourfoldError:
            return False
        return True

    async def _probe(self, replica: Replica, item: reward.ScoreItem) -> None:
        """Score one sample, with a short deadline.

        Raises:
            PeerFault: it has an error.
            FourfoldError: the call failed.
        """
        (score,) = await replica.reward.score([item], timeout=self._config.timeout_seconds + SLACK_SECONDS)
        if score.HasField("error"):
            text = f"Score: a single sample has the error {score.error.message or score.error.reason}"
            raise PeerFault(replica.member.peer, score.error.reason, text)

    @asynccontextmanager
    async def _shown_while_silent(self, replica: Replica, samples: int) -> AsyncIterator[None]:
        """Tell watchers when a call takes longer than any sample may; the call's own deadline may be far away."""
        seconds = self._config.timeout_seconds + SLACK_SECONDS

        async def tell() -> None:
            await self._router.clock.sleep(seconds)
            self._router.faults.show(
                replica.member.member_id,
                replica.title,
                f"no answer to a call of {samples} samples for {seconds:g} s; reward.timeout_seconds = "
                f"{self._config.timeout_seconds:g} is the longest time of one",
            )

        task = asyncio.create_task(tell())
        try:
            yield
        finally:
            task.cancel()

    async def _unless_lost(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call; give it up when another one has used up the tries of all (`failed`)."""
        task, lost = asyncio.ensure_future(call), self._lost
        either: set[asyncio.Future[Any]] = {task, lost}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                error = lost.result()
                raise GivenUp(f"given up with the other calls: {error}", reason=error.reason)
            return await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def record_failure(self, error: FourfoldError, budget: RetryBudget) -> None:
        """Note a call that failed because of its scorer.

        Raises:
            ScorerFailed: the run waits for scorers, and they have failed for too long.
            GivenUp: it does not wait, and the tries of this call, or of all scorers, are used up.
        """
        if self._config.on_error != "wait":
            replicas = self._router.replicas(Role.ROLE_REWARD)
            # Without replicas the tries are counted as for any other failure.
            if replicas and all(r.breaker.failures > self._tries for r in replicas):
                # One call at a time is made now: were each to use its own tries up, that would take hours.
                lost, self._lost = self._lost, asyncio.get_running_loop().create_future()
                lost.set_result(error)
                raise GivenUp(f"given up after its last try: {error}", reason=error.reason)
            budget.spend(error)
            return
        now = self._router.clock.monotonic()
        self._troubled_since = now if self._troubled_since is None else self._troubled_since
        if now - self._troubled_since > self._config.wait_seconds:
            raise self._ends(error, f"no scorer works for {self._config.wait_seconds:g} s (reward.wait_seconds)")

    def _ends(self, error: FourfoldError, what: str) -> ScorerFailed:
        """Return the error that ends the run: scorer, what happened, the first cause."""
        replicas = self._router.replicas(Role.ROLE_REWARD)
        first = next((r.breaker.first for r in replicas if r.breaker.first is not None), None) or error
        names = ", ".join(r.title for r in replicas) or "none is registered"
        return ScorerFailed(
            f"{what}; reward services: {names}; first error: {first.reason}: {first}. Repair the scorer and go on with "
            f'--resume; reward.on_error = "{self._config.on_error}" decides what an error does',
            reason=first.reason,
        )


@dataclass(frozen=True, slots=True)
class _Allowance:
    """What one call may lose."""

    scoring: Scoring
    budget: RetryBudget

    def spend(self, error: FourfoldError) -> None:
        """Count one lost try; what is wrong with the samples themselves always costs the group's own."""
        if isinstance(error, InvalidInput):
            self.budget.spend(error)
        else:
            self.scoring.record_failure(error, self.budget)


def _worth_a_try(errors: Mapping[str, FourfoldError], budget: RetryBudget) -> set[str]:
    """Take one try off the budget for each kind of error; return the samples whose kind had one left."""
    again: set[str] = set()
    for data in (False, True):
        kind = {name: error for name, error in errors.items() if isinstance(error, InvalidInput) is data}
        if kind:
            with suppress(GivenUp):
                budget.spend(next(iter(kind.values())))
                again |= kind.keys()
    return again


def _item(trajectory: Trajectory, *, with_tokens: bool) -> reward.ScoreItem:
    prompt, sample = trajectory.prompt, trajectory.sample
    ids_alone = Experience(sample_id=sample.sample_id, group_id=sample.group_id)
    return reward.ScoreItem(
        experience=encode(sample) if with_tokens else ids_alone,
        prompt_text=prompt.text,
        completion_text=trajectory.completion,
        answer=prompt.answer,
        metadata_json=prompt.metadata_json,
    )


def _outcome(score: reward.SampleScore, scorer: str) -> ScoreOutcome:
    match score.WhichOneof("outcome"):
        case "score":
            # The shortest decimal of the float32: 0.3 and not 0.30000001192092896, the same bits on the wire.
            return ScoreOutcome(score=float(str(np.float32(score.score))), scorer=scorer)
        case "abstain_reason":
            return ScoreOutcome(reason=score.abstain_reason, abstained=True)
    reason = score.error.reason
    kind = Unavailable if score.error.code in _SERVICE_TROUBLE else InvalidInput
    return ScoreOutcome(
        reason=reason, error=kind(f"sample {score.sample_id}: {score.error.message or reason}", reason=reason)
    )
