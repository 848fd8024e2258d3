"""The batch of one step: every group goes its way as fast as it can.

    draw --> issue --+--> sample --> score --+--> keep? --> reference --> READY, in the batch
     ^               |                       |      |           |
     |               +--> greedy --> score --+      no        lost: DROPPED(why)
     |                    (ReMax alone)      |      |           |
     +---------------- the next prompt ------+------+-----------+

A prompt is drawn only when a place in the batch is free, so that without lost groups the prompts
of a step and the groups that it keeps are the same whichever answers come first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from fourfold.errors import WrongState

from ..data.filter import teaches
from ..data.prompts import Prompt, derive_seed
from ..routing.replica import GivenUp, RetryBudget
from ..state.ledger import BASELINE, FILTERED, IssuedGroup, SampleState
from ..state.samples import SampleGroup, StepBatch, Trajectory
from .context import RunContext
from .scoring import ScoreOutcome
from .tasks import all_of

log = logging.getLogger("fourfold.coordinator")


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """A group that is being made."""

    prompt: Prompt
    position: int
    seed: int
    version: int
    budget: RetryBudget
    issued: IssuedGroup
    sample_ids: tuple[str, ...]
    """To train on."""
    baseline_ids: tuple[str, ...]
    """Of the greedy answer: none or one."""
    alive: set[str]
    """Neither dropped nor done with."""
    answers: dict[str, Trajectory] = field(default_factory=dict)
    """What was sampled, as far as it has come."""

    def group(self) -> SampleGroup:
        """Return what was made."""
        return SampleGroup(
            position=self.position,
            seed=self.seed,
            trajectories=tuple(self.answers[name] for name in self.sample_ids),
            baseline=next((self.answers[name] for name in self.baseline_ids), None),
        )


class BatchCollector:
    """Makes batches, and knows how many prompts were drawn."""

    def __init__(self, parts: RunContext) -> None:
        self.position = 0
        """Prompts drawn since the start of the run."""
        self._config, self._prompts, self._ledger = parts.config, parts.prompts, parts.ledger
        self._peers, self._board, self._session = parts.peers, parts.board, parts.session
        self._router, self._disk = parts.router, parts.disk
        self._count = parts.config.batch.prompts_per_step
        self._rule = parts.config.algorithm.filter
        self._fewest = 2 if parts.config.algorithm.compares_samples else 1
        self._baselines = int(parts.config.algorithm.advantage.needs_greedy_sample)

    async def collect(self, step: int, *, version: int) -> StepBatch:
        """Return the batch of `step`, sampled by the weights of `version`, at least.

        Raises:
            WrongState: every group was lost.
        """
        batch = StepBatch()
        work = [self._fill_a_place(step, version, batch) for _ in range(self._count)]
        await all_of(work, beside=self._session.watch())
        batch.engines = self._router.engine_metrics()
        batch.groups_accepted = len(batch.groups)
        batch.filtered.sort(key=lambda group: group.position)
        if not batch.groups:
            await self._keep_the_last(step, batch)
        elif len(batch.groups) < self._count:
            log.warning(
                "step %d goes on with %d of %d groups: of %d prompts %d were lost and %d taught nothing",
                step, len(batch.groups), self._count, batch.prompts_drawn, batch.groups_lost, len(batch.filtered),
            )  # fmt: skip
        filtered = [s.sample_id for group in batch.filtered for s in group.samples]
        await self._disk.write(self._ledger.drop, filtered, FILTERED)
        batch.groups.sort(key=lambda group: group.position)
        batch.done = time.monotonic()
        if not batch.groups:
            reasons = ", ".join(f"{n} {reason}" for reason, n in self._ledger.dropped(step).items())
            raise WrongState(
                f"step {step}: no group is left to train on; dropped samples: {reasons}; "
                f"{self._router.faults.first_of(self._ledger.dropped(step)) or 'see the log'}"
            )
        return batch

    async def _fill_a_place(self, step: int, version: int, batch: StepBatch) -> None:
        """Add one group to the batch; one that is lost or filtered out is replaced by the next prompt."""
        while self._may_draw(batch):
            attempt = await self._begin(step, version, batch)
            try:
                group = await self._make(attempt, batch)
            except GivenUp as error:
                await self._lose(attempt, batch, error)
                continue
            if group is None:
                continue
            batch.groups.append(group)
            self._board.set_progress(len(batch.groups) / self._count)
            return

    def _may_draw(self, batch: StepBatch) -> bool:
        """Whether a free place may take a prompt: not when too many were lost, or filtered out."""
        if self._rule.keep != "all" and batch.prompts_drawn >= self._rule.max_rounds * self._count:
            return False
        rounds = 1 if batch.groups or batch.filtered else self._config.reward.lost_rounds
        return batch.groups_lost <= self._count * rounds

    async def _begin(self, step: int, version: int, batch: StepBatch) -> _Attempt:
        """Draw the next prompt of the endless order and issue its samples; the greedy answer has the last id."""
        position, size = self.position, self._config.batch.group_size
        self.position += 1
        batch.prompts_drawn += 1
        prompt = self._prompts.at(position)
        count = size + self._baselines
        issued = await self._disk.write(self._ledger.issue, step=step, position=position, count=count)
        return _Attempt(
            prompt=prompt,
            position=position,
            seed=derive_seed(self._config.seed, "train", position, prompt.index),
            version=version,
            budget=self._peers.budget(),
            issued=issued,
            sample_ids=issued.sample_ids[:size],
            baseline_ids=issued.sample_ids[size:],
            alive=set(issued.sample_ids),
        )

    async def _make(self, attempt: _Attempt, batch: StepBatch) -> SampleGroup | None:
        """Sample one prompt and score the answers; None when they teach nothing.

        Raises:
            GivenUp: too few samples are left, or a service failed too often.
        """
        if attempt.baseline_ids:
            sampled = self._answer(attempt, attempt.sample_ids, batch)
            await all_of([sampled, self._answer(attempt, attempt.baseline_ids, batch, greedy=True)])
            await self._compare(attempt)
        else:
            await self._answer(attempt, attempt.sample_ids, batch)
        if len(attempt.alive) < self._fewest:
            raise GivenUp(f"{len(attempt.alive)} of its samples have a score", reason="GROUP_TOO_SMALL")
        group = attempt.group()
        if not teaches([s.score for s in group.samples if s.score is not None], self._rule):
            batch.filtered.append(group)
            return None
        group = await self._referenced(group, attempt.budget)
        await self._disk.write(self._ledger.move, sorted(attempt.alive), SampleState.READY)
        return group

    async def _answer(
        self, attempt: _Attempt, sample_ids: Sequence[str], batch: StepBatch, *, greedy: bool = False
    ) -> None:
        """Sample and score answers; those without a score are dropped."""
        trajectories = await self._peers.generate(
            attempt.prompt,
            group_id=attempt.issued.group_id,
            sample_ids=sample_ids,
            seed=attempt.seed,
            version=attempt.version,
            budget=attempt.budget,
            greedy=greedy,
            on_try=lambda: self._running(sample_ids),
        )
        batch.rolled = time.monotonic()
        await self._disk.write(self._ledger.move, sample_ids, SampleState.ROLLED)
        attempt.answers |= zip(sample_ids, trajectories, strict=True)
        outcomes = await self._peers.score(trajectories, attempt.budget)
        batch.scored = time.monotonic()
        for name, trajectory, outcome in zip(sample_ids, trajectories, outcomes, strict=True):
            attempt.answers[name] = await self._judge(trajectory, outcome, attempt.alive)

    async def _judge(self, trajectory: Trajectory, outcome: ScoreOutcome, alive: set[str]) -> Trajectory:
        """Return a trajectory with its score, or drop it with the reason why it has none: no score is no zero."""
        if outcome.score is not None:
            return trajectory.with_score(outcome.score, outcome.scorer)
        alive.discard(trajectory.sample.sample_id)
        await self._disk.write(self._ledger.drop, [trajectory.sample.sample_id], outcome.reason)
        return trajectory.with_drop_reason(outcome.reason, abstained=outcome.abstained)

    async def _compare(self, attempt: _Attempt) -> None:
        """Give every sample the score of the greedy answer, which has then served its purpose."""
        (name,) = attempt.baseline_ids
        baseline = attempt.answers[name]
        if baseline.sample.score is None:
            raise GivenUp("its greedy answer has no score", reason="NO_BASELINE")
        for sample_id in attempt.sample_ids:
            attempt.answers[sample_id] = attempt.answers[sample_id].with_baseline(baseline.sample.score)
        attempt.answers[name] = baseline.with_drop_reason(BASELINE)
        attempt.alive.discard(name)
        await self._disk.write(self._ledger.drop, [name], BASELINE)

    async def _referenced(self, group: SampleGroup, budget: RetryBudget) -> SampleGroup:
        """Return the group, what is trained on with its reference log-probabilities if the algorithm needs them."""
        if not self._config.needs_reference:
            return group
        kept = iter(await self._peers.reference([t for t in group.trajectories if not t.dropped], budget))
        return replace(group, trajectories=tuple(t if t.dropped else next(kept) for t in group.trajectories))

    async def _lose(self, attempt: _Attempt, batch: StepBatch, error: GivenUp) -> None:
        """Drop what is left of a group."""
        log.warning("group %s is lost: %s", attempt.issued.group_id, error, extra={"reason": error.reason})
        await self._disk.write(self._ledger.drop, sorted(attempt.alive), error.reason)
        batch.lost += [t.with_drop_reason(error.reason) for t in attempt.answers.values()]
        batch.groups_lost += 1

    async def _keep_the_last(self, step: int, batch: StepBatch) -> None:
        """Make a batch of the last groups that were filtered out, with no token to train on.

        The trainer takes no empty batch. It skips this one, whatever its advantages come to after penalties, KL and
        whitening; the step is counted and the run goes on.
        """
        chosen, batch.filtered = batch.filtered[-self._count :], batch.filtered[: -self._count]
        if chosen:
            log.warning("step %d has nothing to learn: none of %d prompts taught anything", step, batch.prompts_drawn)
        await all_of((self._muted(group, batch) for group in chosen), beside=self._session.watch())

    async def _muted(self, group: SampleGroup, batch: StepBatch) -> None:
        try:
            group = await self._referenced(group, self._peers.budget())
        except GivenUp:
            batch.filtered.append(group)  # as it was going to be
            return
        kept = [sample.sample_id for sample in group.samples]
        await self._disk.write(self._ledger.move, kept, SampleState.READY)
        muted = tuple(t if t.dropped else t.without_loss() for t in group.trajectories)
        batch.groups.append(replace(group, trajectories=muted))

    @asynccontextmanager
    async def _running(self, sample_ids: Sequence[str]) -> AsyncIterator[None]:
        """One try of sampling: RUNNING within; ISSUED again when it is lost.

        After a cancellation the samples stay RUNNING: the run ends or goes back, and a restore drops them.
        """
        await self._disk.write(self._ledger.move, sample_ids, SampleState.RUNNING)
        try:
            yield
        except Exception:
            await self._disk.write(self._ledger.move, sample_ids, SampleState.ISSUED)
            raise
