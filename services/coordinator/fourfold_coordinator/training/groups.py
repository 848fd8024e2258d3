"""Makes one group: issues the samples of a prompt, generates, scores and filters them.

    issue --+--> generate --> score --+--> keep_group? --> select --> reference --> READY
            |                         |      |               |
            +--> greedy ----> score --+      no: filtered    none: replaced, too    every failure: DROPPED(reason),
                 (remax)                     out             others: NOT_SELECTED   the group is lost

In a run of agents, `tasks/task_queue.py` replaces `generate`: the samples are attempts that gateways lease. When the
group is closed, attempts for which their agent gave no reward are scored; missing attempts are DROPPED(reason).

Samples are scored as they finish (`_FinishedSamples`), so that a group then waits only for the score of its slowest
sample. Without a filter, reference log-probabilities are computed at the same time as the scores. A READY group is
durable.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from math import fsum
from statistics import median
from typing import Final

import numpy as np

from fourfold.config.algorithm import FilterConfig
from fourfold.config.schema import Config
from fourfold.errors import FourfoldError
from fourfold.sample import Sample

from ..data.prompts import Prompt, group_seed
from ..routing.replica import GivenUp, RetryBudget
from ..routing.trainer_session import leaves
from ..state.group_commit import GroupCommit
from ..state.ledger import BASELINE, NOT_SELECTED, IssuedGroup, SampleState
from ..state.samples import SampleGroup, Trajectory
from ..tasks.task_queue import OwnProblem, TaskGroup
from .context import RunContext

log = logging.getLogger("fourfold.coordinator")

# Early calls are made if the scores of a group take at least this time: a Score call costs the coordinator 0.4 ms of
# CPU.
_SLOW_SECONDS: Final = 0.1
_GATHER_SECONDS: Final = 0.1  # an early call waits this long for samples that finish at almost the same time
_PACE_WINDOW: Final = 32  # number of latest groups


def keep_group(scores: Sequence[float], rule: FilterConfig) -> bool:
    """Return whether dynamic sampling (DAPO, arXiv 2503.14476) keeps a group.

    `scores` (at least one) are those of the scorer with the rewards of turns, before any penalty. `mean-inside` is
    OpenRLHF's rule: it keeps a group in which every sample scored 0.5.
    """
    match rule.keep:
        case "varied":
            return max(scores) > min(scores)
        case "mean-inside":
            return rule.low < fsum(scores) / len(scores) < rule.high
        case "all":
            return True


def selected(group: SampleGroup, config: Config) -> SampleGroup:
    """Return a scored group whose samples that `algorithm.selection` does not choose are dropped as NOT_SELECTED.

    Pairs that do not fit in one micro-batch, as those of long agents' trajectories, are not chosen either.
    """
    rule, most = config.algorithm.selection, config.batch.tokens_per_micro_batch
    if rule.kind == "none":
        return group
    alive = [t for t in group.trajectories if not t.dropped]
    chosen = [alive[i] for i in rule.select([t.sample.score or 0.0 for t in alive])]
    tokens = sum(len(segment.token_ids) for t in chosen for segment in t.segments)
    if rule.makes_pairs and tokens > most:
        log.warning(
            "pair is too long for a micro-batch: group=%s tokens=%d batch.tokens_per_micro_batch=%d",
            chosen[0].sample.group_id, tokens, most,
        )  # fmt: skip
        chosen = []
    names = {t.sample.sample_id for t in chosen}
    found = (t if t.sample.sample_id in names else t.with_drop_reason(NOT_SELECTED) for t in group.trajectories)
    return replace(group, trajectories=tuple(found))


@dataclass(slots=True, kw_only=True, eq=False)
class GroupDraft:
    """A group from its first request until it is READY, filtered out or lost."""

    prompt: Prompt
    position: int
    seed: int
    version: int
    budget: RetryBudget
    on_sent: Callable[[], None]  # called when an engine gets a request or an agent the first task
    issued: IssuedGroup
    sample_ids: tuple[str, ...]  # samples to train on
    baseline_ids: tuple[str, ...]  # of the greedy completion, whose score is the baseline of ReMax: none or one
    own: OwnProblem | None = None  # for a group of the agents' own
    finished: dict[str, Sample] = field(default_factory=dict)  # without scores, by sample id
    trajectories: dict[str, Trajectory] = field(default_factory=dict)  # trajectories that are ROLLED or dropped
    dropped: Counter[str] = field(default_factory=Counter)  # its dropped samples by reason
    rolled: float = 0.0  # time of the last completion, in seconds of `time.monotonic`
    missing: set[str] = field(default_factory=set)  # attempts of agents that ended without a trajectory
    revision: int = -1  # revision of the scorers at the first score
    scored: float = 0.0  # time of the last score
    scoring_seconds: float = 0.0  # sum over the calls for scores
    group: SampleGroup | None = None  # the scored group; None if the group is lost
    kept: bool = False  # the group is READY; False: the filter did not keep it, or nothing of it was selected

    @property
    def alive(self) -> list[str]:
        """Return the samples that are not dropped, generated or not."""
        dropped = self.missing | {name for name, trajectory in self.trajectories.items() if trajectory.dropped}
        return [name for name in self.issued.sample_ids if name not in dropped]

    def finish(self) -> SampleGroup:
        """Return the group. Every sample that is not missing must have a completion."""
        return SampleGroup(
            position=self.position,
            seed=self.seed,
            revision=max(self.revision, 0),
            trajectories=tuple(self.trajectories[name] for name in self.sample_ids if name not in self.missing),
            baseline=next((self.trajectories[name] for name in self.baseline_ids), None),
        )


class _FinishedSamples:
    """The finished samples of one request without a call for scores; starts calls for some of them early.

    An early call starts when at least half of the samples without a call are finished, and no other early call runs. So
    n samples have at most log2(n) + 1 calls, and only one if they finish together. The caller makes the last call,
    which waits for no early one.
    """

    def __init__(
        self, count: int, *, early: bool, tasks: asyncio.TaskGroup, score: Callable[[list[Sample]], Awaitable[None]]
    ) -> None:
        """Expect `count` samples. If `early` is set, `score` is called in `tasks` before all of them are finished."""
        self._running, self._waiting = count, list[Sample]()
        self._tasks, self._score = tasks, score
        self._may_start = early  # False while an early call runs, and after a failed one
        self._all_finished = asyncio.Event()

    def add(self, sample: Sample) -> None:
        """Add a sample that is finished."""
        self._waiting.append(sample)
        self._running -= 1
        if not self._running:
            self._all_finished.set()
        if self._may_start and self._half_finished():
            self._may_start = False
            self._tasks.create_task(self._score_early())

    def take(self) -> list[Sample]:
        """Return and remove the finished samples."""
        samples, self._waiting = self._waiting, []
        return samples

    def _half_finished(self) -> bool:
        return len(self._waiting) >= self._running > 0

    async def _score_early(self) -> None:
        while self._half_finished():
            with suppress(TimeoutError):
                async with asyncio.timeout(_GATHER_SECONDS):
                    await self._all_finished.wait()
            if self._running:
                await self._score(self.take())
        self._may_start = True


class GroupMaker:
    """Makes the groups of a run."""

    def __init__(self, context: RunContext) -> None:
        self._config, self._prompts, self._ledger = context.config, context.prompts, context.ledger
        self._service_calls, self._session = context.service_calls, context.session
        self._scoring, self._shadows = context.service_calls.scoring, context.shadows
        self._source, self._tasks = context.config.agents.source, context.tasks
        self._min_attempts = context.config.agents.min_attempts or context.config.batch.group_size
        self._changes, self._experiences = GroupCommit(context.ledger, context.disk), context.experiences
        algorithm = context.config.algorithm
        self._filter = algorithm.filter
        self._min_samples = 2 if algorithm.compares_samples or algorithm.loss.reads == "pairs" else 1
        self._baselines = int(algorithm.advantage.needs_greedy_sample)
        # With filter or selection, wait for the decision: dropped samples need no reference log-probabilities.
        self._reference_with_scores = (
            context.config.needs_reference and not algorithm.replaces_groups and self._source == "none"
        )
        self._scoring_seconds: deque[float] = deque(maxlen=_PACE_WINDOW)  # scoring seconds of the latest groups

    async def make(self, position: int, *, step: int, version: int, on_sent: Callable[[], None]) -> GroupDraft:
        """Make the group of the prompt at a position.

        Args:
            position: Of the prompt in the endless order.
            step: The step whose batch is collected now.
            version: Lowest policy version that may sample it.
            on_sent: Called when an engine gets a request of the group, or an agent the first task.

        Returns:
            The draft with its group, or without one if a service failed too often.
        """
        draft = await self._issue(step, version, position, on_sent)
        try:
            await self._fill(draft)
        except GivenUp as error:
            log.warning("group lost: group=%s reason=%s: %s", draft.issued.group_id, error.reason, error)
            await self._drop(draft, draft.alive, error.reason)
            late = [sample for name, sample in draft.finished.items() if name not in draft.trajectories]
            for trajectory in await self._service_calls.with_texts(draft.prompt, late):
                draft.trajectories[trajectory.sample.sample_id] = trajectory
            for name, trajectory in draft.trajectories.items():
                draft.trajectories[name] = trajectory.with_drop_reason(error.reason)
            draft.group = None
        return draft

    async def mute(self, group: SampleGroup) -> SampleGroup:
        """Return a group that was filtered out, READY and with empty loss masks; raise GivenUp."""
        group = await self._add_reference(group, self._service_calls.budget())
        kept = [sample.sample_id for sample in group.samples]
        # Not durable: after a restore the prompts are drawn again, and the filter decides again.
        await self._changes.write(self._ledger.move, kept, SampleState.READY)
        muted = tuple(
            t if t.dropped else t.map_segments(lambda s: replace(s, loss_mask=np.zeros_like(s.action_mask)))
            for t in group.trajectories
        )
        return replace(group, trajectories=muted)

    async def score_again(self, group: SampleGroup) -> SampleGroup:
        """Score a group with the scorers in use now; drop samples without a score.

        Raises GivenUp: too few samples have a score.
        """
        revision = self._scoring.revision
        everyone = group.all_trajectories()
        scored_by_service = [t for t in everyone if t.sample.terms]  # agents brought the other scores
        # Keep the greedy completion, dropped as BASELINE: the advantages of the others depend on its score.
        open_again = [replace(t, dropped="") if t is group.baseline else t for t in scored_by_service]
        alive = [t for t in open_again if not t.dropped]
        if not alive:
            return replace(group, revision=revision)
        found = {t.sample.sample_id: t for t in await self._service_calls.score(alive, self._service_calls.budget())}
        trajectories = [found.get(t.sample.sample_id, t) for t in group.trajectories]
        baseline = group.baseline
        if baseline is not None:
            baseline = found.get(baseline.sample.sample_id, baseline)
            if baseline.sample.score is None:
                raise GivenUp("its greedy completion has no score", reason="NO_BASELINE")
            score = baseline.sample.score
            trajectories = [t.with_values(baseline_score=score) for t in trajectories]
            baseline = baseline.with_drop_reason(BASELINE)
        again = replace(group, trajectories=tuple(trajectories), baseline=baseline, revision=revision)
        if len(again.scored) < self._min_samples:
            raise GivenUp(f"{len(again.scored)} of its samples have a score", reason="GROUP_TOO_SMALL")
        again = selected(again, self._config)
        if not again.samples:
            raise GivenUp("nothing is selected by its new scores", reason=NOT_SELECTED)
        # After the check: if the group is given up, the caller drops all samples.
        for before, after in zip(group.trajectories, again.trajectories, strict=True):
            if after.dropped and not before.dropped:
                await self._changes.write(self._ledger.drop, [after.sample.sample_id], after.dropped)
        self._shadows.start(again)
        return again

    async def _issue(self, step: int, version: int, position: int, on_sent: Callable[[], None]) -> GroupDraft:
        """Issue the samples of the prompt at a position; the greedy completion has the last id.

        With own groups of agents, wait for an agent that brings the problem.
        """
        own = await self._tasks.offer() if self._source == "groups" else None
        prompt, size = own.prompt if own else self._prompts.at(position), self._config.batch.group_size
        count = size + self._baselines
        issued = await self._changes.write(self._ledger.issue, step=step, position=position, count=count)
        return GroupDraft(
            prompt=prompt,
            position=position,
            seed=group_seed(self._config.seed, position, prompt),
            version=version,
            budget=self._service_calls.budget(),
            on_sent=on_sent,
            issued=issued,
            sample_ids=issued.sample_ids[:size],
            baseline_ids=issued.sample_ids[size:],
            own=own,
        )

    async def _fill(self, draft: GroupDraft) -> None:
        """Generate, score and filter one group, and add reference log-probabilities."""
        if self._source != "none":
            await self._collect(draft)
        elif draft.baseline_ids:
            sampled = self._generate_and_score(draft, draft.sample_ids)
            greedy = self._generate_and_score(draft, draft.baseline_ids, greedy=True)
            await self._session.run_all([sampled, greedy])
            await self._apply_baseline(draft)
        else:
            await self._generate_and_score(draft, draft.sample_ids)
        if len(draft.alive) < self._min_samples:
            raise GivenUp(f"{len(draft.alive)} of its samples have a score", reason="GROUP_TOO_SMALL")
        self._scoring_seconds.append(draft.scoring_seconds)
        draft.group = draft.finish()
        if not keep_group(draft.group.rewards, self._filter):
            return
        group = selected(draft.group, self._config)
        draft.kept = bool(group.samples)
        if not draft.kept:
            draft.group = replace(draft.group, replaced=NOT_SELECTED)
            return
        self._shadows.start(draft.group)
        left_out = {t.sample.sample_id: t for t in group.trajectories if t.dropped == NOT_SELECTED}
        if left_out:
            await self._drop(draft, list(left_out), NOT_SELECTED)
            draft.trajectories |= left_out
        draft.group = await self._add_reference(group, draft.budget)
        await self._experiences.put(draft.group)

    async def _collect(self, draft: GroupDraft) -> None:
        """Collect the samples of the draft from agents; drop missing ones, and score those without a reward."""
        await self._changes.write(self._ledger.move, draft.sample_ids, SampleState.RUNNING)
        group = TaskGroup(
            group_id=draft.issued.group_id,
            prompt=draft.prompt,
            task_ids=draft.sample_ids,
            seed=draft.seed,
            own=draft.own,
            on_lease=draft.on_sent,
        )
        await self._tasks.collect(group)
        draft.rolled = time.monotonic()
        for attempt in group.attempts:
            if attempt.trajectory is None:
                draft.missing.add(attempt.task_id)
                await self._drop(draft, [attempt.task_id], attempt.reason)
        arrived = await self._service_calls.with_completions([a.trajectory for a in group.attempts if a.trajectory])
        draft.trajectories |= {t.sample.sample_id: t for t in arrived}
        if len(arrived) < max(self._min_attempts, self._min_samples):
            reasons = ", ".join(sorted(draft.dropped))
            text = f"{len(arrived)} of {len(group.attempts)} attempts arrived ({reasons})"
            raise GivenUp(text, reason="GROUP_TOO_SMALL")
        self._note_revision(draft)
        if unscored := [t for t in arrived if t.sample.score is None]:
            await self._settle(draft, await self._service_calls.score(unscored, replace(draft.budget)))

    async def _generate_and_score(self, draft: GroupDraft, sample_ids: Sequence[str], *, greedy: bool = False) -> None:
        """Add the completions of some samples to the draft, and their scores as they finish."""
        try:
            async with asyncio.TaskGroup() as tasks:
                # No early calls for the first groups: the time of scoring is unknown, and errors of few samples would
                # look like a failure of the scorer.
                early = bool(self._scoring_seconds) and median(self._scoring_seconds) >= _SLOW_SECONDS
                score = partial(self._score, draft)
                finished = _FinishedSamples(len(sample_ids), early=early, tasks=tasks, score=score)

                def on_finished(sample: Sample) -> None:
                    draft.finished[sample.sample_id] = sample
                    finished.add(sample)

                await self._service_calls.generate(
                    draft.prompt,
                    group_id=draft.issued.group_id,
                    sample_ids=sample_ids,
                    seed=draft.seed,
                    version=draft.version,
                    budget=draft.budget,
                    greedy=greedy,
                    on_try=lambda: self._running(draft, sample_ids),
                    on_finished=on_finished,
                )
                draft.rolled = time.monotonic()
                await score(finished.take())
        except BaseExceptionGroup as errors:
            raise next(leaves(errors)) from None

    async def _score(self, draft: GroupDraft, samples: Sequence[Sample]) -> None:
        """Add finished samples to the draft, with their scores; drop those without one."""
        samples = sorted(samples, key=lambda sample: draft.issued.sample_ids.index(sample.sample_id))
        names = [sample.sample_id for sample in samples]
        trajectories = await self._service_calls.with_texts(draft.prompt, samples)
        await self._changes.write(self._ledger.move, names, SampleState.ROLLED)
        draft.trajectories |= zip(names, trajectories, strict=True)
        began = time.monotonic()
        self._note_revision(draft)
        await self._settle(draft, await self._ask_scorer(draft, trajectories))
        draft.scoring_seconds += draft.scored - began

    def _note_revision(self, draft: GroupDraft) -> None:
        if draft.revision < 0:  # set at the first call: a later change of the scorers must score the group again
            draft.revision = self._scoring.revision

    async def _settle(self, draft: GroupDraft, trajectories: Sequence[Trajectory]) -> None:
        """Put scored trajectories into the draft; drop those without a score."""
        draft.scored = time.monotonic()
        for trajectory in trajectories:
            name = trajectory.sample.sample_id
            # The ledger first: if the group is given up now, a sample dropped only in the draft would stay ROLLED.
            if trajectory.dropped:
                await self._drop(draft, [name], trajectory.dropped)
            draft.trajectories[name] = trajectory

    async def _ask_scorer(self, draft: GroupDraft, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Return trajectories with their scores, and with reference log-probabilities if no filter can drop them."""
        # Each call gets all tries that the group has left, so that more calls do not use them up faster.
        if not self._reference_with_scores or trajectories[0].sample.sample_id in draft.baseline_ids:
            return await self._service_calls.score(trajectories, replace(draft.budget))
        async with asyncio.TaskGroup() as tasks:
            segments = [segment for t in trajectories for segment in t.segments]
            rows = tasks.create_task(self._service_calls.reference(segments, replace(draft.budget)))
            scored = await self._service_calls.score(trajectories, replace(draft.budget))
        left = iter(rows.result())
        return [t.with_reference(list(islice(left, len(t.segments)))) for t in scored]

    async def _drop(self, draft: GroupDraft, sample_ids: Sequence[str], reason: str) -> None:
        await self._changes.write(self._ledger.drop, sample_ids, reason)
        draft.dropped[reason] += len(sample_ids)

    @asynccontextmanager
    async def _running(self, draft: GroupDraft, sample_ids: Sequence[str]) -> AsyncIterator[None]:
        """Mark the unfinished samples RUNNING during one try, and ISSUED again when the try fails."""

        def unfinished() -> list[str]:
            return [name for name in sample_ids if name not in draft.finished]

        # After a cancellation they stay RUNNING: the group is lost, or the run ends or restores a checkpoint.
        await self._changes.write(self._ledger.move, unfinished(), SampleState.RUNNING)
        draft.on_sent()
        try:
            yield
        except FourfoldError:
            await self._changes.write(self._ledger.move, unfinished(), SampleState.ISSUED)
            raise

    async def _apply_baseline(self, draft: GroupDraft) -> None:
        """Store the score of the greedy completion in every sample, and drop the greedy completion."""
        (name,) = draft.baseline_ids
        baseline = draft.trajectories[name]
        if baseline.sample.score is None:
            raise GivenUp("its greedy completion has no score", reason="NO_BASELINE")
        for sample_id in draft.sample_ids:
            scored = draft.trajectories[sample_id].with_values(baseline_score=baseline.sample.score)
            draft.trajectories[sample_id] = scored
        await self._drop(draft, [name], BASELINE)
        draft.trajectories[name] = baseline.with_drop_reason(BASELINE)

    async def _add_reference(self, group: SampleGroup, budget: RetryBudget) -> SampleGroup:
        """Return the group with the reference log-probabilities of its samples, if the algorithm needs them."""
        if not self._config.needs_reference or self._reference_with_scores:
            return group
        rows = iter(await self._service_calls.reference(group.segments, budget))
        return replace(
            group,
            trajectories=tuple(
                t if t.dropped else t.with_reference(list(islice(rows, len(t.segments)))) for t in group.trajectories
            ),
        )
