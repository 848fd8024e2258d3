"""Keeps the present state of a run for watchers: phase, queue, metrics, conditions and members.

A watcher gets the present state at once, then the newest state after changes. It never gets a backlog, and always gets
the final state before its stream ends. A watcher that asks only for changes does not get rows of steps twice.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from fourfold.coordinator.v1 import run_service_pb2 as pb
from fourfold.host.clock import SYSTEM_CLOCK, Clock

from .eval_results import EvalRow, SetResult
from .ledger import CheckpointRow

# Shortest time between two states for a watcher. Each state has all rows, and encoding a row of 90 metrics takes 0.026
# ms. With 1,000 rows, a watcher blocks the event loop for 26 ms at a time and uses 2.4 % of it.
_PERIOD_SECONDS: Final = 0.1
_SECONDS_PER_ROW: Final = 0.001
HEARTBEAT_SECONDS: Final = 5.0
"""Without a change, a watcher gets the state again after this time, so that it notices a hanging coordinator."""
_MAX_STEP_ROWS: Final = 1000
_MAX_RECOVERIES: Final = 100
# A wait that starts this soon after another one counts as its continuation, because waiting calls report in turn.
_SETTLED_SECONDS: Final = 1.0


class RunBoard:
    """Present state of one run. Not thread-safe."""

    def __init__(self, *, name: str, step_count: int, max_policy_lag: int = 0, clock: Clock = SYSTEM_CLOCK) -> None:
        """Begin without steps; `max_policy_lag` is that of the recipe."""
        self.status = pb.RunStatus(
            name=name, step_count=step_count, phase=pb.RUN_PHASE_WAITING_FOR_SERVICES, waiting_for=""
        )
        self.closed = False
        self._histories = self._steps_added = self._member_lists = 0  # counts of replaced or added rows
        self._clock = clock
        self._change = asyncio.Event()
        self.set_max_policy_lag(max_policy_lag)
        self._wait, self._wait_began, self._wait_ended = "", Timestamp(), -math.inf
        self._standstill, self._standstill_began = "", Timestamp()

    def set_phase(self, phase: pb.RunPhase.ValueType) -> None:
        """Set the phase that the run is in; its progress starts at 0."""
        self.status.phase = phase
        self.status.answers_done = self.status.answer_count = 0
        self.set_progress(0.0)

    def set_recovering(self, saved: CheckpointRow | None) -> None:
        """Note that the run continues at a checkpoint; None: at its start."""
        if saved is not None:
            self.set_step(step=saved.step, policy_version=saved.policy_version)
        self.set_phase(pb.RUN_PHASE_RECOVERING)

    def set_progress(self, share: float) -> None:
        """Set the share of the present phase that is done, in [0, 1]."""
        self.status.phase_progress = min(max(share, 0.0), 1.0)
        self._changed()

    def set_answers(self, done: int, count: int) -> None:
        """Set the number of finished answers, and of all answers, of the present phase, a held-out evaluation."""
        self.status.answers_done, self.status.answer_count = done, count
        self.set_progress(done / count)

    def set_evaluation_progress(self, share: float | None) -> None:
        """Set the finished share of an evaluation beside the present phase, in [0, 1]; None: no evaluation runs."""
        if share is None:
            self.status.ClearField("evaluation_progress")
        else:
            self.status.evaluation_progress = min(max(share, 0.0), 1.0)
        self._changed()

    def set_max_policy_lag(self, lag: int) -> None:
        """Set the policy lag of the recipe; with 0 there is no queue to show."""
        self.status.ClearField("queue")
        if lag:
            self.status.queue.CopyFrom(pb.SampleQueue(max_policy_lag=lag, lag_limit=lag))
        self._changed()

    def set_queue(self, *, lag_limit: int, running: int, ready: int, needed: int) -> None:
        """Set the groups between their admission and their step.

        Args:
            lag_limit: Largest policy lag that new groups may reach.
            running: Groups in generation or scoring.
            ready: Groups that are ready to train on.
            needed: Groups of a step; the progress of RUN_PHASE_GENERATING is the share of them that is ready.
        """
        queue = self.status.queue
        new = lag_limit, running, ready
        if self.status.HasField("queue") and new != (queue.lag_limit, queue.running_groups, queue.ready_groups):
            queue.lag_limit, queue.running_groups, queue.ready_groups = new
            self._changed()
        progress = min(ready / needed, 1.0)
        if self.status.phase == pb.RUN_PHASE_GENERATING and self.status.phase_progress != progress:
            self.set_progress(progress)

    def set_waiting_for(self, what: str) -> None:
        """Set a description of the run's wait; an empty text ends the wait."""
        if self._wait != what:
            now = self._clock.monotonic()
            if not self._wait and now - self._wait_ended > _SETTLED_SECONDS:
                self._stamp(self._wait_began)
            if not what:
                self._wait_ended = now
            self._wait = what
            self._show_wait()

    @property
    def needs(self) -> str:
        """Return the text of `set_waiting_for`."""
        return self._wait

    def set_standstill(self, cause: str, seconds: float = 0.0) -> None:
        """Set the cause and the seconds of a standstill; an empty text: the run makes progress.

        A wait of `set_waiting_for` is shown instead, because it is more specific.
        """
        if cause and not self._standstill:
            self._stamp(self._standstill_began, ago=seconds)
        if self._standstill != cause:
            self._standstill = cause
            self._show_wait()

    def _show_wait(self) -> None:
        began = self._wait_began if self._wait else self._standstill_began
        self.status.waiting_for = self._wait or self._standstill
        if self.status.waiting_for:
            self.status.waiting_since.CopyFrom(began)
        else:
            self.status.ClearField("waiting_since")
        self._changed()

    def report_condition(self, subject: str, text: str) -> None:
        """Show a problem of a member or a part of the run; a later text keeps the time of the first."""
        condition = next((c for c in self.status.conditions if c.subject == subject), None)
        if condition is None:
            condition = self.status.conditions.add(subject=subject)
            self._stamp(condition.since)
        if condition.text != text:
            condition.text = text
            self._changed()

    def resolve_condition(self, subject: str) -> None:
        """End the condition of `subject`; do nothing when there is none."""
        for index, condition in enumerate(self.status.conditions):
            if condition.subject == subject:
                del self.status.conditions[index]
                self._changed()
                return

    def add_recovery(self, step: int, reason: str, *, trainer_kept: bool = False) -> None:
        """Show that the run continues after `step` steps; `reason` is empty when a new coordinator resumed it."""
        recovery = self.status.recoveries.add(step=step, reason=reason, trainer_kept=trainer_kept)
        self._stamp(recovery.time)
        if len(self.status.recoveries) > _MAX_RECOVERIES:
            del self.status.recoveries[0]
        self._changed()

    def mark_started(self) -> None:
        """Set the start time of the run, once."""
        if not self.status.HasField("start_time"):
            self._stamp(self.status.start_time)
            self._changed()

    def set_step(self, *, step: int, policy_version: int) -> None:
        """Set the number of steps done and the policy version published last."""
        self.status.step, self.status.policy_version = step, policy_version
        self._changed()

    def add_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the row of a finished step, without values that are not finite numbers."""
        self._steps_added += 1
        self.status.steps.append(_step_record(step, metrics))
        if len(self.status.steps) > _MAX_STEP_ROWS:
            del self.status.steps[0]
        self._changed()

    def set_history(self, steps: Iterable[tuple[int, Mapping[str, Any]]], evals: Iterable[EvalRow]) -> None:
        """Replace all rows of steps and evaluations, after a restore."""
        self._histories += 1
        del self.status.steps[:], self.status.evals[:]
        self.status.steps.extend([_step_record(step, metrics) for step, metrics in steps][-_MAX_STEP_ROWS:])
        self.status.evals.extend(_eval_record(row) for row in evals)
        self._changed()

    def add_eval(self, row: EvalRow) -> None:
        self.status.evals.append(_eval_record(row))
        self._changed()

    def set_members(self, members: Iterable[pb.Member]) -> None:
        """Replace the rows of the members."""
        rows = list(members)
        if rows != list(self.status.members):
            self._member_lists += 1
            del self.status.members[:]
            self.status.members.extend(rows)
            self._changed()

    def close(self, *, failure: str = "", stopped: str = "") -> None:
        """Set the final state: done, or the reason of a failure or stop. Watchers get it, and their streams end."""
        self.status.failure = failure or stopped
        ended = pb.RUN_PHASE_STOPPED if stopped else pb.RUN_PHASE_DONE
        self.status.phase = pb.RUN_PHASE_FAILED if failure else ended
        self.status.waiting_for = ""
        self.status.ClearField("waiting_since")
        self.status.phase_progress = 1.0
        self.closed = True
        self._changed()

    async def changes(self, *, changes_only: bool = False) -> AsyncIterator[pb.WatchRunResponse]:
        """Yield the state now, after changes and as a sign of life, until the run is over."""
        seen = (-1, 0, -1)
        while True:
            change, closed = self._change, self.closed
            response = self._changes_since(*seen) if changes_only else pb.WatchRunResponse(status=self.status)
            seen = self._histories, self._steps_added, self._member_lists  # the state may change during `yield`
            yield response
            if closed:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await change.wait()
            # Send one state for a burst of changes. The final state does not wait.
            rows = 0 if changes_only else len(self.status.steps)
            with suppress(TimeoutError):
                async with asyncio.timeout(_PERIOD_SECONDS + _SECONDS_PER_ROW * rows):
                    while not self.closed:
                        await self._change.wait()

    def _changes_since(self, histories: int, steps_added: int, member_lists: int) -> pb.WatchRunResponse:
        """Return the state without the rows of steps and members that a watcher already had at these counts."""
        appended = histories == self._histories
        new = self._steps_added - steps_added if appended else len(self.status.steps)
        response = pb.WatchRunResponse(steps_appended=appended, members_unchanged=member_lists == self._member_lists)
        for field, value in self.status.ListFields():
            if field.name == "steps":
                response.status.steps.extend(value[max(len(value) - new, 0) :])
            elif field.name == "members":
                response.status.members.extend(() if response.members_unchanged else value)
            elif isinstance(value, Message):
                getattr(response.status, field.name).CopyFrom(value)
            elif isinstance(value, str | int | float):
                setattr(response.status, field.name, value)
            else:
                getattr(response.status, field.name).extend(value)
        return response

    def _stamp(self, timestamp: Timestamp, *, ago: float = 0.0) -> None:
        timestamp.FromNanoseconds(int((self._clock.now() - ago) * 1e9))

    def _changed(self) -> None:
        change, self._change = self._change, asyncio.Event()
        change.set()


def _step_record(step: int, metrics: Mapping[str, Any]) -> pb.StepRecord:
    numbers = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float) and math.isfinite(v)}
    return pb.StepRecord(
        step=step,
        metrics=numbers,
        alarms=metrics.get("alarms", []),
        lag_change=metrics.get("lag_change", ""),
        diagnosis=metrics.get("diagnosis", ""),
    )


def _eval_record(row: EvalRow) -> pb.EvalRecord:
    return pb.EvalRecord(
        step=row.step,
        sets=[pb.EvalSetRecord(name=result.name, **_numbers(result)) for result in row.sets],
        seconds=max((result.seconds for result in row.sets), default=0.0),
        measure=row.measure,
        **_numbers(row),
    )


def _numbers(result: EvalRow | SetResult) -> dict[str, Any]:
    """Return the fields that an evaluation and each of its sets have."""
    low, high = result.bounds or (None, None)
    return {
        "mean_score": result.score,
        "half_width": math.nan if result.half_width is None else result.half_width,
        "low": low,
        "high": high,
        "answer_count": result.answer_count,
        "missing_count": result.missing_count,
    }
