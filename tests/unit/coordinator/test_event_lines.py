"""One plain line per event: waits, troubles, returns to a checkpoint, members that are not heard of."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fourfold.coordinator.v1 import run_service_pb2 as pb
from fourfold_coordinator.cli import event_lines
from fourfold_coordinator.cli.event_lines import EventLines

READY = [("coordinator-0", "ready"), ("rollout-0", "ready")]


class Console:
    """Feeds snapshots, a second apart."""

    def __init__(self) -> None:
        self.status = pb.RunStatus(name="demo", step_count=9, phase=pb.RUN_PHASE_GENERATING)
        self.services: list[tuple[str, str]] = []
        self.notes: list[str] = []
        self._events, self._now = EventLines(0.0), 0.0

    def after(self, seconds: int) -> list[str]:
        """The lines that come in so many seconds."""
        lines = []
        for _ in range(seconds):
            self._now += 1
            lines += self._events.new(self.status, self.services, self.notes, self._now)
        return lines

    def done(self, *steps: int) -> None:
        """Show these steps as done, and an evaluation after each even one."""
        del self.status.steps[:], self.status.evals[:]
        self.status.steps.extend(pb.StepRecord(step=step) for step in steps)
        self.status.evals.extend(pb.EvalRecord(step=step) for step in steps if step % 2 == 0)
        self.status.step = max(steps, default=0)

    def goes_on(self, step: int, reason: str = "", *, trainer_kept: bool = False) -> None:
        recovery = self.status.recoveries.add(step=step, reason=reason, trainer_kept=trainer_kept)
        recovery.time.FromSeconds(int(self._now) + 1000)


def steps_of(lines: Sequence[str]) -> list[str]:
    return [line.split("  ")[0].partition(":")[0] for line in lines]


def test_short_waits_and_those_that_follow_each_other_are_no_lines_of_their_own() -> None:
    console, lines = Console(), []
    console.status.waiting_for = "a reward service (none has registered)"
    lines += console.after(2)
    console.status.waiting_for = ""
    assert lines + console.after(5) == []
    for _ in range(4):  # two callers that wait take turns
        console.status.waiting_for = "a reward service (none has registered)"
        lines += console.after(2)
        console.status.waiting_for = ""
        lines += console.after(1)
    assert lines == ["waiting for a reward service (none has registered)"]
    console.status.waiting_for = "a rollout service (none has registered)"
    assert console.after(5) == [
        "waited 11 s for a reward service",
        "waiting for a rollout service (none has registered)",
    ]


def test_a_condition_is_told_when_it_begins_and_when_it_ends() -> None:
    console = Console()
    console.status.conditions.add(subject="disk", text="runs/demo cannot be written")
    assert console.after(4) == ["! disk: runs/demo cannot be written"]
    console.status.conditions[0].text = "other words"
    console.status.conditions.add(subject="reward-0", text="passes")
    assert console.after(1) == []
    del console.status.conditions[:]
    assert console.after(3) == ["disk: resolved after 5 s"]


def test_a_frozen_service_is_told_and_so_is_its_lease() -> None:
    console = Console()
    console.services = list(READY)
    member = console.status.members.add(member_id="rollout-0", state=pb.MEMBER_STATE_LIVE)
    console.after(1)
    member.state = pb.MEMBER_STATE_SILENT
    assert console.after(5) == [
        "rollout-0 did not renew its lease: it was killed, hangs, or cannot reach the coordinator"
    ]
    del console.status.members[:]
    assert console.after(5) == ["rollout-0 lost its lease; the run continues without it until it registers again"]
    console.status.members.add(member_id="rollout-0", state=pb.MEMBER_STATE_LIVE)
    assert console.after(2) == ["rollout-0 answered again after 10 s"]


def test_of_a_dead_process_the_launcher_tells_and_not_its_lease() -> None:
    console = Console()
    console.services = [("coordinator-0", "ready"), ("rollout-0", "starting")]
    console.status.members.add(member_id="rollout-0", state=pb.MEMBER_STATE_SILENT)
    console.notes = ["rollout-0 died", "rollout-0 is ready again after 12 s"]
    assert console.after(2) == ["coordinator-0 is ready (1 s)", "rollout-0 died", "rollout-0 is ready again after 12 s"]
    console.services = list(READY)
    console.notes += ["rollout-0 died", "rollout-0 is ready again after 12 s"]
    del console.status.members[:]
    assert console.after(2) == ["rollout-0 is ready (3 s)", "rollout-0 died", "rollout-0 is ready again after 12 s"]


def test_a_resumed_run_does_not_tell_its_old_steps_again() -> None:
    console = Console()
    console.status.phase = pb.RUN_PHASE_RECOVERING
    assert console.after(1) == []
    console.goes_on(4)
    console.done(1, 2, 3, 4)
    assert console.after(1) == ["resumed after step 4"]
    console.done(1, 2, 3, 4, 5, 6)
    assert steps_of(console.after(1)) == ["step 5/9", "step 6/9", "step 6"]
    begun = Console()
    begun.goes_on(0)
    assert begun.after(2) == ["restarted at step 0: there was no checkpoint"]
    begun.goes_on(0, "trainer-0 at x:1 is a new process")
    why = "(trainer-0 at x:1 is a new process)"
    assert begun.after(2) == [f"restarted at step 0: there was no checkpoint {why}"]


def test_a_coordinator_that_took_over_tells_the_step_that_the_dead_one_had_not_shown() -> None:
    console = Console()
    console.done(1, 2)
    console.after(1)
    console.done(1, 2, 3)
    console.goes_on(3, "coordinator-0 died (killed by SIGKILL)", trainer_kept=True)
    told = console.after(1)
    assert told[0] == "continued after step 3 with the trainer's weights: coordinator-0 died (killed by SIGKILL)"
    assert steps_of(told[1:]) == ["step 3/9"]
    console.done(1, 2, 3, 4)
    assert steps_of(console.after(2)) == ["step 4/9", "step 4"]


def test_a_rollback_says_where_and_why_and_the_steps_after_it_are_told_again() -> None:
    console = Console()
    console.done(1, 2, 3)
    console.after(1)
    console.done(1, 2)
    console.goes_on(2, "trainer-0 at x:1 is a new process")
    assert console.after(1) == ["restored the checkpoint of step 2: trainer-0 at x:1 is a new process"]
    console.done(1, 2, 3)
    assert steps_of(console.after(2)) == ["step 3/9"]
    console.done(1, 2)
    console.goes_on(2, "again")
    assert console.after(1) == ["restored the checkpoint of step 2: again"]
    console.done(1, 2, 3)
    assert steps_of(console.after(1)) == ["step 3/9"]


def test_a_line_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator compares all rows of its run on the event loop, twice a second."""
    console, written = Console(), list[int]()

    def write(record: pb.StepRecord, _status: pb.RunStatus) -> str:
        written.append(record.step)
        return "line"

    monkeypatch.setattr(event_lines, "step_line", write)
    console.done(1, 2)
    assert console.after(3)[:2] == ["line", "line"]
    console.done(1, 2, 3)
    assert console.after(3) == ["line"]
    assert written == [1, 2, 3]
