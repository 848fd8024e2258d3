"""Scores trajectories with one deployment of a scorer, and decides what a failure costs (`reward.on_error`).

    Score call --> some samples have a score: the scorer works
      |            a sample with an error is scored once more (retry.data, retry.infrastructure), then dropped
      '----------> no sample has a score: score again the last sample that had a score
                     it has one now:  the new samples are at fault, see above
                     it has none:     the call failed, as one that was refused, hung, or had a malformed response

    failed call    opens the service's circuit breaker; the next try goes to another one, or to the same one later
      wait   until a service works again, at most reward.wait_seconds; then the run ends
      drop   as long as tries are left (retry.infrastructure); then the groups that wait are dropped
      stop   as long as tries are left; then the run ends

No path turns a missing score into a number. A service that failed gets a call with one sample before it gets more.

Two services of a deployment may have different versions while one of them is replaced. Only those of one version get
calls, so that a step does not mix versions.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import re
import shlex
from collections import OrderedDict
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Final, TypeVar

from fourfold.config.reward import RewardConfig
from fourfold.config.schema import Config
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.errors import FourfoldError, InvalidInput, PeerFault
from fourfold.host.process_tree import PARENT_PID_VARIABLE
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.sample.wire import encode
from fourfold.types.v1.experience_pb2 import Experience

from ..routing.registry import Member
from ..routing.replica import CancelScopes, FatalRunError, GivenUp, Replica, RetryBudget, ScorerInputs
from ..routing.router import Router, WaitLimit
from ..routing.scheduling import Demand
from ..state.sample_traces import SCORE
from ..state.samples import Trajectory
from .outcome import Outcome, to_outcome
from .scorers import Deployment

T = TypeVar("T")

# Seconds for transport and queues, in addition to the time limit of scoring.
SLACK_SECONDS: Final = 10.0
# Scores that are kept of a pure scorer: the groups of many steps.
_CACHE_SAMPLES: Final = 65_536


class ScorerFailed(FatalRunError):
    """A scorer gives no scores, and `reward.on_error` ends the run."""


class DeploymentCalls:
    """Calls to the services of one deployment."""

    def __init__(
        self,
        config: Config,
        table: RewardConfig,
        deployment: Deployment,
        router: Router,
        costs: dict[str, float],
        *,
        run: str,
    ) -> None:
        """Prepare calls.

        Args:
            config: the recipe.
            table: that of the scorer.
            deployment: gets the calls.
            router: chooses its services.
            costs: what each scorer has cost in the whole run, in US dollars.
            run: name of the run's folder.
        """
        self._config, self._pool, self._router, self._costs = table, deployment.pool, router, costs
        self._run = run
        self._samples_per_step, self._tries = config.batch.samples_per_step, config.retry.infrastructure
        self.sample_count = 0  # samples with a score
        self._cache: OrderedDict[bytes, Outcome] = OrderedDict()  # outcomes of a pure scorer, by content
        self._cache_reads = ScorerInputs()  # the inputs in the keys of the cache
        self.scored: Trajectory | None = None
        """A sample that had a score. Scoring it again shows whether the scorer or the samples are at fault."""
        self._failing_since: float | None = None  # time of the first failed call after the last successful one
        # When the tries of all services are used up, all waiting calls are given up together.
        self._calls = CancelScopes()
        self._all_failed: FourfoldError | None = None  # the error of the last service
        self._version = ""  # name@version that gets calls

    @property
    def version(self) -> str:
        """Return name@version of the services that get calls; empty until one has answered."""
        self._of_one_version(self._replicas())
        return self._version

    def _replicas(self) -> list[Replica]:
        return self._router.replicas(Role.ROLE_REWARD, self._pool)

    def _of_one_version(self, replicas: list[Replica]) -> list[Replica]:
        """Return the services that may get calls; choose another version when no service has the present one."""
        names = [r.scorer for r in replicas if r.inspected_at and not r.unusable_reason]
        if names and self._version not in names:
            self._version = names[0]
        return [r for r in replicas if r.scorer == self._version]

    async def outcomes(self, trajectories: Sequence[Trajectory], budget: RetryBudget) -> dict[str, Outcome]:
        """Return the outcome of each trajectory of one group, by sample id.

        Raises:
            GivenUp: The services failed too often.
            ScorerFailed: The services failed too often, and `reward.on_error` ends the run.
            ServiceMissing: No reward service came in time.
        """
        outcomes = self._cached(trajectories)
        pending = [t for t in trajectories if t.sample.sample_id not in outcomes]
        while pending:
            self._check_cost()
            answers = await self._score_once(pending, budget)
            if cost := sum(outcome.cost_usd for outcome in answers.values()):
                self._costs[self._config.name] = self._costs.get(self._config.name, 0.0) + cost
            outcomes |= answers
            failed = {name: o.error for name, o in answers.items() if o.error is not None}
            again = _spend_for_errors(failed, budget)
            if self._config.on_error == "stop" and (lost := failed.keys() - again):
                raise self._scorer_failed(failed[min(lost)], f"sample {min(lost)} has no score")
            pending = [t for t in pending if t.sample.sample_id in again]
        self.sample_count += sum(outcome.score is not None for outcome in outcomes.values())
        return outcomes

    def _check_cost(self) -> None:
        """Raise GivenUp or ScorerFailed when the cost limit of this scorer is reached."""
        limit = self._config.max_cost_usd
        cost = self._costs.get(self._config.name, 0.0)
        if not limit or cost < limit:
            return
        text = f"scorer {self._config.name} has cost {cost:.2f} USD of max_cost_usd = {limit:g}"
        if self._config.on_error == "drop":
            raise GivenUp(text, reason="COST_LIMIT")
        raise ScorerFailed(f"{text}; raise it, and resume with --resume", reason="COST_LIMIT")

    # -- cache ------------------------------------------------------------------------------------------------------

    def _cached(self, trajectories: Sequence[Trajectory]) -> dict[str, Outcome]:
        """Return the outcomes that are known, by sample id."""
        if not self._cache:
            return {}
        found = dict[str, Outcome]()
        for trajectory in trajectories:
            key = self._cache_key(score_item(trajectory, self._cache_reads))
            if (outcome := self._cache.get(key)) is not None and outcome.scorer == self._version:
                self._cache.move_to_end(key)
                found[trajectory.sample.sample_id] = outcome
        return found

    def _keep(self, items: Sequence[reward.ScoreItem], outcomes: Mapping[str, Outcome], replica: Replica) -> None:
        """Remember the scores of a pure scorer."""
        self._cache_reads = replica.reads
        for item in items:
            outcome = outcomes[item.experience.sample_id]
            if outcome.score is not None:
                self._cache[self._cache_key(item)] = replace(outcome, cost_usd=0.0)
        while len(self._cache) > _CACHE_SAMPLES:
            self._cache.popitem(last=False)

    @staticmethod
    def _cache_key(item: reward.ScoreItem) -> bytes:
        experience = item.experience
        texts = (item.prompt_text, item.completion_text, item.answer, item.metadata_json, item.prompt_messages_json)
        digest = hashlib.blake2b(digest_size=16)
        for data in (*(text.encode() for text in texts), experience.token_ids, experience.action_mask):
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
        return digest.digest()

    # -- calls ------------------------------------------------------------------------------------------------------

    async def _score_once(self, trajectories: Sequence[Trajectory], budget: RetryBudget) -> Mapping[str, Outcome]:
        async def work(replica: Replica) -> dict[str, Outcome]:
            with self._shown_while_silent(replica, len(trajectories)):
                return await self._score_at(replica, trajectories)

        def spend(error: FourfoldError) -> None:
            if isinstance(error, InvalidInput):  # a fault of the samples always costs a try of the group
                budget.spend(error)
            else:
                self.record_failure(error, budget)

        call = self._router.call(
            Role.ROLE_REWARD,
            work,
            demand=Demand(samples=len(trajectories)),
            spend=spend,
            wait=self._wait_limit(),
            pool=self._pool,
            choose=self._of_one_version,
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
        """Return the longest wait of a call for a scorer: with on_error = "wait", the longer of the two waits."""
        if self._config.on_error != "wait" or self._config.wait_seconds <= self._router.wait_seconds:
            return None
        return WaitLimit(self._config.wait_seconds, "reward.wait_seconds")

    async def _score_at(self, replica: Replica, trajectories: Sequence[Trajectory]) -> dict[str, Outcome]:
        """Score trajectories at one replica; raise PeerFault when no sample has an outcome of a working scorer."""
        items = [score_item(t, replica.reads) for t in trajectories]
        if replica.breaker.probing:
            await self.probe(replica, self.scored or trajectories[0])
        # Calls of other groups may come before this one in the service's queue.
        rounds = math.ceil(max(self._samples_per_step, replica.outstanding) / self._config.processes)
        timeout = self._config.timeout_seconds * rounds + SLACK_SECONDS
        try:
            with self._router.traces.call(SCORE, [t.sample.sample_id for t in trajectories], replica.title) as traced:
                scores = await replica.reward.score(items, timeout=timeout, max_sample_count=replica.max_items)
                for index, score in enumerate(scores):
                    if score.HasField("score"):
                        traced.end(index, {"gen_ai.evaluation.score.value": score.score})
        except InvalidInput as refusal:
            if await self._still_scores(replica):
                raise
            text = f"Score: every request is refused: {refusal}"
            raise PeerFault(replica.member.peer, refusal.reason, text) from refusal
        pairs = zip(scores, trajectories, strict=True)
        outcomes = {score.sample_id: to_outcome(score, replica.scorer, t.sample) for score, t in pairs}
        errors = [outcome.error for outcome in outcomes.values() if outcome.error is not None]
        if len(errors) == len(outcomes) and not await self._still_scores(replica):
            replica.advice = restart_advice(self._config, self._run, replica.member)
            text = f"Score: none of {len(items)} samples has a score; first error: {errors[0]}"
            raise PeerFault(replica.member.peer, errors[0].reason, text)
        for error in errors:
            self._router.faults.record(replica.member.member_id, error.reason, error.message)
        self.scored = next((t for t in trajectories if outcomes[t.sample.sample_id].score is not None), self.scored)
        if replica.pure:
            self._keep(items, outcomes, replica)
        return outcomes

    async def _still_scores(self, replica: Replica) -> bool:
        """Score `scored` again; return whether it has a score again. Return False when no sample had a score yet."""
        if self.scored is None:
            return False
        try:
            await self.probe(replica, self.scored)
        except FourfoldError:
            return False
        return True

    async def probe(self, replica: Replica, trajectory: Trajectory) -> None:
        """Score one sample, with the deadline of one sample; raise PeerFault when it has an error."""
        item = score_item(trajectory, replica.reads)
        (score,) = await replica.reward.score([item], timeout=self._config.timeout_seconds + SLACK_SECONDS)
        if score.HasField("error"):
            text = f"Score: a single sample has the error {score.error.message or score.error.reason}"
            raise PeerFault(replica.member.peer, score.error.reason, text)

    @contextmanager
    def _shown_while_silent(self, replica: Replica, samples: int) -> Iterator[None]:
        """Show watchers a call that takes longer than one sample may; its own deadline may be far away."""
        seconds = self._config.timeout_seconds + SLACK_SECONDS

        def show() -> None:
            self._router.faults.show(
                replica.member.member_id,
                replica.title,
                f"no answer to a call of {samples} samples for {seconds:g} s; reward.timeout_seconds = "
                f"{self._config.timeout_seconds:g} is the longest time of one",
            )

        timer = asyncio.get_running_loop().call_later(seconds, show)
        try:
            yield
        finally:
            timer.cancel()

    async def _unless_all_fail(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call, and give it up when another call finds that all scorers have failed."""
        if (done := await self._calls.run(call)) is None:
            error = self._all_failed
            assert error is not None, "set before the calls are cancelled"
            raise GivenUp(f"given up with the other calls: {error}", reason=error.reason)
        return done[0]

    def record_failure(self, error: FourfoldError, budget: RetryBudget) -> None:
        """Count a call that its scorer made fail; raise ScorerFailed or GivenUp if it was the last try."""
        if self._config.on_error != "wait":
            replicas = self._replicas()
            # Without services, count the tries as for any other failure.
            if replicas and all(r.breaker.failures > self._tries for r in replicas):
                # An open breaker admits one call at a time. It would take hours until each waiting call had used up its
                # tries, so all of them are given up at once.
                self._all_failed = error
                self._calls.cancel()
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
        replicas = self._replicas()
        first = next((r.breaker.first for r in replicas if r.breaker.first is not None), None) or error
        names = ", ".join(r.title for r in replicas) or "none is registered"
        return ScorerFailed(
            f"{what}; reward services: {names}; first error: {first.reason}: {first}. Repair the scorer and "
            f'resume with --resume; reward.on_error = "{self._config.on_error}" decides what an error does',
            reason=first.reason,
        )


