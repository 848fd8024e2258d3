"""Makes one group: issues the samples of a prompt, generates, scores and filters them.

    issue --+--> generate --> score --+--> keep_group? --> reference --> READY
            |                         |      |
            +--> greedy ----> score --+      no: filtered out          every failure: DROPPED(reason), the group is lost
                 (remax)

A READY group is durable.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from math import fsum

import numpy as np

from fourfold.config.algorithm import FilterConfig
from fourfold.errors import FourfoldError

from ..data.prompts import Prompt, derive_seed
from ..routing.replica import GivenUp, RetryBudget
from ..state.group_commit import GroupCommit
from ..state.ledger import BASELINE, IssuedGroup, SampleState
from ..state.samples import SampleGroup, Trajectory
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


@dataclass(slots=True, kw_only=True, eq=False)
class GroupDraft:
    """A group from its first request until it is READY, filtered out or lost."""

    prompt: Prompt
    position: int
    seed: int
    version: int
    budget: RetryBudget
    on_sent: Callable[[], None]  # called when an engine gets a request
    issued: IssuedGroup
    sample_ids: tuple[str, ...]  # to train on
    baseline_ids: tuple[str, ...]  # of the greedy completion, whose score is the baseline of ReMax: none or one
    trajectories: dict[str, Trajectory] = field(default_factory=dict)  # those generated so far, by sample id
    dropped: Counter[str] = field(default_factory=Counter)  # its dropped samples by reason
    rolled: float = 0.0  # time of the last completion, in seconds of `time.monotonic`
    scored: float = 0.0  # time of the last score
    group: SampleGroup | None = None  # all its samples are scored; None if the group is lost
    kept: bool = False  # READY; otherwise the filter did not keep the group

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


class GroupMaker:
    """Makes the groups of a run."""

    def __init__(self, context: RunContext) -> None:
        self._config, self._prompts, self._ledger = context.config, context.prompts, context.ledger
        self._service_calls, self._session = context.service_calls, context.session
        self._changes, self._experiences = GroupCommit(context.ledger, context.disk), context.experiences
        algorithm = context.config.algorithm
        self._filter = algorithm.filter
        self._min_samples = 2 if algorithm.compares_samples else 1
        self._baselines = int(algorithm.advantage.needs_greedy_sample)

    async def make(self, position: int, *, step: int, version: int, on_sent: Callable[[], None]) -> GroupDraft:
        """Make the group of the prompt at a position.

        Args:
            position: Of the prompt in the endless order.
            step: The step whose batch is collected now.
            version: Lowest policy version that may sample it.
            on_sent: Called when an engine gets a request of the group.

        Returns:
            The draft with its group, or without one if a service failed too often.
        """
        draft = await self._issue(step, version, position, on_sent)
        try:
            await self._fill(draft)
        except GivenUp as error:
            log.warning("group lost: group=%s reason=%s: %s", draft.issued.group_id, error.reason, error)
            await self._drop(draft, draft.alive, error.reason)
            for name, trajectory in draft.trajectories.items():
                draft.trajectories[name] = trajectory.with_drop_reason(error.reason)
            draft.group = None
        return draft

    async def mute(self, group: SampleGroup) -> SampleGroup:
        """Return a group that was filtered out, READY and with empty loss masks; raise GivenUp."""
        group = await self._add_reference(group, self._service_calls.budget())
        kept = [sample.sample_id for sample in group.samples]
        # Not durable: after a restore the prompts are drawn again, and the filter decides as it did before.
        await self._changes.write(self._ledger.move, kept, SampleState.READY)
        muted = tuple(
            t if t.dropped else replace(t, sample=replace(t.sample, loss_mask=np.zeros_like(t.sample.action_mask)))
            for t in group.trajectories
        )
        return replace(group, trajectories=muted)

    async def _issue(self, step: int, version: int, position: int, on_sent: Callable[[], None]) -> GroupDraft:
        """Issue the samples of the prompt at a position; the greedy completion has the last id."""
        prompt, size = self._prompts.at(position), self._config.batch.group_size
        count = size + self._baselines
        issued = await self._changes.write(self._ledger.issue, step=step, position=position, count=count)
        return GroupDraft(
            prompt=prompt,
            position=position,
            seed=derive_seed(self._config.seed, "train", position, prompt.index),
            version=version,
            budget=self._service_calls.budget(),
            on_sent=on_sent,
            issued=issued,
            sample_ids=issued.sample_ids[:size],
            baseline_ids=issued.sample_ids[size:],
        )

    async def _fill(self, draft: GroupDraft) -> None:
        """Generate, score and filter one group, and add reference log-probabilities."""
        if draft.baseline_ids:
            sampled = self._generate_and_score(draft, draft.sample_ids)
            greedy = self._generate_and_score(draft, draft.baseline_ids, greedy=True)
            await self._session.run_all([sampled, greedy])
            await self._apply_baseline(draft)
        else:
            await self._generate_and_score(draft, draft.sample_ids)
        if len(draft.alive) < self._min_samples:
            raise GivenUp(f"{len(draft.alive)} of its samples have a score", reason="GROUP_TOO_SMALL")
        draft.group = draft.finish()
        draft.kept = keep_group([s.score for s in draft.group.samples if s.score is not None], self._filter)
        if draft.kept:
            draft.group = await self._add_reference(draft.group, draft.budget)
            await self._experiences.put(draft.group)

    async def _generate_and_score(self, draft: GroupDraft, sample_ids: Sequence[str], *, greedy: bool = False) -> None:
        """Add the completions of some samples to the draft; drop those without a score."""
        trajectories = await self._service_calls.generate(
            draft.prompt,
            group_id=draft.issued.group_id,
            sample_ids=sample_ids,
            seed=draft.seed,
            version=draft.version,
            budget=draft.budget,
            greedy=greedy,
            on_try=lambda: self._running(draft, sample_ids),
        )
        draft.rolled = time.monotonic()
        await self._changes.write(self._ledger.move, sample_ids, SampleState.ROLLED)
        draft.trajectories |= zip(sample_ids, trajectories, strict=True)
        trajectories = await self._service_calls.score(trajectories, draft.budget)
        draft.scored = time.monotonic()
        for name, trajectory in zip(sample_ids, trajectories, strict=True):
            draft.trajectories[name] = trajectory
            if trajectory.dropped:
                await self._drop(draft, [name], trajectory.dropped)

    async def _drop(self, draft: GroupDraft, sample_ids: Sequence[str], reason: str) -> None:
        await self._changes.write(self._ledger.drop, sample_ids, reason)
        draft.dropped[reason] += len(sample_ids)

    @asynccontextmanager
    async def _running(self, draft: GroupDraft, sample_ids: Sequence[str]) -> AsyncIterator[None]:
        """Mark samples RUNNING during one try, and ISSUED again when the try fails."""
        # After a cancellation they stay RUNNING: the run ends or returns to a checkpoint, and a restore drops them.
        await self._changes.write(self._ledger.move, sample_ids, SampleState.RUNNING)
        draft.on_sent()
        try:
            yield
        except FourfoldError:
            await self._changes.write(self._ledger.move, sample_ids, SampleState.ISSUED)
            raise

    async def _apply_baseline(self, draft: GroupDraft) -> None:
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
        await self._drop(draft, [name], BASELINE)

    async def _add_reference(self, group: SampleGroup, budget: RetryBudget) -> SampleGroup:
        """Return the group with the reference log-probabilities of its samples, if the algorithm needs them."""
        if not self._config.needs_reference:
            return group
        kept = iter(await self._service_calls.reference([t for t in group.trajectories if not t.dropped], budget))
        return replace(group, trajectories=tuple(t if t.dropped else next(kept) for t in group.trajectories))
