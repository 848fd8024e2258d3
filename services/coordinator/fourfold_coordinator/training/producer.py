"""Keeps groups in generation ahead of the trainer, and hands it batches in order of admission.

    prompts --admit--> place --make--> READY ------> the first B places are READY: take --> trained --> published
       ^                 |                                                            |                     |
       |                 +--> filtered out, or lost: the place is free again           +--> too old: STALE   |
       +------------------------------------------------------------------------------------ credit --------+

Admission: with a lag limit of L, at most (L + 1) * B groups are between their admission and the publication of the
step that trains them, where B is `batch.prompts_per_step`. Groups are trained strictly in order of admission. So a
group that was admitted at version v trains version v + L at most, and short completions are not preferred. A place
whose group is filtered out or lost is free at once. The B places of the next batch are admitted even if no engine has
room, as long as fewer than 512 groups wait for an engine (with agents, any number). Places beyond them need room.

A group whose scorers are not in use any more when a batch takes it is scored again first (`rewards/scorers.py`).

With L = 0 no prompt is drawn in advance: sampling and training alternate. If no group is lost, the groups of a step do
not depend on the order of the responses.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from fourfold import metrics as m
from fourfold.config.schema import AsynchronyConfig
from fourfold.errors import WrongState
from fourfold.sample import Sample

from ..data.curriculum import Curriculum, ScoredAttempt
from ..reporting.batch_metrics import compute_batch_metrics
from ..routing.replica import GivenUp
from ..state.ledger import STALE
from ..state.run_position import RunPosition
from ..state.samples import SAMPLES_FILE, SampleGroup, StepBatch
from .context import RunContext
from .groups import GroupDraft, GroupMaker
from .queue_meter import QueueMeter

log = logging.getLogger("fourfold.coordinator")

GROUPS_PER_TURN: Final = 32  # most groups admitted in one turn of the event loop; each starts a call
_MAX_UNSENT: Final = 512  # most groups that wait for an engine; further ones are not admitted yet
_ROOM_REST: Final = 9  # a measurement of the engines' room is used for this multiple of its duration
_TICK_SECONDS: Final = 0.25  # poll: new room in an engine wakes no waiter


@dataclass(slots=True, kw_only=True, eq=False)
class _Place:
    """A place in the queue: one prompt, from its admission until a batch takes its group."""

    position: int
    max_lag: int  # asynchrony.max_policy_lag at the admission
    sent: bool = False  # whether an engine got its request
    group: SampleGroup | None = None  # READY
    rolled: float = 0.0
    scored: float = 0.0


class GroupProducer:
    """The groups of a run that are not trained yet. `run` and `take` run concurrently."""

    def __init__(self, context: RunContext) -> None:
        self.rule = context.config.asynchrony
        self.lag_limit = self.rule.max_policy_lag
        self._maker = GroupMaker(context)
        self._config, self._context = context.config, context
        self._count, self._steps = context.config.batch.prompts_per_step, context.config.steps
        self._curriculum: Curriculum | None = None
        if (curriculum := context.config.data.curriculum) is not None:
            self._curriculum = Curriculum(
                curriculum, seed=context.config.seed, prompt_at=lambda position: context.prompts.at(position).index
            )
        self._restart(step=0, version=0)

    def _restart(self, *, step: int, version: int) -> None:
        self._step, self._version = step, version  # step of the last batch; version of the engines
        self._open: deque[int] = deque()  # positions that were drawn and must be drawn again
        self._next = 0  # first position that was never drawn
        self._recovered: dict[int, SampleGroup] = {}  # recovered groups by position
        self._places: list[_Place] = []  # in order of admission
        self._running = self._unsent = 0  # places without a group; those whose request no engine has yet
        self._ready_head = 0  # at least this number of the first places have a group
        self._room, self._room_until = 0.0, -math.inf  # calls that engines would start; next measurement
        self._in_training = 0  # groups of the batch that is in training and not published yet
        self._window = StepBatch()  # what happened since the last batch
        self._skipped = 0  # prompts that the curriculum skipped since the last batch
        self._meter = QueueMeter()
        self._changed = asyncio.Event()

    async def resume(self, position: RunPosition, *, version: int, rule: AsynchronyConfig, lag_limit: int) -> None:
        """Continue at a position of the run; for the other arguments see `mark_trained`."""
        if self._curriculum is not None:  # samples.jsonl now has only the steps up to this position
            await asyncio.to_thread(self._curriculum.restore, self._context.folder / SAMPLES_FILE)
        self.rule, self.lag_limit = rule, lag_limit
        self._restart(step=position.step, version=version)
        self._open, self._next = deque(position.open_positions), position.next_position
        self._recovered = {group.position: group for group in position.groups}

    @property
    def data_position(self) -> int:
        """Position of the prompt that is drawn next."""
        return self._open[0] if self._open else self._next

    @property
    def running(self) -> bool:
        """Whether groups are in generation or scoring."""
        return self._running > 0

    async def look_ahead(self, step: int) -> Sequence[Sample]:
        """Return nothing: which groups a step has is not known before it is taken."""
        return ()

    def mark_trained(self, version: int, rule: AsynchronyConfig, *, lag_limit: int) -> None:
        """See `StepSource`. The loop calls it when the engines sample, and again at the end of a step.

        A skipped step has no such moment, and the recipe and the limit may have changed.
        """
        self.rule, self.lag_limit = rule, lag_limit
        self._version, self._in_training = version, 0
        self._notify()

    async def run(self) -> None:
        """Admit and make groups, until the last batch is taken."""
        async with asyncio.TaskGroup() as tasks:
            while self._step < self._steps:
                changed = self._changed
                while self._may_admit() and (self._head_is_short() or self._engines_have_room()):
                    place = _Place(position=self._draw(), max_lag=self.rule.max_policy_lag)
                    self._places.append(place)
                    self._running += 1
                    self._unsent += 1
                    tasks.create_task(self._fill(place))
                    if len(self._places) % GROUPS_PER_TURN == 0:
                        await asyncio.sleep(0)
                self._meter.set_sampling(self.running)
                self._meter.set_blocked(not self._may_admit() and self._engines_have_room())
                self._show_queue()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_TICK_SECONDS):
                        await changed.wait()
        self._show_queue()

    async def take(self, step: int) -> StepBatch:
        """Wait for the batch of a step, and take it; raise WrongState if all its groups are lost."""
        began = time.monotonic()
        while True:
            while not self._head_is_ready():
                await self._changed.wait()
            head = self._places[: self._count]
            # A lag that is lowered during the run applies only to groups admitted later.
            limits = [max(place.max_lag, self.rule.max_policy_lag) for place in head]
            stale = [(p, g) for p, lag in zip(head, limits, strict=True) if (g := p.group) and self._is_stale(g, lag)]
            for place, group in stale:
                self._remove(place)
                await self._drop_stale(group)
            if not stale and not await self._score_again(head):
                break
            self._notify()
        del self._places[: len(head)]
        self._ready_head = 0
        batch = self._close_window(head)
        batch.began = began
        self._step, self._in_training = step, self._count
        self._notify()
        await self._complete(step, batch)
        batch.groups = await self._context.shadows.with_shadow_scores(batch.groups)
        if self._curriculum is not None:  # at the batch: draws must not depend on the order in which groups end
            found = ((t.sample.group_id, t.sample.score, t.dropped) for t in batch.trajectories())
            self._curriculum.add_step(ScoredAttempt(*attempt) for attempt in found)
        return batch

    def metrics(self, batch: StepBatch, *, policy_version: int) -> dict[str, float]:
        """Return the metrics of a batch that do not need the trainer."""
        scored = self._config.needs_scorer or not self._config.algorithm.distills
        return compute_batch_metrics(batch, policy_version=policy_version, scored=scored)

    # -- admission --------------------------------------------------------------------------------------------------

    def _may_admit(self) -> bool:
        """Return whether one more prompt may be drawn: by the lag limit, the number of steps that are left, and the
        limits on lost and filtered groups since the last batch (`_window`).
        """
        published = self._step - (1 if self._in_training else 0)
        limit = min(self.lag_limit + 1, self._steps - published) * self._count
        return len(self._places) + self._in_training < limit and self._may_draw()

    def _may_draw(self) -> bool:
        """Return whether a free place may draw a prompt; False when too many were lost, or filtered out."""
        window, algorithm = self._window, self._config.algorithm
        places = (self.rule.max_policy_lag + 1) * self._count
        most = (algorithm.filter.max_rounds - 1) * places
        if algorithm.replaces_groups and len(window.filtered) + window.groups_lost > most:
            return False
        # If all groups so far were lost, the scorer may be broken, so `reward.lost_rounds` limits further tries.
        rounds = 1 if window.groups_kept or window.filtered else max(table.lost_rounds for table in self._config.reward)
        return window.groups_lost <= places * rounds

    def _engines_have_room(self) -> bool:
        """Return whether engines would sample one more prompt at once, or agents soon."""
        if self._config.agents.source != "none":  # the number of agents is unknown: keep the tasks of one batch waiting
            return self._unsent < self._count
        now = time.monotonic()
        if now >= self._room_until:
            prompt, size = self._context.prompts.at(self.data_position), self._config.batch.group_size
            self._room = self._context.service_calls.room(prompt, size, version=self._version)
            # With a thousand engines a measurement takes milliseconds, and every group asks for one.
            self._room_until = now + _ROOM_REST * (time.monotonic() - now)
        return self._room > self._unsent

    def _head_is_short(self) -> bool:
        """Return whether the next batch lacks places and not too many groups wait for engines."""
        waits = self._unsent >= _MAX_UNSENT and self._config.agents.source == "none"
        return len(self._places) < self._count and not waits

    def _mark_sent(self, place: _Place) -> None:
        if not place.sent:
            place.sent = True
            self._unsent -= 1
            if self._unsent == _MAX_UNSENT // 2:
                self._notify()

    def _set_group(self, place: _Place, group: SampleGroup) -> None:
        self._mark_sent(place)
        self._running -= place.group is None
        place.group = group

    def _remove(self, place: _Place) -> None:
        """Free a place."""
        self._mark_sent(place)
        self._running -= place.group is None
        self._places.remove(place)
        self._ready_head = 0

    def _draw(self) -> int:
        self._window.prompts_drawn += 1
        if self._open:
            return self._open.popleft()
        while self._curriculum is not None and not self._curriculum.accepts(self._next):
            self._next += 1
            self._skipped += 1
        self._next += 1
        return self._next - 1

    # -- one place --------------------------------------------------------------------------------------------------

    async def _fill(self, place: _Place) -> None:
        """Make the group of a place; free the place when there is none to train on."""
        group = self._recovered.pop(place.position, None)
        if group is not None and self._is_stale(group, self.rule.max_policy_lag):
            await self._drop_stale(group)
            group = None
        if group is not None:
            self._set_group(place, group)
            self._window.groups_kept += 1
        else:
            draft = await self._maker.make(
                place.position, step=self._step + 1, version=self._version, on_sent=partial(self._mark_sent, place)
            )
            self._add(draft, place)
        self._notify()

    def _add(self, draft: GroupDraft, place: _Place) -> None:
        """Count a draft in the window, and put its group in its place or free the place."""
        window, trajectories = self._window, list(draft.trajectories.values())
        window.dropped += draft.dropped
        self._meter.add_sampled(trajectories, draft.rolled)
        if draft.group is not None and draft.kept:
            self._set_group(place, draft.group)
            place.rolled, place.scored = draft.rolled, draft.scored
            window.groups_kept += 1
            return
        self._remove(place)
        if draft.group is not None:
            window.filtered.append(draft.group)
        else:
            window.lost += trajectories
            window.groups_lost += 1

    def _is_stale(self, group: SampleGroup, max_lag: int) -> bool:
        """Return whether a token of a group is older than the recipe allows its step to train on."""
        if self.rule.stale == "train":
            return False
        version = self._context.session.policy_version
        return any(version - sample.oldest_version > max_lag for sample in group.segments)

    async def _score_again(self, places: Sequence[_Place]) -> bool:
        """Score groups again whose scorers are no longer in use; return whether there were any."""
        scoring = self._context.service_calls.scoring
        old = [(place, g) for place in places if (g := place.group) is not None and not scoring.is_current(g)]

        async def score(place: _Place, group: SampleGroup) -> None:
            try:
                place.group, place.scored = await self._maker.score_again(group), time.monotonic()
                pairs = zip(group.trajectories, place.group.trajectories, strict=True)
                self._window.dropped.update(new.dropped for old, new in pairs if new.dropped and not old.dropped)
            except GivenUp as error:
                names = [t.sample.sample_id for t in group.trajectories if not t.dropped]
                await self._context.disk.write(self._context.ledger.drop, names, error.reason)
                self._remove(place)
                self._window.dropped[error.reason] += len(names)
                self._window.lost += [t.with_drop_reason(error.reason) for t in group.all_trajectories()]
                self._window.groups_lost += 1

        if old:
            log.info("scorers changed, groups are scored again: groups=%d", len(old))
            await self._context.session.run_all(score(place, group) for place, group in old)
        return bool(old)

    async def _drop_stale(self, group: SampleGroup) -> None:
        names = [sample.sample_id for sample in group.samples]
        await self._context.disk.write(self._context.ledger.drop, names, STALE)
        self._window.dropped[STALE] += len(names)
        self._window.lost += [t.with_drop_reason(STALE) for t in group.all_trajectories()]
        log.warning("group is stale: group=%s", group.samples[0].group_id)

    # -- batch ------------------------------------------------------------------------------------------------------

    def _head_is_ready(self) -> bool:
        length = min(len(self._places), self._count)
        while self._ready_head < length and self._places[self._ready_head].group is not None:
            self._ready_head += 1
        return self._ready_head >= length and (length == self._count or not self._may_draw())

    def _close_window(self, head: Sequence[_Place]) -> StepBatch:
        """Return the batch of these places, and begin the next window."""
        self._meter.set_sampling(self.running)
        batch, self._window = self._window, StepBatch()
        batch.groups = [place.group for place in head if place.group is not None]
        batch.groups_accepted = len(batch.groups)
        batch.filtered.sort(key=lambda group: group.position)
        batch.rolled = max((place.rolled for place in head), default=self._meter.last_completion)
        batch.scored = max((place.scored for place in head), default=0.0)
        batch.measured = {
            m.LAG_LIMIT: float(self.lag_limit),
            m.GROUPS_RUNNING: float(self._running),
            m.GROUPS_READY: float(len(self._places) - self._running),
            **self._context.router.engine_metrics(),
            **self._meter.close_window(batch),
            **(self._context.tasks.take_metrics() if self._config.agents.source != "none" else {}),
        }
        if self._curriculum is not None:
            batch.measured[m.PROMPTS_SKIPPED], self._skipped = float(self._skipped), 0
        return batch

    async def _complete(self, step: int, batch: StepBatch) -> None:
        """Drop the samples that are not trained on; raise WrongState when no group is left."""
        context = self._context
        if not batch.groups:
            await self._keep_muted_groups(step, batch)
        elif len(batch.groups) < self._count:
            log.warning(
                "batch is incomplete: step=%d groups=%d wanted=%d prompts=%d lost=%d filtered=%d",
                step, len(batch.groups), self._count, batch.prompts_drawn, batch.groups_lost, len(batch.filtered),
            )  # fmt: skip
        for reason in sorted({group.replaced for group in batch.filtered}):
            names = [s.sample_id for group in batch.filtered if group.replaced == reason for s in group.samples]
            await context.disk.write(context.ledger.drop, names, reason)
            batch.dropped[reason] += len(names)
        batch.groups.sort(key=lambda group: group.position)
        if not batch.groups:
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(batch.dropped.items()))
            faults, tables = context.router.faults, context.scorers.tables
            kinds, scorers = {*batch.dropped}, list[str]()
            for table in tables:
                prefix = table.drop_prefix if len(tables) > 1 else ""
                own = {reason.removeprefix(prefix) for reason in batch.dropped if reason.startswith(prefix)}
                kinds |= own
                if table.member_prefix in {name.rpartition("-")[0] for name in faults.members(own)}:
                    scorers.append(table.title)
            repair = f"; correct {', '.join(f'`{title}`' for title in scorers)}" if scorers else ""
            raise WrongState(
                f"step {step}: no group is left to train on; dropped samples: {reasons}; "
                f"{faults.first_of(kinds) or 'see the log'}{repair}"
            )
        batch.done = time.monotonic()

    async def _keep_muted_groups(self, step: int, batch: StepBatch) -> None:
        """Fill the batch with the last groups that were filtered out, with empty loss masks."""
        # The trainer accepts no empty batch. It skips a batch without loss tokens, and the run continues. The masks are
        # empty because penalties, KL terms or whitening could still give the samples advantages other than 0.
        chosen, batch.filtered = batch.filtered[-self._count :], batch.filtered[: -self._count]
        if chosen:
            log.warning("step has nothing to learn: step=%d prompts=%d", step, batch.prompts_drawn)

        async def mute(group: SampleGroup) -> None:
            try:
                batch.groups.append(await self._maker.mute(group))
            except GivenUp:
                batch.filtered.append(group)

        await self._context.session.run_all(mute(group) for group in chosen)

    def _show_queue(self) -> None:
        ready = len(self._places) - self._running
        self._context.board.set_queue(lag_limit=self.lag_limit, running=self._running, ready=ready, needed=self._count)

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
