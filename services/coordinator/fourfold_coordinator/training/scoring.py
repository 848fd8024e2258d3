"""Scores trajectories at the reward services, and decides what a failure costs (`reward.on_error`).

    Score call --> some samples have a score: the scorer works
      |            a sample with an error is scored once more (retry.data, retry.infrastructure), then it is dropped
      '----------> no sample has a score: score the sample again that had one last
                     it has one now:  the samples are at fault, see above
                     it has none:     the call failed, as one that was refused, hung, or had a malformed response

    failed call    opens the scorer's circuit breaker; the next try goes to another scorer, or to the same one later
      wait   until a scorer works again, at most reward.wait_seconds; then the run ends
      drop   as long as tries are left (retry.infrastructure); then the groups that wait are dropped
      stop   as long as tries are left; then the run ends

No path turns a missing score into a number. A scorer that failed gets a call with one sample before it gets more.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from google.rpc import code_pb2

from fourfold.config import Config
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import FourfoldError, InvalidInput, PeerFault, Unavailable
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.rpc.codec import encode
from fourfold.types.v1.experience_pb2 import Experience

from ..routing.replica import FatalRunError, GivenUp, Replica, RetryBudget, ScorerInputs
from ..routing.router import Router, WaitLimit
from ..routing.scheduling import Demand
from ..state.samples import Trajectory, shortest

T = TypeVar("T")

# For transport and queues, on top of the time that scoring itself may take.
SLACK_SECONDS: Final = 10.0
# Per-sample errors that are the service's fault. A time-out is the sample's: a function that hangs on a sample hangs
# on it again, and each try costs the whole time limit.
_SERVICE_ERRORS: Final = (code_pb2.UNAVAILABLE,)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """Result of scoring one sample: a score, or the reason why there is none."""

    score: float | None = None
    scorer: str = ""
    reason: str = ""
    abstained: bool = False
    error: FourfoldError | None = None

    def apply_to(self, trajectory: Trajectory) -> Trajectory:
        if self.score is None:  # a missing score is not a zero
            return trajectory.with_drop_reason(self.reason, abstained=self.abstained)
        return trajectory.with_score(self.score, self.scorer)


class ScorerFailed(FatalRunError):
    """There are no scores, and the recipe ends the run for that."""


class Scoring:
    """Calls to the reward services of a run."""

    def __init__(self, config: Config, router: Router) -> None:
        self._config, self._router = config.reward[0], router
        self._samples_per_step, self._tries = config.batch.samples_per_step, config.retry.infrastructure
        # Items that had a score, by what they carry: they tell a scorer that fails from samples that do.
        self._scored_items: dict[ScorerInputs, reward.ScoreItem] = {}
        self._failing_since: float | None = None  # time of the first failed call since one worked
        # Resolved when all scorers have used up their tries: the calls that wait for them are given up together.
        self._all_failed: asyncio.Future[FourfoldError] = asyncio.get_running_loop().create_future()

    async def score(self, trajectories: Sequence[Trajectory], budget: RetryBudget) -> list[Trajectory]:
        """Return the trajectories of one group, each with its score, or dropped with the reason why it has none.

        Raises:
            GivenUp: The services failed too often.
            ScorerFailed: They did, and `reward.on_error` ends the run for that.
            ServiceMissing: No reward service came in time.
        """
        outcomes: dict[str, _Outcome] = {}
        pending = list(trajectories)
        while pending:
            answers = await self._score_once(pending, budget)
            outcomes |= answers
            failed = {name: o.error for name, o in answers.items() if o.error is not None}
            again = _spend_for_errors(failed, budget)
            if self._config.on_error == "stop" and (lost := failed.keys() - again):
                raise self._scorer_failed(failed[min(lost)], f"sample {min(lost)} has no score")
            pending = [t for t in pending if t.sample.sample_id in again]
        return [outcomes[t.sample.sample_id].apply_to(t) for t in trajectories]

    async def _score_once(self, trajectories: Sequence[Trajectory], budget: RetryBudget) -> Mapping[str, _Outcome]:
        async def work(replica: Replica) -> dict[str, _Outcome]:
            async with self._shown_while_silent(replica, len(trajectories)):
                return await self._score_at(replica, trajectories)

        def spend(error: FourfoldError) -> None:
            if isinstance(error, InvalidInput):  # a fault of the samples always costs the group's own budget
                budget.spend(error)
            else:
                self.record_failure(error, budget)

        call = self._router.call(
            Role.ROLE_REWARD, work, demand=Demand(samples=len(trajectories)), spend=spend, wait=self._wait_limit()
        )
        try:
            outcomes = await self._unless_all_fail(call)
        except GivenUp as error:
            if self._config.on_error == "stop":
                what = f"a group of {len(trajectories)} samples has no scores"
                raise self._scorer_failed(error, what) from error
            raise
        self._failing_since = None
        return outcomes

    def _wait_limit(self) -> WaitLimit | None:
        """Return how long a call waits for a scorer: with on_error = "wait", the longer of the two waits."""
        if self._config.on_error != "wait" or self._config.wait_seconds <= self._router.wait_seconds:
            return None
        return WaitLimit(self._config.wait_seconds, "reward.wait_seconds")

    async def _score_at(self, replica: Replica, trajectories: Sequence[Trajectory]) -> dict[str, _Outcome]:
        """Score trajectories at one replica; raise PeerFault when no sample has an outcome of a working scorer."""
        items = [score_item(t, replica.reads) for t in trajectories]
        if replica.breaker.probing:
            await self._probe(replica, self._scored_items.get(replica.reads, items[0]))
        # Calls of other groups may be ahead of this one in the service's queue.
        rounds = math.ceil(max(self._samples_per_step, replica.outstanding) / self._config.processes)
        timeout = self._config.timeout_seconds * rounds + SLACK_SECONDS
        try:
            scores = await replica.reward.score(items, timeout=timeout, max_sample_count=replica.max_items)
        except InvalidInput as refusal:
            if await self._still_scores(replica):
                raise
            text = f"Score: every request is refused: {refusal}"
            raise PeerFault(replica.member.peer, refusal.reason, text) from refusal
        outcomes = {score.sample_id: _outcome(score, replica.scorer) for score in scores}
        errors = [outcome.error for outcome in outcomes.values() if outcome.error is not None]
        if len(errors) == len(outcomes) and not await self._still_scores(replica):
            text = f"Score: none of {len(items)} samples has a score; first error: {errors[0]}"
            raise PeerFault(replica.member.peer, errors[0].reason, text)
        for error in errors:
            self._router.faults.record(replica.member.member_id, error.reason, error.message)
        if scored := next((i for i, s in zip(items, scores, strict=True) if s.HasField("score")), None):
            self._scored_items[replica.reads] = scored
        return outcomes

    async def _still_scores(self, replica: Replica) -> bool:
        """Return whether a scorer scores a sample again that had a score; False when no sample had one yet."""
        if (item := self._scored_items.get(replica.reads)) is None:
            return False
        try:
            await self._probe(replica, item)
        except FourfoldError:
            return False
        return True

    async def _probe(self, replica: Replica, item: reward.ScoreItem) -> None:
        """Score one sample, with the deadline of one sample; raise PeerFault when it has an error."""
        (score,) = await replica.reward.score([item], timeout=self._config.timeout_seconds + SLACK_SECONDS)
        if score.HasField("error"):
            text = f"Score: a single sample has the error {score.error.message or score.error.reason}"
            raise PeerFault(replica.member.peer, score.error.reason, text)

    @asynccontextmanager
    async def _shown_while_silent(self, replica: Replica, samples: int) -> AsyncIterator[None]:
        """Show watchers a call that takes longer than one sample may; its own deadline may be far away."""
        seconds = self._config.timeout_seconds + SLACK_SECONDS

        async def show_later() -> None:
            await self._router.clock.sleep(seconds)
            self._router.faults.show(
                replica.member.member_id,
                replica.title,
                f"no answer to a call of {samples} samples for {seconds:g} s; reward.timeout_seconds = "
                f"{self._config.timeout_seconds:g} is the longest time of one",
            )

        task = asyncio.create_task(show_later())
        try:
            yield
        finally:
            task.cancel()

    async def _unless_all_fail(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call, and give it up when another call finds that all scorers have failed."""
        task, all_failed = asyncio.ensure_future(call), self._all_failed
        either: set[asyncio.Future[Any]] = {task, all_failed}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                error = all_failed.result()
                raise GivenUp(f"given up with the other calls: {error}", reason=error.reason)
            return await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def record_failure(self, error: FourfoldError, budget: RetryBudget) -> None:
        """Count a call that failed because of its scorer; raise ScorerFailed or GivenUp if it was the last try."""
        if self._config.on_error != "wait":
            replicas = self._router.replicas(Role.ROLE_REWARD)
            # Without replicas the tries are counted as for any other failure.
            if replicas and all(r.breaker.failures > self._tries for r in replicas):
                # An open breaker admits one call at a time. If each waiting call had to use up its own tries, that
                # would take hours; so all of them are given up at once.
                all_failed, self._all_failed = self._all_failed, asyncio.get_running_loop().create_future()
                all_failed.set_result(error)
                raise GivenUp(f"given up after its last try: {error}", reason=error.reason)
            budget.spend(error)
            return
        now = self._router.clock.monotonic()
        self._failing_since = now if self._failing_since is None else self._failing_since
        if now - self._failing_since > self._config.wait_seconds:
            what = f"no scorer works for {self._config.wait_seconds:g} s (reward.wait_seconds)"
            raise self._scorer_failed(error, what)

    def _scorer_failed(self, error: FourfoldError, what: str) -> ScorerFailed:
        """Return the error that ends the run: what happened, the scorers, and the first cause."""
        replicas = self._router.replicas(Role.ROLE_REWARD)
        first = next((r.breaker.first for r in replicas if r.breaker.first is not None), None) or error
        names = ", ".join(r.title for r in replicas) or "none is registered"
        return ScorerFailed(
            f"{what}; reward services: {names}; first error: {first.reason}: {first}. Repair the scorer and "
            f'resume with --resume; reward.on_error = "{self._config.on_error}" decides what an error does',
            reason=first.reason,
        )