def restart_advice(table: RewardConfig, run: str, member: Member) -> str:
    """Return how to load a corrected program into a service that the launcher started; empty for other services.

    The service cannot reload the file, because its name@version contains the digest of the file.
    """
    launched = PARENT_PID_VARIABLE in os.environ and table.replicas and not member.permanent
    if not launched or not (":" in table.function or table.command):
        return ""
    pattern = shlex.quote(f"/{re.escape(run)}/config.toml --member-id {member.member_id} ")
    return (
        f"samples without a score: correct `{table.title}`, then end its service, which the launcher starts again with "
        f"the new code, on its machine: pkill -f {pattern}"
    )


def _spend_for_errors(errors: Mapping[str, FourfoldError], budget: RetryBudget) -> set[str]:
    """Spend one try for each kind of error; return the samples whose kind had a try left."""
    again: set[str] = set()
    for data in (False, True):
        kind = {name: error for name, error in errors.items() if isinstance(error, InvalidInput) is data}
        if kind:
            with suppress(GivenUp):
                budget.spend(next(iter(kind.values())))
                again |= kind.keys()
    return again


def score_item(trajectory: Trajectory, reads: ScorerInputs) -> reward.ScoreItem:
    """Return the request to score one trajectory: its texts and the other inputs that the scorer reads."""
    prompt, sample = trajectory.prompt, trajectory.sample
    ids_only = Experience(sample_id=sample.sample_id, group_id=sample.group_id)
    return reward.ScoreItem(
        experience=encode(sample) if reads.tokens else ids_only,
        prompt_text=prompt.text,
        # The last turn is the answer: a verifier must not find an answer in the result of a tool.
        completion_text=trajectory.completion if trajectory.last_turn is None else trajectory.last_turn,
        answer=prompt.answer,
        metadata_json=prompt.metadata_json,
        prompt_messages_json=prompt.messages_json if reads.messages else "",
    )
