"""What a run tells where there is no terminal, such as CI and nohup: one plain line per event, each told once.

An event is the difference between two snapshots: a service got ready, a step or an evaluation was done, the run went
back to a checkpoint, a member fell silent, something went wrong or is right again, a wait began or ended. Waits and
troubles are told when they last for some seconds; short ones are in the log.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fourfold import metrics
from fourfold.coordinator.v1 import run_service_pb2 as pb
from fourfold.text import format_duration

OVER: Final = (pb.RUN_PHASE_DONE, pb.RUN_PHASE_FAILED)
PATIENCE_SECONDS: Final = 3.0
# The end of a wait is told when no other one follows at once: callers that wait take turns.
_SETTLED_SECONDS: Final = 1.0
# What changes while the run waits for the same thing: reasons in parentheses, and counts.
_DETAILS: Final = re.compile(r" \([^)]*\)| \d+ of \d+")
# Metric, word on the display: the parts of a step, in the order in which they happen.
_PARTS: Final = (
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


@dataclass(slots=True, kw_only=True)
class _Trouble:
    """A condition or a wait, from when it was first seen."""

    began: float
    ended: float | None = None
    told: bool = False
    what: str = ""
    """What is waited for, without details."""


class EventLines:
    """Compares each snapshot with those before it."""

    def __init__(self, began: float) -> None:
        """Begin; `began` and all later times are seconds of one monotonic clock."""
        self._began = began
        self._told: set[tuple[str, int]] = set()  # kind and step, or kind and number
        self._ready: set[str] = set()
        self._notes = 0
        self._recoveries: set[tuple[int, int]] = set()
        self._conditions: dict[str, _Trouble] = {}
        self._silent: dict[str, _Trouble] = {}
        self._wait: _Trouble | None = None

    def new(
        self, status: pb.RunStatus, services: Sequence[tuple[str, str]], notes: Sequence[str], now: float
    ) -> list[str]:
        """Return the lines of what is new.

        Args:
            status: the newest snapshot.
            services: (name, state) of the processes.
            notes: everything that happened to the processes so far, in order.
            now: time.
        """
        lines = list(self._of_services(services, now))
        lines += notes[self._notes :]
        self._notes = len(notes)
        lines += self._of_members(status, dict(services), now)
        lines += self._of_conditions(status, now)
        lines += self._of_waits(status, now)
        lines += self._of_recoveries(status)
        return lines + self._of_steps(status)

    def _of_services(self, services: Sequence[tuple[str, str]], now: float) -> Iterator[str]:
        """Tell who is ready for the first time; returns are notes."""
        for name, state in services:
            if state == "ready" and name not in self._ready:
                self._ready.add(name)
                yield f"{name} is ready ({format_duration(now - self._began)})"

    def _of_members(self, status: pb.RunStatus, services: Mapping[str, str], now: float) -> Iterator[str]:
        """Tell who is not heard of though its process lives; of a dead process a note tells."""
        members = {member.member_id: member.state for member in status.members}
        for name, state in members.items():
            if state == pb.MEMBER_STATE_SILENT and services.get(name, "ready") == "ready":
                silent = self._silent.setdefault(name, _Trouble(began=now))
                if not silent.told:
                    silent.told = True
                    yield f"{name} is silent: its lease is overdue; it hangs, is stopped, or cannot reach us"
            elif name in self._silent:
                yield f"{name} is heard of again ({format_duration(now - self._silent.pop(name).began)})"
        for name, silent in self._silent.items():
            if name not in members and silent.ended is None and status.phase not in OVER:
                silent.ended = now
                yield f"{name} has lost its lease; the run goes on without it until it registers again"

    def _of_conditions(self, status: pb.RunStatus, now: float) -> Iterator[str]:
        present = {condition.subject: condition.text for condition in status.conditions}
        for subject, text in present.items():
            trouble = self._conditions.setdefault(subject, _Trouble(began=now))
            if not trouble.told and now - trouble.began >= PATIENCE_SECONDS:
                trouble.told = True
                yield f"! {subject}: {text}"
        for subject in self._conditions.keys() - present.keys():
            trouble = self._conditions.pop(subject)
            if trouble.told:
                yield f"{subject}: right again ({format_duration(now - trouble.began)})"

    def _of_waits(self, status: pb.RunStatus, now: float) -> Iterator[str]:
        what, wait = _DETAILS.sub("", status.waiting_for), self._wait
        if wait is not None and not what and wait.ended is None:
            wait.ended = now
        if wait is not None and wait.ended is not None:
            if not what and now - wait.ended < _SETTLED_SECONDS and status.phase not in OVER:
                return
            if what != wait.what:
                self._wait = None
                if wait.told:
                    yield f"waited {format_duration(wait.ended - wait.began)} for {wait.what}"
        if what:
            self._wait = wait = self._wait or _Trouble(began=now, what=what)
            wait.ended = None
            if not wait.told and now - wait.began >= PATIENCE_SECONDS:
                wait.told = True
                yield f"waiting for {status.waiting_for}"

    def _of_recoveries(self, status: pb.RunStatus) -> Iterator[str]:
        """Tell where the run went on; steps up to there are old, and later ones will be new again."""
        for recovery in status.recoveries:
            key = (recovery.time.ToNanoseconds(), recovery.step)
            if key in self._recoveries:
                continue
            self._recoveries.add(key)
            self._told = {told for told in self._told if told[1] <= recovery.step}
            self._told |= {key for key, _ in _records(status) if key[1] <= recovery.step}
            yield recovery_line(recovery)

    def _of_steps(self, status: pb.RunStatus) -> list[str]:
        # An evaluation is told after its step, whose record comes a little later.
        last = status.step_count if status.phase in OVER else max((record.step for record in status.steps), default=0)
        new = []
        for key, line in sorted(_records(status), key=lambda item: (item[0][1], _ORDER.index(item[0][0]))):
            if key not in self._told and (key[0] != "eval" or key[1] <= last):
                self._told.add(key)
                new.append(line)
        return new


_ORDER: Final = ("step", "alarms", "eval")


def _records(status: pb.RunStatus) -> Iterator[tuple[tuple[str, int], str]]:
    """Yield kind and step of each record, and its line."""
    for record in status.steps:
        yield ("step", record.step), step_line(record, status.step_count)
        if record.alarms:
            yield ("alarms", record.step), "\n".join(f"  ! {text}" for text in record.alarms)
    for evaluation in status.evals:
        yield ("eval", evaluation.step), eval_line(evaluation)


def recovery_line(recovery: pb.Recovery) -> str:
    """Return the plain line of a return to a checkpoint."""
    if recovery.reason:
        return f"back to step {recovery.step}: {recovery.reason}"
    return f"resumed after step {recovery.step}" if recovery.step else "begun again: there was no checkpoint"


def step_line(record: pb.StepRecord, step_count: int) -> str:
    """Return the plain line of a step."""
    words = [f"step {record.step}/{step_count}"]
    for metric, form in (
        (metrics.REWARD_MEAN, "reward {:.2f}"),
        (metrics.USEFUL_GROUPS, "useful groups {:.0%}"),
        (metrics.MISMATCH_MEAN, "drift {:.4f}"),
        (metrics.MFU, "MFU {:.0%}"),
        (metrics.POLICY_LAG_MAX, "lag {:.0f}"),
        (metrics.TIME_STEP, "{:.1f} s"),
    ):
        if metric in record.metrics:
            words.append(form.format(record.metrics[metric]))
    parts = phase_times(record)
    return "  ".join(words) + (f" ({parts})" if parts else "")


def eval_line(record: pb.EvalRecord) -> str:
    """Return the plain line of an evaluation."""
    interval = f"{record.mean_score:.2f} +- {record.half_width:.2f}"
    return f"step {record.step}: held-out accuracy {interval} ({record.answer_count} answers)"


def phase_times(record: pb.StepRecord) -> str:
    """Return the seconds of each part of a step; parts that took no time are left out."""
    named = [(word, record.metrics.get(metric, 0.0)) for metric, word in _PARTS]
    return ", ".join(f"{word} {seconds:.1f}" for word, seconds in named if seconds >= 0.05)
