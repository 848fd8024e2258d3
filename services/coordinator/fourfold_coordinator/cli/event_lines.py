"""Prints one plain line per event of a run, for consoles without a terminal such as CI and nohup.

An event is a difference between two snapshots of the run's status: a service became ready, a step or an evaluation was
done, the run restored a checkpoint, a lease became overdue, a problem or a wait began or ended. Problems and waits of
less than 3 seconds are only in the log.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fourfold import metrics
from fourfold.coordinator.v1 import run_service_pb2 as pb
from fourfold.text import format_duration, format_score

OVER: Final = (pb.RUN_PHASE_DONE, pb.RUN_PHASE_FAILED, pb.RUN_PHASE_STOPPED)
_MIN_SECONDS: Final = 3.0
# Several callers may wait for the same service in turn. A wait has ended when no other begins within this time.
_SETTLE_SECONDS: Final = 1.0
_REMINDER_SECONDS: Final = 30.0  # interval of the lines about a wait that continues
_LONG_SECONDS: Final = 10.0  # a wait of at least this age is printed with its age
# The parts of a wait's text that change during one wait: reasons in parentheses, and counts.
_DETAILS: Final = re.compile(r" \((?:[^()]|\([^()]*\))*\)| \d+ of \d+")
# Metric and label of each part of a step, in their order.
_PARTS: Final = (
    (metrics.TIME_ROWS, "rows"),
    (metrics.TIME_GENERATE, "generate"),
    (metrics.TIME_REWARD, "reward"),
    (metrics.TIME_REFERENCE, "reference"),
    (metrics.TIME_SLEEP, "sleep"),
    (metrics.TIME_TRAIN, "train"),
    (metrics.TIME_WAKE, "wake"),
    (metrics.TIME_PUBLISH, "publish"),
    (metrics.TIME_EVALUATE, "evaluate"),
    (metrics.TIME_CHECKPOINT, "checkpoint"),
)
_KIND_ORDER: Final = ("step", "lag", "alarms", "eval")


@dataclass(slots=True, kw_only=True)
class _OpenEvent:
    """A problem, an overdue lease or a wait that has begun."""

    began: float
    ended: float | None = None
    printed: bool = False
    printed_at: float = 0.0
    subject: str = ""


class EventLines:
    """Compares each snapshot with the earlier ones, and returns the lines of new events."""

    def __init__(self, began: float, *, epoch_seconds: Callable[[], float] = time.time) -> None:
        """Start without events; `began` and later times are seconds of one monotonic clock.

        `epoch_seconds` is the clock of the status.
        """
        self._began, self._epoch_seconds = began, epoch_seconds
        self._printed: set[tuple[str, int]] = set()  # kind and step
        self._ready: set[str] = set()
        self._note_count = 0
        self._recoveries: set[tuple[int, int]] = set()
        self._conditions: dict[str, _OpenEvent] = {}
        self._overdue: dict[str, _OpenEvent] = {}
        self._wait: _OpenEvent | None = None

    def new(
        self, status: pb.RunStatus, services: Sequence[tuple[str, str]], notes: Sequence[str], now: float
    ) -> list[str]:
        """Return the lines of events since the last call; `notes` are all lines of the launcher so far, in order."""
        lines = list(self._services(services, now))
        lines += notes[self._note_count :]
        self._note_count = len(notes)
        lines += self._leases(status, dict(services), now)
        lines += self._condition_changes(status, now)
        lines += self.waits(status, now)
        lines += self._checkpoint_restores(status)
        return lines + self._steps(status)

    def _services(self, services: Sequence[tuple[str, str]], now: float) -> Iterator[str]:
        """Yield the first time that each process is ready. For later times the launcher adds a note."""
        for name, state in services:
            if state == "ready" and name not in self._ready:
                self._ready.add(name)
                yield f"{name} is ready ({format_duration(now - self._began)})"

    def _leases(self, status: pb.RunStatus, services: Mapping[str, str], now: float) -> Iterator[str]:
        """Yield overdue leases of living processes. For dead processes the launcher adds a note."""
        members = {member.member_id: member.state for member in status.members}
        for name, state in members.items():
            if state == pb.MEMBER_STATE_SILENT and services.get(name, "ready") == "ready":
                overdue = self._overdue.setdefault(name, _OpenEvent(began=now))
                if not overdue.printed:
                    overdue.printed = True
                    yield f"{name} did not renew its lease: it was killed, hangs, or cannot reach the coordinator"
            elif name in self._overdue:
                yield f"{name} answered again after {format_duration(now - self._overdue.pop(name).began)}"
        for name, overdue in self._overdue.items():
            if name not in members and overdue.ended is None and status.phase not in OVER:
                overdue.ended = now
                yield f"{name} lost its lease; the run continues without it until it registers again"

    def _condition_changes(self, status: pb.RunStatus, now: float) -> Iterator[str]:
        present = {condition.subject: condition.text for condition in status.conditions}
        for subject, text in present.items():
            event = self._conditions.setdefault(subject, _OpenEvent(began=now))
            if not event.printed and now - event.began >= _MIN_SECONDS:
                event.printed = True
                yield f"! {subject}: {text}"
        for subject in self._conditions.keys() - present.keys():
            event = self._conditions.pop(subject)
            if event.printed:
                yield f"{subject}: resolved after {format_duration(now - event.began)}"

    def waits(self, status: pb.RunStatus, now: float) -> Iterator[str]:
        """Yield the lines about waits since the last call."""
        subject, wait = _DETAILS.sub("", status.waiting_for), self._wait
        if wait is not None and not subject and wait.ended is None:
            wait.ended = now
        if wait is not None and wait.ended is not None:
            if not subject and now - wait.ended < _SETTLE_SECONDS and status.phase not in OVER:
                return
            if subject != wait.subject:
                self._wait = None
                if wait.printed:
                    yield f"waited {format_duration(wait.ended - wait.began)} for {wait.subject}"
        if subject:
            if (wait := self._wait) is None:
                since = status.waiting_since.ToNanoseconds() / 1e9 or math.inf
                began = now - max(self._epoch_seconds() - since, 0.0)
                self._wait = wait = _OpenEvent(began=began, subject=subject)
            wait.ended = None
            if not wait.printed and now - wait.began >= _MIN_SECONDS:
                wait.printed, wait.printed_at = True, now
                age = now - wait.began
                long = f", for {format_duration(age)}" if age >= _LONG_SECONDS else ""
                yield f"waiting for {status.waiting_for}{long}"
            elif wait.printed and now - wait.printed_at >= _REMINDER_SECONDS:
                wait.printed_at = now
                yield f"still waiting for {status.waiting_for}, for {format_duration(now - wait.began)}"

    def _checkpoint_restores(self, status: pb.RunStatus) -> Iterator[str]:
        """Yield restores. Steps up to the checkpoint are not printed again; later ones are, when they are repeated."""
        for recovery in status.recoveries:
            key = (recovery.time.ToNanoseconds(), recovery.step)
            if key in self._recoveries:
                continue
            self._recoveries.add(key)
            if not (recovery.trainer_kept and self._printed):  # nothing was printed: the display began with the run
                self._printed = {printed for printed in self._printed if printed[1] <= recovery.step}
                self._printed |= {key for key, _ in _records(status, ()) if key[1] <= recovery.step}
            yield recovery_line(recovery)

    def _steps(self, status: pb.RunStatus) -> list[str]:
        # An evaluation may arrive before the record of its step, and is printed after it.
        last = status.step_count if status.phase in OVER else max((record.step for record in status.steps), default=0)
        new = []
        found = _records(status, self._printed)
        for key, line in sorted(found, key=lambda item: (item[0][1], _KIND_ORDER.index(item[0][0]))):
            if key[0] != "eval" or key[1] <= last:
                self._printed.add(key)
                new.append(line)
        return new


def _records(status: pb.RunStatus, printed: Collection[tuple[str, int]]) -> Iterator[tuple[tuple[str, int], str]]:
    """Yield kind, step and line of each record that is not in `printed`.

    The console of a coordinator calls this on the event loop of the run. Writing the lines of 1,000 steps takes 35 ms.
    """
    for record in status.steps:
        step = record.step
        if ("step", step) not in printed:
            yield ("step", step), step_line(record, status)
        if record.lag_change and ("lag", step) not in printed:
            yield ("lag", step), f"  {record.lag_change}"
        if record.alarms and ("alarms", step) not in printed:
            yield ("alarms", step), "\n".join(f"  ! {text}" for text in record.alarms)
    for evaluation in status.evals:
        if ("eval", evaluation.step) in printed:
            continue
        measure = evaluation.measure or "score"
        text = f"step {evaluation.step}: held-out {measure} {_score(evaluation, measure)}"
        if len(evaluation.sets) > 1:
            text += ": " + ", ".join(f"{each.name} {_score(each, measure)}" for each in evaluation.sets)
        yield ("eval", evaluation.step), text


def _score(record: pb.EvalRecord | pb.EvalSetRecord, measure: str) -> str:
    spread = (record.low, record.high) if record.HasField("low") else record.half_width
    return format_score(record.mean_score, spread, record.answer_count, record.missing_count, measure=measure)


def recovery_line(recovery: pb.Recovery) -> str:
    if recovery.trainer_kept:
        return f"continued after step {recovery.step} with the trainer's weights: {recovery.reason}"
    if not recovery.step:
        reason = f" ({recovery.reason})" if recovery.reason else ""
        return f"restarted at step 0: there was no checkpoint{reason}"
    if recovery.reason:
        return f"restored the checkpoint of step {recovery.step}: {recovery.reason}"
    return f"resumed after step {recovery.step}"


def step_line(record: pb.StepRecord, status: pb.RunStatus) -> str:
    last, words = record.metrics, [f"step {record.step}/{status.step_count}"]
    for metric, form in (
        (metrics.SCORE_ACCURACY, "accuracy {:.1%}"),
        (metrics.REWARD_MEAN, "reward {:.2f}"),
        (metrics.NLL, "loss {:.4f}"),
        (metrics.PAIR_ACCURACY, "accuracy {:.1%}"),
        (metrics.PAIR_MARGIN, "margin {:.4f}"),
        (metrics.KTO_ACCURACY, "accuracy {:.1%}"),
        (metrics.KTO_DISTANCE, "distance {:.4f}"),
        (metrics.TEACHER_KL, "KL to the teacher {:.4f}"),
        (metrics.DATA_PASS, "pass {:.2f}"),
        (metrics.USEFUL_GROUPS, "useful groups {:.0%}"),
        (metrics.MISMATCH_MEAN, "logprob mismatch {:.4f}"),
        (metrics.MFU, "MFU {:.0%}"),
    ):
        if metric in last:
            words.append(form.format(last[metric]))
    if status.HasField("queue"):
        words += (f"{label} {text}" for label, text in asynchrony_rows(last))
    elif metrics.POLICY_LAG_MAX in last:
        words.append(f"lag {last[metrics.POLICY_LAG_MAX]:.0f}")
    if metrics.TIME_STEP in last:
        words.append(f"{last[metrics.TIME_STEP]:.1f} s")
    parts = phase_times(record)
    return "  ".join(words) + (f" ({parts})" if parts else "")


def asynchrony_rows(last: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return (label, text) of lag, waits and stale tokens in a step of an asynchronous run."""
    rows = []
    if metrics.TOKEN_LAG_MEAN in last:
        details = (("at most {:.0f}", metrics.TOKEN_LAG_MAX), ("limit {:.0f}", metrics.LAG_LIMIT))
        known = ", ".join(form.format(last[metric]) for form, metric in details if metric in last)
        rows.append(("lag", f"{last[metrics.TOKEN_LAG_MEAN]:.1f}" + (f" ({known})" if known else "")))
    if metrics.TRAINER_WAIT in last:
        room = f", engines have room {last[metrics.ROLLOUT_WAIT]:.0%}" if metrics.ROLLOUT_WAIT in last else ""
        rows.append(("trainer waits", f"{last[metrics.TRAINER_WAIT]:.0%}{room}"))
    if last.get(metrics.STALE_TOKENS, 0.0) > 0:
        rows.append(("stale", f"{last[metrics.STALE_TOKENS]:.1%}"))
    return rows


def phase_times(record: pb.StepRecord) -> str:
    """Return the seconds of each part of a step; parts below 0.05 s are left out."""
    times = [(label, record.metrics.get(metric, 0.0)) for metric, label in _PARTS]
    return ", ".join(f"{label} {seconds:.1f}" for label, seconds in times if seconds >= 0.05)
