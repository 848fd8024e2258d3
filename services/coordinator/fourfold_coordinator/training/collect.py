"""Collects the batch of one step: generates, scores and filters groups until the batch is full.

    draw --> issue --+--> generate --> score --+--> keep_group? --> reference --> READY, in the batch
     ^               |                         |      |                |
     |               +--> greedy ----> score --+      no          lost: DROPPED(reason)
     |                    (remax)                     |                |
     +------------------ the next prompt -------------+----------------+

Each place in the batch has a task, which draws prompts until one yields a group. No prompt is drawn in advance: as
long as no group is lost, the groups of a step do not depend on the order in which responses arrive.

A READY group is durable. After a restore, a prompt whose group was READY yields that group again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from math import fsum

import numpy as np

from fourfold.arrays import VersionSpan
from fourfold.config.algorithm import FilterConfig
from fourfold.errors import FourfoldError, WrongState

from ..data.prompts import Prompt, derive_seed
from ..routing.replica import GivenUp, RetryBudget
from ..state.ledger import BASELINE, FILTERED, STALE, IssuedGroup, SampleState
from ..state.samples import SampleGroup, StepBatch, Trajectory
from .context import RunContext

log = logging.getLogger("fourfold.coordinator")


def keep_group(scores: Sequence[float], rule: FilterConfig) -> bool:
    """Return whether dynamic sampling (DAPO, arXiv 2503.14476) keeps a group.

    `scores` (at least one) are those of the scorer, before any penalty. `mean-inside` is OpenRLHF's rule: it keeps a
    group in which every sample scored 0.5.
    """
    match rule.keep:
        case "varied":
            return max(scores) > min(scores)
        case "mean-inside":
            return rule.low < fsum(scores) / len(scores) < rule.high
        case "all":
            return True


@dataclass(slots=True, kw_only=True)
class _GroupDraft:
    """A group whose samples are not all generated and scored."""

    prompt: Prompt
    position: int
    seed: int
    version: int
    budget: RetryBudget
    issued: IssuedGroup
    sample_ids: tuple[str, ...]  # to train on
    baseline_ids: tuple[str, ...]  # of the greedy completion, whose score is the baseline of ReMax: none or one
    trajectories: dict[str, Trajectory] = field(default_factory=dict)  # those generated so far, by sample id

    @property
    def alive(self) -> list[str]:
        """Return the samples that are not dropped, generated or not."""
        dropped = {name for name, trajectory in self.trajectories.items() if trajectory.dropped}
        return [name for name in self.issued.sample_ids if name not in dropped]

    def finish(self) -> SampleGroup:
        """Return the group; every sample has its completion."""
        return SampleGroup(
            position=self.position,
            seed=self.seed,
            trajectories=tuple(self.trajectories[name] for name in self.sample_ids),
            baseline=next((self.trajectories[name] for name in self.baseline_ids), None),
        )


class BatchCollector:
    """Collects the batches of a run."""

    def __init__(self, context: RunContext) -> None:
        self.prompts_drawn = 0  # since the start of the run: the position in the data
        self._recovered: dict[int, SampleGroup] = {}  # by position
        self._config, self._prompts, self._ledger = context.config, context.prompts, context.ledger
        self._service_calls, self._session = context.service_calls, context.session
        self._board, self._router, self._disk = context.board, context.router, context.disk
        self._experiences = context.experiences
        algorithm = context.config.algorithm
        self._count = context.config.batch.prompts_per_step
        self._filter = algorithm.filter
        self._min_samples = 2 if algorithm.compares_samples else 1
        self._baselines = int(algorithm.advantage.needs_greedy_sample)

    def resume(self, prompts_drawn: int, recovered: Iterable[SampleGroup]) -> None:
        """Continue at a position in the data, with groups that were sampled by the present weights."""
        self.prompts_drawn = prompts_drawn
        self._recovered = {group.position: group for group in recovered}

    async def collect(self, step: int, *, version: int) -> StepBatch:
        """Return the batch of a step, sampled by policy `version` or later; raise WrongState if all groups are lost."""
        batch = StepBatch()
        await self._session.run_all(self._fill_place(step, version, batch) for _ in range(self._count))
        batch.engines = self._router.engine_metrics()
        batch.groups_accepted = len(batch.groups)
        batch.filtered.sort(key=lambda group: group.position)
        if not batch.groups:
            await self._keep_muted_groups(step, batch)
        elif len(batch.groups) < self._count:
            log.warning(
                "batch is incomplete: step=%d groups=%d wanted=%d prompts=%d lost=%d filtered=%d",
                step, len(batch.groups), self._count, batch.prompts_drawn, batch.groups_lost, len(batch.filtered),
            )  # fmt: skip
        await self._drop_recovered()
        filtered = [s.sample_id for group in batch.filtered for s in group.samples]
        await self._disk.write(self._ledger.drop, filtered, FILTERED)
        batch.groups.sort(key=lambda group: group.position)
        batch.done = time.monotonic()
        if not batch.groups:
            dropped = self._ledger.dropped(step)
            reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
            raise WrongState(
                f"step {step}: no group is left to train on; dropped samples: {reasons}; "
                f"{self._router.faults.first_of(dropped) or 'see the log'}"
            )
        return batch

    async def _fill_place(self, step: int, version: int, batch: StepBatch) -> None:
        """Add one group to the batch; draw the next prompt when one is lost or filtered out."""
        while self._may_draw(batch):
            position = self._draw_position(batch)
            if (group := self._recovered.pop(position, None)) is not None:
                self._add_group(_with_version(group, version), batch)
                batch.rolled = batch.scored = time.monotonic()
                return
            draft = await self._issue(step, version, position)
            try:
                group = await self._make_group(draft, batch)
            except GivenUp as error:
                log.warning("group lost: group=%s reason=%s: %s", draft.issued.group_id, error.reason, error)
                await self._disk.write(self._ledger.drop, draft.alive, error.reason)
                batch.lost += [t.with_drop_reason(error.reason) for t in draft.trajectories.values()]
                batch.groups_lost += 1
                continue
            if group is None:
                continue
            self._add_group(group, batch)
            return

    def _add_group(self, group: SampleGroup, batch: StepBatch) -> None:
        batch.groups.append(group)
        self._board.set_progress(len(batch.groups) / self._count)

    async def _drop_recovered(self) -> None:
        """Drop the groups that no place in the batch took: the weights of the next step are newer than they are."""
        unused = [s.sample_id for group in self._recovered.values() for s in group.samples]
        self._recovered = {}
        await self._disk.write(self._ledger.drop, unused, STALE)

    def _may_draw(self, batch: StepBatch) -> bool:
        """Return whether a free place may draw a prompt; False when too many were lost, or filtered out."""
        if self._filter.keep != "all" and batch.prompts_drawn >= self._filter.max_rounds * self._count:
            return False
        # If every group so far was lost, the scorer may be broken; `reward.lost_rounds` limits the further tries.
        rounds = 1 if batch.groups or batch.filtered else self._config.reward.lost_rounds
        return batch.groups_lost <= self._count * rounds

    def _draw_position(self, batch: StepBatch) -> int:
        position = self.prompts_drawn
        self.prompts_drawn += 1
        batch.prompts_drawn += 1
        return position

    async def _issue(self, step: int, version: int, position: int) -> _GroupDraft:
        """Issue the samples of the prompt at a position; the greedy completion has the last id."""
        prompt, size = self._prompts.at(position), self._config.batch.group_size
        count = size + self._baselines
        issued = await self._disk.write(self._ledger.issue, step=step, position=position, count=count)
        return _GroupDraft(
            prompt=prompt,
            position=position,
            seed=derive_seed(self._config.seed, "train", position, prompt.index),
            version=version,
            budget=self._service_calls.budget(),
            issued=issued,
            sample_ids=issued.sample_ids[:size],
            baseline_ids=issued.sample_ids[size:],
        )

    async def _make_group(self, draft: _GroupDraft, batch: StepBatch) -> SampleGroup | None:
        """Generate, score and filter one group, and add reference log-probabilities; None when it is filtered out."""
        if draft.baseline_ids:
            sampled = self._generate_and_score(draft, draft.sample_ids, batch)
            greedy = self._generate_and_score(draft, draft.baseline_ids, batch, greedy=True)
            await self._session.run_all([sampled, greedy])
            await self._apply_baseline(draft)
        else:
            await self._generate_and_score(draft, draft.sample_ids, batch)
        if len(draft.alive) < self._min_samples:
            raise GivenUp(f"{len(draft.alive)} of its samples have a score", reason="GROUP_TOO_SMALL")
        group = draft.finish()
        if not keep_group([s.score for s in group.samples if s.score is not None], self._filter):
            batch.filtered.append(group)
            return None
        group = await self._add_reference(group, draft.budget)
        await self._experiences.put(group)
        return group

    async def _generate_and_score(
        self, draft: _GroupDraft, sample_ids: Sequence[str], batch: StepBatch, *, greedy: bool = False
    ) -> None:
        """Add the completions of some samples to the draft; drop those without a score."""
        trajectories = await self._service_calls.generate(
            draft.prompt,
            group_id=draft.issued.group_id,
            sample_ids=sample_ids,
            seed=draft.seed,
            version=draft.version,
            budget=draft.budget,
            greedy=greedy,
            on_try=lambda: self._running(sample_ids),
        )
        batch.rolled = time.monotonic()
        await self._disk.write(self._ledger.move, sample_ids, SampleState.ROLLED)
        draft.trajectories |= zip(sample_ids, trajectories, strict=True)
        trajectories = await self._service_calls.score(trajectories, draft.budget)
        batch.scored = time.monotonic()
        for name, trajectory in zip(sample_ids, trajectories, strict=True):
            draft.trajectories[name] = trajectory
            if trajectory.dropped:
                await self._disk.write(self._ledger.drop, [name], trajectory.dropped)

    @asynccontextmanager
    async def _running(self, sample_ids: Sequence[str]) -> AsyncIterator[None]:
        """Mark samples RUNNING during one try, and ISSUED again when the try fails."""
        # After a cancellation they stay RUNNING: the run ends or returns to a checkpoint, and a restore drops them.
        await self._disk.write(self._ledger.move, sample_ids, SampleState.RUNNING)
        try:
            yield
        except FourfoldError:
            await self._disk.write(self._ledger.move, sample_ids, SampleState.ISSUED)
            raise

    async def _apply_baseline(self, draft: _GroupDraft) -> None:
        """Store the score of the greedy completion in every sample, and drop the greedy completion."""
        (name,) = draft.baseline_ids
        baseline = draft.trajectories[name]
        if baseline.sample.score is None:
            raise GivenUp("its greedy completion has no score", reason="NO_BASELINE")
        for sample_id in draft.sample_ids:
            trajectory = draft.trajectories[sample_id]
            sample = replace(trajectory.sample, baseline_score=baseline.sample.score)
            draft.trajectories[sample_id] = replace(trajectory, sample=sample)
        draft.trajectories[name] = baseline.with_drop_reason(BASELINE)
        await self._disk.write(self._ledger.drop, [name], BASELINE)

    async def _add_reference(self, group: SampleGroup, budget: RetryBudget) -> SampleGroup:
        """Return the group with the reference log-probabilities of its samples, if the algorithm needs them."""
        if not self._config.needs_reference:
            return group
        kept = iter(await self._service_calls.reference([t for t in group.trajectories if not t.dropped], budget))
        return replace(group, trajectories=tuple(t if t.dropped else next(kept) for t in group.trajectories))

    async def _keep_muted_groups(self, step: int, batch: StepBatch) -> None:
        """Fill the batch with the last groups that were filtered out, with empty loss masks."""
        # The trainer accepts no empty batch. It skips a batch without loss tokens, and the run continues. The masks are
        # empty because penalties, KL terms or whitening could still give the samples advantages other than 0.
        chosen, batch.filtered = batch.filtered[-self._count :], batch.filtered[: -self._count]
        if chosen:
            log.warning("step has nothing to learn: step=%d prompts=%d", step, batch.prompts_drawn)
        await self._session.run_all(self._mute_group(group, batch) for group in chosen)

    async def _mute_group(self, group: SampleGroup, batch: StepBatch) -> None:
        try:
            group = await self._add_reference(group, self._service_calls.budget())
        except GivenUp:
            batch.filtered.append(group)
            return
        kept = [sample.sample_id for sample in group.samples]
        # Not durable: after a restore the prompts are drawn again, and the filter decides as it did before.
        await self._disk.write(self._ledger.move, kept, SampleState.READY)
        muted = tuple(
            t if t.dropped else replace(t, sample=replace(t.sample, loss_mask=np.zeros_like(t.sample.action_mask)))
            for t in group.trajectories
        )
        batch.groups.append(replace(group, trajectories=muted))


def _with_version(group: SampleGroup, version: int) -> SampleGroup:
    """Return a recovered group under the number that a restore has given to the weights that sampled it."""

    def renumber(trajectory: Trajectory) -> Trajectory:
        spans = tuple(
            span if span.policy_version < 0 else VersionSpan(policy_version=version, token_count=span.token_count)
            for span in trajectory.sample.version_spans
        )
        return replace(trajectory, sample=replace(trajectory.sample, version_spans=spans))

    baseline = None if group.baseline is None else renumber(group.baseline)
    return replace(group, trajectories=tuple(map(renumber, group.trajectories)), baseline=baseline)