def _spend_for_errors(errors: Mapping[str, FourfoldError], budget: RetryBudget) -> set[str]:
    """Spend one try for each kind of error; return the samples whose kind had one left."""
    again: set[str] = set()
    for data in (False, True):
        kind = {name: error for name, error in errors.items() if isinstance(error, InvalidInput) is data}
        if kind:
            with suppress(GivenUp):
                budget.spend(next(iter(kind.values())))
                again |= kind.keys()
    return again


def score_item(trajectory: Trajectory, reads: ScorerInputs) -> reward.ScoreItem:
    """Return the request to score one trajectory, with its texts and with what the scorer reads besides them."""
    prompt, sample = trajectory.prompt, trajectory.sample
    ids_only = Experience(sample_id=sample.sample_id, group_id=sample.group_id)
    return reward.ScoreItem(
        experience=encode(sample) if reads.tokens else ids_only,
        prompt_text=prompt.text,
        # The last turn is the answer; a verifier must not find one in a result of a tool.
        completion_text=trajectory.completion if trajectory.last_turn is None else trajectory.last_turn,
        answer=prompt.answer,
        metadata_json=prompt.metadata_json,
        prompt_messages_json=prompt.messages_json if reads.messages else "",
    )


def _outcome(score: reward.SampleScore, scorer: str) -> _Outcome:
    match score.WhichOneof("outcome"):
        case "score":
            return _Outcome(score=shortest(score.score), scorer=scorer)
        case "abstain_reason":
            return _Outcome(reason=score.abstain_reason, abstained=True)
    reason = score.error.reason
    error_class = Unavailable if score.error.code in _SERVICE_ERRORS else InvalidInput
    error = error_class(f"sample {score.sample_id}: {score.error.message or reason}", reason=reason)
    return _Outcome(reason=reason, error=error)
