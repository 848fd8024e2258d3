"""Shows the cause on the board when a run makes no progress, for console, `watch` and log.

Other parts report waits for a missing service and problems such as a full disk. This module checks the run as a whole,
and so also finds waits that no part reports. A phase that is long in every step, such as training a large model, is
reported when it takes longer than usual.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from statistics import median
from typing import Final

from fourfold.config import Config
from fourfold.coordinator.v1 import run_service_pb2 as pb
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.host.clock import SYSTEM_CLOCK, Clock
from fourfold.rollout.load import STALL_SECONDS
from fourfold.text import format_duration

from ..routing.router import Router
from ..state.files import DiskWriter
from ..state.run_board import RunBoard
from ..tasks.task_queue import TaskQueue
from ..weights.status import WeightPlaneStatus

WAIT_SECONDS: Final = 10.0
"""A run without progress counts as waiting when its phase exceeds the usual time by this much."""
# Calls of the trainer that do the work of a phase. Their deadline is trainer.step_timeout_seconds.
_LONG_CALLS: Final = frozenset({"TrainStep", "ComputeLogprobs", "SaveCheckpoint", "LoadCheckpoint", "ExportModel"})
# Limit of such a call while the usual time is unknown, so that no run is silent for more than 20 s.
_LONG_CALL_SECONDS: Final = 18.0
_TICK_SECONDS: Final = 1.0
_USUAL: Final = 8  # number of latest visits of a phase, whose median is the usual time
_MAX_NAMES: Final = 8
_MIN_VISITS: Final = 3  # with fewer visits the usual time is unknown
_SAMPLING_LIMIT: Final = f", ended after {format_duration(STALL_SECONDS)} without a token"
_SAMPLING: Final = (pb.RUN_PHASE_GENERATING, pb.RUN_PHASE_EVALUATING)
# The coordinator's own work in phases without calls in flight.
_OWN_WORK: Final = {
    pb.RUN_PHASE_WAITING_FOR_SERVICES: "reads the data of the run",
    pb.RUN_PHASE_RECOVERING: "reads the samples of the run",
    pb.RUN_PHASE_SAVING: "writes the report of the run",
}


class StandstillMonitor:
    """Watches one run. Call `run` in a task."""

    def __init__(
        self,
        config: Config,
        board: RunBoard,
        router: Router,
        *,
        tasks: TaskQueue,
        weights: WeightPlaneStatus,
        disk: DiskWriter,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        longest = format_duration(config.trainer.step_timeout_seconds)
        self._step_limit = f", at most {longest}: trainer.step_timeout_seconds"
        self._board, self._router, self._tasks, self._clock = board, router, tasks, clock
        self._weights, self._disk = weights, disk
        self._seen: tuple[object, ...] = ()
        self._phase = board.status.phase
        self._moved_at = clock.monotonic()
        self._longest = 0.0  # seconds, the longest standstill of this visit of the phase
        self._usual: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_USUAL))  # by phase

    async def run(self) -> None:
        """Check the run every second, until cancelled."""
        while True:
            self.tick()
            await self._clock.sleep(_TICK_SECONDS)

    def tick(self) -> None:
        """Show or end a wait."""
        now, status = self._clock.monotonic(), self._board.status
        if status.phase != self._phase:
            self._usual[self._phase].append(max(self._longest, now - self._moved_at))
            self._phase, self._longest = status.phase, 0.0
        if (seen := self._progress()) != self._seen:
            self._longest = max(self._longest, now - self._moved_at)
            self._seen, self._moved_at = seen, now
        if self._board.needs:
            self._moved_at = now  # another part reports its wait
        waits = now - self._moved_at >= self._limit() and not self._board.closed
        self._board.set_standstill(self._cause(now) if waits else "", now - self._moved_at)

    def _limit(self) -> float:
        """Return the seconds without progress after which the run waits."""
        if len(usual := self._usual[self._phase]) >= _MIN_VISITS:
            return WAIT_SECONDS + median(usual)
        trains = any(replica.pending_call in _LONG_CALLS for replica in self._router.replicas(Role.ROLE_TRAINER))
        return _LONG_CALL_SECONDS if trains else WAIT_SECONDS

    def _progress(self) -> tuple[object, ...]:
        """Return values that change when the run makes progress."""
        status, samples = self._board.status, self._board.status.phase in _SAMPLING
        members = self._router.replicas(None if samples else Role.ROLE_TRAINER)
        calls = max((replica.moved_at for replica in members), default=0.0)
        progress = (status.phase, status.step, status.phase_progress, status.answers_done, calls)
        return (*progress, status.queue.ready_groups, self._tasks.moved_at) if samples else progress

    def _cause(self, now: float) -> str:
        """Describe the wait of the run: its cause, its duration and its end."""
        parts = []
        if (since := self._disk.pending_since) is not None and now - since >= WAIT_SECONDS:
            parts.append(f"the disk (it has not ended a write for {format_duration(now - since)})")
        if self._phase in _SAMPLING and (agents := self._tasks.describe()):
            parts.append(f"agents ({agents}; environments: {self._router.explain(Role.ROLE_ENVIRONMENT)})")
        if update := self._weights.describe():  # includes the update of a late engine, for which the loop waits
            parts.append(update)
        parts += self._calls(now)
        own = _OWN_WORK.get(self._phase, "has no call in flight; its log says what it did last")
        return ", ".join(parts) or f"the coordinator ({own})"

    def _calls(self, now: float) -> Iterator[str]:
        """Yield the members that have calls of this phase, those with the oldest ones first."""
        found: list[tuple[float, str]] = []
        for replica in self._router.replicas():
            name, role = replica.member.member_id, replica.member.role
            if call := replica.pending_call:
                new = ", which has no usual time yet" if len(self._usual[self._phase]) < _MIN_VISITS else ""
                yield f"{name} ({call}{f'{new}{self._step_limit}' if call in _LONG_CALLS else ''})"
            elif self._phase in _SAMPLING and (since := replica.calls_since) is not None:
                age = format_duration(now - since)
                limit = _SAMPLING_LIMIT if role == Role.ROLE_ROLLOUT else ""
                found.append((since, f"{name} ({replica.outstanding} samples, the first for {age}{limit})"))
        yield from (text for _, text in sorted(found)[:_MAX_NAMES])
        if len(found) > _MAX_NAMES:
            yield f"{len(found) - _MAX_NAMES} more"
