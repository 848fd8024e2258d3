"""Displays a run from `RunStatus` snapshots: a live panel on a terminal, one plain line per event elsewhere.

`fourfold run` and `fourfold watch` use it. When drawing fails, the display is disabled and the run continues.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final, Self

from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fourfold import metrics
from fourfold.config import Config
from fourfold.coordinator.v1 import run_service_pb2 as pb
from fourfold.plan.batch import batch_plan
from fourfold.text import format_duration, format_short_score

from ..launch.fleet import COORDINATOR
from ..state.run_board import HEARTBEAT_SECONDS
from .event_lines import OVER, EventLines, asynchrony_rows, phase_times, recovery_line

_log = logging.getLogger("fourfold.dashboard")

_BLOCKS: Final = "".join(chr(0x2581 + i) for i in range(8))
_ASCII_BLOCKS: Final = "_.-=+*%#"
_NOTES: Final = 5
_SILENT_SECONDS: Final = 2 * HEARTBEAT_SECONDS + 2.0
_RECOVERIES: Final = 2
_LAG_CHANGE_STEPS: Final = 50  # number of steps for which a change of the lag limit is shown
_NOTE: Final = "an old note"
# Rows that a small terminal leaves out, the least important first.
_OPTIONAL: Final = (
    "MFU",
    "tokens/s trained",
    "effective tokens",
    "engines",
    "logs",
    "distance",
    "entropy",
    "stale",
    "tokens/s sampled",
    "trained samples",
    "useful groups",
    "logprob mismatch",
    _NOTE,
    "weights",
    "lag",
    "trainer waits",
    "margin",
    "pass",
    "accuracy",
    "queue",
    "services",
    "last step",
    "KL",
    "length",
)
_LABEL_WIDTH: Final = 24  # with the frame
_VALUE_WIDTH: Final = 12
_SPARKLINE_WIDTH: Final = 32
_RECENT_STEPS: Final = 8
_PHASES: Final = {
    pb.RUN_PHASE_WAITING_FOR_SERVICES: "waiting for services",
    pb.RUN_PHASE_RECOVERING: "restoring a checkpoint",
    pb.RUN_PHASE_PREPARING: "computing the reference",
    pb.RUN_PHASE_GENERATING: "generating",
    pb.RUN_PHASE_TRAINING: "training",
    pb.RUN_PHASE_PUBLISHING: "updating the engines",
    pb.RUN_PHASE_EVALUATING: "evaluating",
    pb.RUN_PHASE_SAVING: "saving",
    pb.RUN_PHASE_DONE: "done",
    pb.RUN_PHASE_FAILED: "failed",
    pb.RUN_PHASE_STOPPED: "stopped",
}
_TRAINER_PHASES: Final = (
    pb.RUN_PHASE_TRAINING,
    pb.RUN_PHASE_PUBLISHING,
    pb.RUN_PHASE_EVALUATING,
    pb.RUN_PHASE_SAVING,
)


class Dashboard:
    """Displays one run. Use it as a context manager; `refresh` draws."""

    def __init__(
        self,
        *,
        name: str,
        run_dir: Path,
        schedule: Schedule | None,
        console: Console | None = None,
        live: bool | None = None,
    ) -> None:
        """Create the display of a run, or of an evaluation without a trainer if `schedule` is None.

        It is on `console` (default: stdout); `live` defaults to whether that is a terminal.
        """
        self._console = console or Console(highlight=False, soft_wrap=False)
        self._blocks = _BLOCKS if "utf" in (self._console.encoding or "").lower() else _ASCII_BLOCKS
        self._is_live = self._console.is_terminal if live is None else live
        self._live: Live | None = None
        self._broken = False
        self._name, self._run_dir, self._began = name, run_dir, time.monotonic()
        self._status = pb.RunStatus()
        self._updated_at = 0.0  # when the last status came, monotonic; 0: none came
        self._silent_since = 0.0  # time of the last status before the silence that a note reports; 0: none
        self._services: list[tuple[str, str]] = []
        self._notes: list[str] = []
        self._lines = EventLines(self._began)
        self._schedule = schedule

    def __enter__(self) -> Self:
        if self._is_live:
            self._guarded(self._start_live)
        return self

    def __exit__(self, *_error: object) -> None:
        """Draw the last state and leave it on the screen."""
        self.refresh()
        if self._live is not None:
            self._guarded(self._live.stop)

    def abandon(self) -> None:
        """Restore the terminal's cursor, from a signal handler of a process that is about to exit."""
        if self._live is not None:
            self._guarded(lambda: self._console.show_cursor(True))

    def update(self, status: pb.RunStatus) -> None:
        """Set the status of the run. The client has removed control characters from its texts."""
        self._status, self._updated_at = status, time.monotonic()
        if self._silent_since:
            self.note(f"the coordinator answered again after {format_duration(self._updated_at - self._silent_since)}")
            self._silent_since = 0.0

    @property
    def status(self) -> pb.RunStatus:
        """Return the last status of the run."""
        return self._status

    def set_services(self, states: Sequence[tuple[str, str]]) -> None:
        """Set the (name, state) of the launcher's processes."""
        self._services = list(states)

    def note(self, line: str) -> None:
        """Add a line about an event, such as a restart."""
        self._notes.append(line)

    def refresh(self) -> None:
        """Redraw the panel, or print the new lines."""
        self._guarded(self._draw)

    def _guarded(self, action: Callable[[], object]) -> None:
        # A terminal can fail in many ways (closed, resized, encoding). None of them may end the run.
        if self._broken:
            return
        try:
            action()
        except Exception:
            self._broken = True
            _log.warning("display failed and was disabled; the run continues (fourfold watch shows it)", exc_info=True)

    def _start_live(self) -> None:
        self._live = Live(self._panel(), console=self._console, auto_refresh=False)
        self._live.start()

    def _check_contact(self) -> None:
        """Add a note when the coordinator is silent, because the other lines may be out of date."""
        silent = time.monotonic() - self._updated_at
        if self._updated_at and not self._silent_since and silent >= _SILENT_SECONDS and self._status.phase not in OVER:
            self._silent_since = self._updated_at
            self.note(
                f"the coordinator did not answer for {format_duration(silent)}: it hangs, ended, or is out of reach"
            )

    def _draw(self) -> None:
        self._check_contact()
        if self._live is not None:
            self._live.update(self._panel(), refresh=True)
            return
        for line in self._lines.new(self._status, self._services, self._notes, time.monotonic()):
            self._console.print(line, markup=False, soft_wrap=True)
        self._console.file.flush()

    def _panel(self) -> RenderableType:
        seconds = time.monotonic() - self._began
        if self._status.HasField("start_time"):  # `fourfold watch` may begin later than the run
            seconds = max(seconds, time.time() - self._status.start_time.ToNanoseconds() / 1e9)
        footer = f"{format_duration(seconds)} elapsed"
        if self._schedule is not None and (left := self._schedule.time_left(self._status)) is not None:
            footer += f", about {format_duration(left)} left"
        samples = 0 if self._schedule is None else self._schedule.samples_per_step
        rows = panel_rows(self._status, self._blocks, self._console.width, samples_per_step=samples)
        rows.append(("services", _services_text(self._services, self._status)))
        rows.append(("logs", str(self._run_dir / "logs")))
        return self._fitting(rows, self._messages(), title=Text(self._name + self._progress()), footer=footer)

    def _progress(self) -> str:
        """Return the text of the title after the name."""
        status = self._status
        if self._schedule is None:
            return ": evaluation"
        if status.phase == pb.RUN_PHASE_RECOVERING and status.step:
            return f": resuming at step {status.step} of {status.step_count}"
        return f": step {status.step} of {status.step_count}" if status.name else ""

    def _messages(self) -> list[Text]:
        """Return what is wrong now and what happened last, the most important first."""
        lines = [
            Text(f"! {each.subject}: {each.text} ({_age(each.since)})", style="bold red")
            for each in self._status.conditions
        ]
        if self._status.steps and (diagnosis := self._status.steps[-1].diagnosis):
            lines.append(Text(f"! step {self._status.steps[-1].step}: {diagnosis}", style="bold yellow"))
        lines += [Text(line, style="yellow") for line in _lag_changes(self._status)[-1:]]
        return lines + [Text(recovery_line(r), style="yellow") for r in self._status.recoveries[-_RECOVERIES:]]

    def _fitting(self, rows: list[tuple[str, str]], messages: list[Text], *, title: Text, footer: str) -> Panel:
        """Return the panel without the least important rows, notes and messages that do not fit on the terminal."""
        notes = [Text(note, style="yellow") for note in self._notes[-_NOTES:]]
        optional = list(_OPTIONAL)
        while True:
            panel = self._frame(rows, [*messages, *notes], title=title, footer=footer)
            # One line less than the terminal has, for the cursor.
            if len(self._console.render_lines(panel)) < self._console.height:
                return panel
            if optional and optional[0] == _NOTE and len(notes) > 1:
                notes = notes[1:]
            elif optional:
                dropped = optional.pop(0)
                rows = [row for row in rows if row[0] != dropped]
            elif notes or messages:
                notes, messages = ([], messages) if notes else (notes, messages[:-1])
            else:
                return panel

    def _frame(self, rows: list[tuple[str, str]], messages: list[Text], *, title: Text, footer: str) -> Panel:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column()
        for label, value in rows:
            grid.add_row(label, Text(value))  # a plain str would be read as markup
        parts: list[RenderableType] = [grid, *messages]
        if total := self._status.step_count if self._schedule is not None else self._status.answer_count:
            done = self._status.step if self._schedule is not None else self._status.answers_done
            bar = Table.grid(expand=True)  # a bar does not end its line
            bar.add_row(ProgressBar(total=total, completed=done))
            parts.insert(0, bar)
        return Panel(Group(*parts), title=title, subtitle=footer, title_align="left", subtitle_align="left")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The number of steps of a recipe, and the steps of its evaluations and checkpoints."""

    samples_per_step: int = 0  # 0: unknown
    evaluations: Sequence[int] = ()  # steps after which the run waits for an evaluation
    checkpoints: Sequence[int] = ()

    @classmethod
    def from_config(cls, config: Config) -> Schedule:
        plan = batch_plan(config)
        # In an asynchronous run the next steps go on beside an evaluation, except for the last one.
        beside = config.asynchrony.max_policy_lag and not config.checkpoint.keep_best
        return cls(
            samples_per_step=plan.samples_per_step,
            evaluations=plan.evaluations[-1:] if beside else plan.evaluations,
            checkpoints=plan.checkpoints,
        )

    def time_left(self, status: pb.RunStatus) -> float | None:
        """Estimate the seconds until the end from the last steps, and the evaluations and checkpoints still due.

        Returns None before the end of the first step.
        """
        rows = [record.metrics for record in status.steps[-_RECENT_STEPS:] if metrics.TIME_STEP in record.metrics]
        if not rows or status.step >= status.step_count:
            return None
        extra = (metrics.TIME_EVALUATE, metrics.TIME_CHECKPOINT)
        step = median(max(row[metrics.TIME_STEP] - sum(row.get(name, 0.0) for name in extra), 0.0) for row in rows)
        evaluation = _median(record.seconds for record in status.evals)
        checkpoint = _median(record.metrics.get(metrics.TIME_CHECKPOINT, 0.0) for record in status.steps)
        return (
            (status.step_count - status.step) * step
            + sum(due > status.step for due in self.evaluations) * evaluation
            + sum(due > status.step for due in self.checkpoints) * checkpoint
        )


def _median(values: Iterable[float]) -> float:
    """Return the median of the positive values; 0 without any."""
    positive = [value for value in values if value > 0]
    return median(positive) if positive else 0.0


def panel_rows(
    status: pb.RunStatus, blocks: str = _BLOCKS, width: int = 100, *, samples_per_step: int = 0
) -> list[tuple[str, str]]:
    """Return (label, text) of the rows of a panel of `width` characters; rows without data are left out."""
    phase = _phase_text(status)
    if status.waiting_for:
        since = f" ({_age(status.waiting_since)})" if status.HasField("waiting_since") else ""
        phase += f": {status.waiting_for}{since}"
    rows = [("now", phase)]
    if status.HasField("queue"):
        rows.append(("queue", _queue_text(status.queue)))
    if status.evals:
        shown = [status.evals[0], *status.evals[1:][-3:]]
        last = status.evals[-1]
        measure = last.measure or "score"
        texts = (_score(each, f"step {each.step}", measure=measure) for each in shown)
        rows.append((f"held-out {measure}", " -> ".join(texts)))
        if len(last.sets) > 1:
            sets = ", ".join(f"{each.name} {_score(each, measure=measure)}" for each in last.sets)
            rows.append(("held-out sets", sets))
    if status.steps:
        sparkline_width = min(_SPARKLINE_WIDTH, max(width - _LABEL_WIDTH - _VALUE_WIDTH, 0))
        rows += _step_rows(status, blocks, sparkline_width, samples_per_step)
    if status.failure:
        rows.append(("failure" if status.phase == pb.RUN_PHASE_FAILED else "why", status.failure))
    return rows


def _score(record: pb.EvalRecord | pb.EvalSetRecord, *notes: str, measure: str) -> str:
    return format_short_score(record.mean_score, record.answer_count, record.missing_count, *notes, measure=measure)


def _phase_text(status: pb.RunStatus) -> str:
    """Return the present phase, and what engines of an asynchronous run do beside it."""
    words = [_PHASES.get(status.phase, "starting")]
    if status.answer_count:
        words[0] += f": {status.answers_done} of {status.answer_count} answers"
    elif 0 < status.phase_progress < 1:
        words[0] += f" {status.phase_progress:.0%}"
    if status.HasField("queue") and status.phase == pb.RUN_PHASE_GENERATING:
        words.append("the trainer waits")
    elif status.queue.running_groups and status.phase in _TRAINER_PHASES:
        words.append("generating")
    if status.HasField("evaluation_progress"):
        words.append(f"evaluating {status.evaluation_progress:.0%}")
    return ", ".join(words)


def _queue_text(queue: pb.SampleQueue) -> str:
    lowered = f" (lowered from {queue.max_policy_lag})" if queue.lag_limit < queue.max_policy_lag else ""
    return f"{queue.running_groups} groups running, {queue.ready_groups} ready, lag limit {queue.lag_limit}{lowered}"


def _step_rows(status: pb.RunStatus, blocks: str, width: int, samples_per_step: int) -> list[tuple[str, str]]:
    """Return the rows of the last step, with the history of its main metrics in `width` characters."""
    last = status.steps[-1].metrics
    rows, divergences = [], (metrics.TEACHER_KL, metrics.REFERENCE_KL)
    for label, metric, form in (
        ("accuracy", metrics.SCORE_ACCURACY, "{:.1%}"),
        ("accuracy", metrics.PAIR_ACCURACY, "{:.1%}"),
        ("margin", metrics.PAIR_MARGIN, "{:.4f}"),
        ("accuracy", metrics.KTO_ACCURACY, "{:.1%}"),
        ("distance", metrics.KTO_DISTANCE, "{:.4f}"),
        ("reward", metrics.REWARD_MEAN, "{:.2f}") if metrics.REWARD_MEAN in last else ("loss", metrics.NLL, "{:.4f}"),
        ("length", metrics.RESPONSE_LENGTH, "{:.0f} tokens"),
        ("KL", next((name for name in divergences if name in last), metrics.APPROX_KL), "{:.4f}"),
        (
            "trained samples",
            metrics.TRAINED_SAMPLES,
            f"{{:.0f}} of {samples_per_step}" if samples_per_step else "{:.0f}",
        ),
        ("useful groups", metrics.USEFUL_GROUPS, "{:.0%}")
        if metrics.USEFUL_GROUPS in last
        else ("pass", metrics.DATA_PASS, "{:.2f}"),
        ("entropy", metrics.ENTROPY, "{:.2f}"),
        ("logprob mismatch", metrics.MISMATCH_MEAN, "{:.4f}"),
        ("effective tokens", metrics.EFFECTIVE_SAMPLE_SIZE, "{:.0%}"),
        ("tokens/s sampled", metrics.ROLLOUT_SPEED, "{:.0f}"),
        ("tokens/s trained", metrics.TRAIN_SPEED, "{:.0f}"),
        ("MFU", metrics.MFU, "{:.0%}"),
    ):
        history = [record.metrics[metric] for record in status.steps if metric in record.metrics]
        if metric in last:
            rows.append((label, f"{form.format(last[metric])}  {sparkline(history, blocks, width)}"))
    if metrics.ENGINE_SPEED_MIN in last:
        rows.append(("engines", _engine_speeds(last)))
    lag = last.get(metrics.POLICY_LAG_MAX)
    if status.HasField("queue"):
        rows += [*asynchrony_rows(last), ("weights", f"version {status.policy_version}")]
    elif lag is not None:
        rows.append(("lag", f"{lag:.0f} steps at most, weights version {status.policy_version}"))
    if metrics.TIME_STEP in last:
        rows.append(("last step", f"{last[metrics.TIME_STEP]:.1f} s: {phase_times(status.steps[-1])}"))
    return rows


def _engine_speeds(last: Mapping[str, float]) -> str:
    slowest, fastest = last[metrics.ENGINE_SPEED_MIN], last.get(metrics.ENGINE_SPEED_MAX, 0.0)
    text = f"{slowest:.0f} to {fastest:.0f} tokens/s each" if fastest > slowest else f"{slowest:.0f} tokens/s each"
    if metrics.KV_CACHE_USE in last:
        text += f", KV cache {last[metrics.KV_CACHE_USE]:.0%} full at most"
    return text


def _lag_changes(status: pb.RunStatus) -> list[str]:
    recent = [record for record in status.steps if record.step > status.step - _LAG_CHANGE_STEPS]
    return [f"step {record.step}: {record.lag_change}" for record in recent if record.lag_change]


def _services_text(states: Sequence[tuple[str, str]], status: pb.RunStatus) -> str:
    """Return the launcher's processes, then members that the user started, each with its state unless it is normal."""
    members = {member.member_id: member for member in status.members}
    words = [_process_text(name, state, members.pop(name, None), status) for name, state in states]
    return ", ".join([*words, *map(_member_text, members.values())]) or "none yet"


def _process_text(name: str, state: str, member: pb.Member | None, status: pb.RunStatus) -> str:
    if state != "ready":
        return f"{name} ({state})"
    if member is not None:
        return _member_text(member)
    # The coordinator is not a member of its own run, and so has no lease.
    running = status.phase not in (pb.RUN_PHASE_UNSPECIFIED, *OVER)
    return f"{name} (no lease)" if running and name != COORDINATOR else name


def _member_text(member: pb.Member) -> str:
    if member.state != pb.MEMBER_STATE_SILENT:
        return member.member_id
    return f"{member.member_id} (lease overdue for {_age(member.state_since)})"


def _age(since: Timestamp) -> str:
    return format_duration(max(time.time() - since.ToNanoseconds() / 1e9, 0.0))


def sparkline(values: Sequence[float], blocks: str = _BLOCKS, width: int = _SPARKLINE_WIDTH) -> str:
    """Draw the last `width` values, scaled from the lowest to the highest of all values."""
    shown = list(values)[-width:] if width else []
    if not shown:
        return ""
    low, high = min(values), max(values)
    if high <= low:
        return blocks[0] * len(shown)
    return "".join(blocks[min(int((v - low) / (high - low) * len(blocks)), len(blocks) - 1)] for v in shown)
