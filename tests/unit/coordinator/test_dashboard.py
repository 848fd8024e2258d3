"""The display of a run, drawn from snapshots."""

from __future__ import annotations

import io
import logging
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fourfold import config as configuration
from fourfold.coordinator.v1 import run_service_pb2 as pb
from fourfold.metrics import METRICS
from fourfold.rpc.responses import clean_strings
from fourfold.text import format_duration
from fourfold_coordinator.cli import event_lines
from fourfold_coordinator.cli.dashboard import Dashboard, Schedule, panel_rows, sparkline

SCHEDULE = ["steps=24", "evaluation.every_steps=10", "checkpoint.every_steps=12"]
CONFIG = configuration.load("recipes/quickstart.toml", SCHEDULE)


def snapshot(steps: int) -> pb.RunStatus:
    status = pb.RunStatus(
        name="demo", phase=pb.RUN_PHASE_TRAINING, step=steps, step_count=24, policy_version=steps, phase_progress=0.5
    )
    for step in range(1, steps + 1):
        metrics = {
            "reward/mean": step / 10,
            "groups/useful": 0.75,
            "mismatch/logprob_diff_mean": 0.0042,
            "train/policy_lag_max": 0.0,
            "time/step": 9.8,
            "time/generate": 3.1,
            "time/reward": 0.01,
            "time/train": 5.4,
        }
        status.steps.append(pb.StepRecord(step=step, metrics=metrics))
    status.evals.append(pb.EvalRecord(step=0, mean_score=0.11, half_width=0.14, answer_count=160))
    if steps >= 8:
        status.evals.append(pb.EvalRecord(step=8, mean_score=0.45, half_width=0.13, answer_count=160))
    status.members.append(pb.Member(member_id="reward-7", role="reward", target="127.0.0.1:1"))
    return status


def dashboard(output: io.StringIO, *, live: bool, width: int = 100, height: int = 60) -> Dashboard:
    console = _console(output, live=live, width=width, height=height)
    return Dashboard(name="demo", run_dir=Path("runs/demo"), schedule=Schedule(), console=console, live=live)


def _console(output: io.StringIO, *, live: bool = True, width: int = 100, height: int = 60) -> Console:
    return Console(file=output, width=width, height=height, force_terminal=live, color_system=None, highlight=False)


def test_held_out_rows_have_a_loss() -> None:
    record = pb.EvalRecord(step=4, mean_score=-1.5, low=-2, high=-1.25, answer_count=8, measure="loss")
    status = pb.RunStatus(evals=[record], phase=pb.RUN_PHASE_DONE)
    assert ("held-out loss", "1.50 (step 4)") in panel_rows(status)
    assert [line for _, line in event_lines._records(status, ())] == [
        "step 4: held-out loss 1.50 [1.25, 2.00] (8 answers)"
    ]


def test_without_a_terminal_each_event_is_one_plain_line_told_once() -> None:
    output = io.StringIO()
    with dashboard(output, live=False) as display:
        display.refresh()
        display.set_services([("coordinator-0", "ready"), ("rollout-0", "starting")])
        display.refresh()
        display.update(snapshot(1))
        display.refresh()
        display.note("12:00:00 rollout-0 died (killed by SIGKILL); restarting it")
        second = snapshot(2)
        second.steps[-1].alarms.extend(["82% of the completions were cut off", "large update"])
        display.update(second)
        display.refresh()
        display.refresh()
    assert output.getvalue().splitlines() == [
        "coordinator-0 is ready (0 s)",
        "step 0: held-out score 0.11 +- 0.14 (160 answers)",
        "step 1/24  reward 0.10  useful groups 75%  logprob mismatch 0.0042  lag 0  9.8 s (generate 3.1, train 5.4)",
        "12:00:00 rollout-0 died (killed by SIGKILL); restarting it",
        "step 2/24  reward 0.20  useful groups 75%  logprob mismatch 0.0042  lag 0  9.8 s (generate 3.1, train 5.4)",
        "  ! 82% of the completions were cut off",
        "  ! large update",
    ]


def test_several_held_out_sets_are_told_one_by_one() -> None:
    output, status = io.StringIO(), snapshot(0)
    status.evals[0].sets.add(name="math", mean_score=0.2, half_width=0.1, low=0.1, high=0.3, answer_count=80)
    status.evals[0].sets.add(name="code", mean_score=0.02, half_width=math.nan, answer_count=80)
    with dashboard(output, live=False) as display:
        display.update(status)
        display.refresh()
    # An earlier coordinator sends no bounds.
    sets = "math 0.20 [0.10, 0.30] (80 answers), code 0.02 (80 answers)"
    line = f"step 0: held-out score 0.11 +- 0.14 (160 answers): {sets}"
    assert line in output.getvalue().splitlines()
    assert ("held-out sets", "math 0.20, code 0.02") in panel_rows(status)


def test_evaluation_after_a_step_comes_after_it() -> None:
    output = io.StringIO()
    early = snapshot(9)
    del early.steps[7:]  # the record of step 8 is not there yet, its evaluation is
    with dashboard(output, live=False) as display:
        display.update(early)
        display.refresh()
        display.update(snapshot(9))
    lines = output.getvalue().splitlines()
    assert lines.index("step 8: held-out score 0.45 +- 0.13 (160 answers)") == 1 + next(
        i for i, line in enumerate(lines) if line.startswith("step 8/24")
    )


def test_live_panel_shows_what_matters() -> None:
    output = io.StringIO()
    with dashboard(output, live=True) as display:
        display.set_services([("coordinator-0", "ready"), ("rollout-0", "starting")])
        status = snapshot(8)
        status.steps[2].diagnosis = "an alarm that is over"
        status.steps[-1].diagnosis = "the entropy collapses"
        status.steps[-1].metrics.update({"policy/entropy": 1.25, "mismatch/ess": 0.97, "train/mfu": 0.31})
        display.update(status)
        display.note("something happened")
        display.refresh()
    text = output.getvalue().replace("\u2502", "|")
    status.steps[-1].metrics["train/samples_per_step"] = 16.0
    assert dict(panel_rows(status, samples_per_step=96))["trained samples"].startswith("16 of 96  ")
    for words in (
        "demo: step 8 of 24",
        "\n| now               training 50%",
        "0.11 (step 0) -> 0.45 (step 8)",
        "0.80  \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588",
        "75%",
        "0.0042",
        "0 steps at most, weights version 8",
        "9.8 s: generate 3.1, train 5.4",
        "coordinator-0, rollout-0 (starting), reward-7",
        "! step 8: the entropy collapses",
        "1.25",
        "97%",
        "31%",
        "something happened",
        "runs/demo/logs",
    ):
        assert words in text, words
    assert "an alarm that is over" not in text


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 20), (100, 60), (40, 12)])
def test_nothing_is_cut_off_on_a_small_terminal(width: int, height: int) -> None:
    output = io.StringIO()
    display = dashboard(output, live=True, width=width, height=height)
    status = snapshot(30)
    for record in status.steps:
        record.metrics.update(dict.fromkeys(METRICS, 0.5))
    status.steps[-1].diagnosis = "the entropy fell from 1 to 0.1 nats in 10 steps, so the policy stops exploring"
    status.queue.CopyFrom(pb.SampleQueue(max_policy_lag=4, lag_limit=4, running_groups=9, ready_groups=3))
    status.members.extend(pb.Member(member_id=f"rollout-{n}", role="rollout", target="127.0.0.1:1") for n in range(8))
    status.conditions.append(pb.Condition(subject="rollout-3", text="its engine answers no calls"))
    for note in range(5):
        display.note(f"12:00:0{note} rollout-{note} died (killed by SIGKILL); restarting it")
    display.update(status)
    console = display._console
    lines = [line.rstrip("\n") for line in "".join(s.text for s in console.render(display._panel())).splitlines()]
    assert len(lines) < height
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "\u2026" not in text
    for label in ("now", "reward", "held-out score"):
        assert f" {label} " in text
    assert "! rollout-3" in text
    if height >= 20:
        assert "! step 30: the entropy fell" in text
        for label in ("length", "KL"):
            assert f" {label} " in text, label


def test_display_that_breaks_is_switched_off_and_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("the terminal is gone")

    with caplog.at_level(logging.WARNING), dashboard(Broken(), live=False) as display:
        display.note("hello")
        display.refresh()
        display.note("again")
        display.refresh()
    assert [record.message for record in caplog.records] == [
        "display failed and was disabled; the run continues (fourfold watch shows it)"
    ]


def test_time_left_counts_steps_evaluations_and_checkpoints_that_are_due() -> None:
    schedule = Schedule(evaluations=(0, 10, 20, 24), checkpoints=(12, 24))
    status = snapshot(0)
    status.evals[0].seconds = 30.0
    assert schedule.time_left(status) is None, "the start is no step"
    status = snapshot(3)
    status.evals[0].seconds = 30.0
    status.steps[0].metrics["time/step"] = 100.0  # the first step compiles
    assert schedule.time_left(status) == pytest.approx(21 * 9.8 + 3 * 30)
    status = snapshot(12)
    status.evals[0].seconds = 30.0
    status.steps[-1].metrics.update({"time/step": 19.8, "time/evaluate": 8.0, "time/checkpoint": 2.0})
    assert schedule.time_left(status) == pytest.approx(12 * 9.8 + 2 * 30 + 2)
    assert schedule.time_left(snapshot(24)) is None


def test_an_asynchronous_run_waits_for_its_last_evaluation_alone() -> None:
    assert Schedule.from_config(CONFIG).evaluations == (0, 10, 20, 24)
    beside = configuration.load("recipes/quickstart.toml", [*SCHEDULE, "asynchrony.max_policy_lag=2"])
    assert Schedule.from_config(beside).evaluations == (24,)


def test_a_run_that_restores_a_checkpoint_names_its_step() -> None:
    output, status = io.StringIO(), snapshot(3)
    status.phase = pb.RUN_PHASE_RECOVERING
    with dashboard(output, live=True) as display:
        display.update(status)
    assert "demo: resuming at step 3 of 24" in output.getvalue()


def test_an_evaluation_without_a_trainer_shows_its_answers_and_no_steps() -> None:
    output = io.StringIO()
    display = Dashboard(name="demo", run_dir=Path("runs/demo"), schedule=None, console=_console(output), live=True)
    status = pb.RunStatus(name="demo", step_count=5, phase=pb.RUN_PHASE_EVALUATING, answers_done=40, answer_count=120)
    with display:
        display.update(status)
    text = output.getvalue()
    assert "demo: evaluation" in text and "evaluating: 40 of 120 answers" in text and "step 0" not in text


def test_a_run_that_was_stopped_did_not_fail() -> None:
    status = pb.RunStatus(phase=pb.RUN_PHASE_STOPPED, failure="stopped by SIGINT (Ctrl-C) after step 3")
    assert panel_rows(status) == [("now", "stopped"), ("why", "stopped by SIGINT (Ctrl-C) after step 3")]


@pytest.mark.parametrize(
    ("values", "drawn"),
    [([], ""), ([1.0, 1.0], "\u2581\u2581"), ([0.0, 0.5, 1.0], "\u2581\u2585\u2588"), ([0.0] * 40 + [1.0], None)],
)
def test_sparkline_spans_what_was_seen(values: list[float], drawn: Any) -> None:
    line = sparkline(values)
    assert line == drawn if drawn is not None else (len(line) == 32 and line[-1] == "\u2588")


def test_clock_reads_like_a_clock() -> None:
    texts = [format_duration(seconds) for seconds in (0.4, 59.4, 61, 3599, 3720)]
    assert texts == ["0 s", "59 s", "1:01 min", "59:59 min", "1:02 h"]


def test_engines_say_how_fast_and_how_full_they_are() -> None:
    status = snapshot(1)
    assert "engines" not in dict(panel_rows(status)), "services that do not tell"
    status.steps[-1].metrics["rollout/engine_tokens_per_second_min"] = 812.4
    status.steps[-1].metrics["rollout/engine_tokens_per_second_max"] = 812.4
    assert dict(panel_rows(status))["engines"] == "812 tokens/s each"
    status.steps[-1].metrics["rollout/engine_tokens_per_second_max"] = 2400.0
    status.steps[-1].metrics["rollout/kv_cache_use_max"] = 0.354
    assert dict(panel_rows(status))["engines"] == "812 to 2400 tokens/s each, KV cache 35% full at most"


def overlapping(steps: int, **queue: int) -> pb.RunStatus:
    """Return the status of a run with a policy lag."""
    status = snapshot(steps)
    status.queue.CopyFrom(pb.SampleQueue(max_policy_lag=4, **{"lag_limit": 4, **queue}))
    for record in status.steps:
        record.metrics.update(
            {
                "async/token_lag_mean": 1.26,
                "async/token_lag_max": 3.0,
                "async/lag_limit": 4.0,
                "async/trainer_wait_fraction": 0.12,
                "async/rollout_wait_fraction": 0.034,
                "async/stale_token_fraction": 0.0,
            }
        )
    return status


def test_a_run_with_a_lag_shows_queue_lag_and_waits() -> None:
    status = overlapping(2, lag_limit=3, running_groups=24, ready_groups=12)
    rows = dict(panel_rows(status))
    assert rows["now"] == "training 50%, generating"
    assert rows["queue"] == "24 groups running, 12 ready, lag limit 3 (lowered from 4)"
    assert (rows["lag"], rows["trainer waits"]) == ("1.3 (at most 3, limit 4)", "12%, engines have room 3%")
    assert rows["weights"] == "version 2" and "stale" not in rows
    status.steps[-1].metrics["async/stale_token_fraction"] = 0.004
    assert dict(panel_rows(status))["stale"] == "0.4%"


@pytest.mark.parametrize(
    ("phase", "running", "words"),
    [
        (pb.RUN_PHASE_GENERATING, 24, "generating 50%, the trainer waits"),
        (pb.RUN_PHASE_PUBLISHING, 24, "updating the engines 50%, generating"),
        (pb.RUN_PHASE_TRAINING, 0, "training 50%"),
        (pb.RUN_PHASE_RECOVERING, 24, "restoring a checkpoint 50%"),
        (pb.RUN_PHASE_DONE, 24, "done 50%"),
    ],
)
def test_phases_that_overlap_are_both_shown(phase: pb.RunPhase.ValueType, running: int, words: str) -> None:
    status = overlapping(1, running_groups=running)
    status.phase = phase
    assert dict(panel_rows(status))["now"] == words
    status.evaluation_progress = 0.4
    assert dict(panel_rows(status))["now"] == words + ", evaluating 40%"
    status.ClearField("queue")
    status.ClearField("evaluation_progress")
    assert dict(panel_rows(status))["now"] == words.split(",")[0]


@pytest.mark.parametrize("live", [True, False])
def test_a_change_of_the_lag_limit_is_told_with_its_reason(live: bool) -> None:
    output, status = io.StringIO(), overlapping(3)
    status.steps[1].lag_change = "policy lag limit 4 -> 3: mean |old - behavior| is too high"
    with dashboard(output, live=live) as display:
        display.update(status)
    lines = output.getvalue().splitlines()
    if live:
        assert "step 2: policy lag limit 4 -> 3: mean |old - behavior| is too high" in output.getvalue()
        return
    assert lines[2] == (
        "step 2/24  reward 0.20  useful groups 75%  logprob mismatch 0.0042  lag 1.3 (at most 3, limit 4)  "
        "trainer waits 12%, engines have room 3%  9.8 s (generate 3.1, train 5.4)"
    )
    assert lines[3] == "  policy lag limit 4 -> 3: mean |old - behavior| is too high"
    assert lines[4].startswith("step 3/24")


def test_lease_wait_condition_and_return_are_on_the_panel_with_their_times() -> None:
    output, now = io.StringIO(), time.time()
    status = snapshot(8)
    status.waiting_for = "a rollout service (none has registered)"
    status.waiting_since.FromSeconds(int(now) - 90)
    silent = status.members.add(member_id="trainer-0", role="trainer", state=pb.MEMBER_STATE_SILENT)
    silent.state_since.FromSeconds(int(now) - 70)
    status.members.add(member_id="reward-0", role="reward", state=pb.MEMBER_STATE_LIVE)
    condition = status.conditions.add(subject="disk", text="runs/demo cannot be written")
    condition.since.FromSeconds(int(now) - 130)
    status.recoveries.add(step=6, reason="trainer-0 at x:1 is a new process")
    with dashboard(output, live=True) as display:
        names = ("coordinator-0", "rollout-0", "trainer-0", "reward-0")
        display.set_services([(name, "ready") for name in names])
        display.update(status)
    text = " ".join(output.getvalue().replace("\u2502", "").split())
    for words in (
        r"training 50%: a rollout service \(none has registered\) \(1:3\d min\)",
        r"coordinator-0, rollout-0 \(no lease\), trainer-0 \(lease overdue for 1:1\d min\), reward-0, reward-7",
        r"! disk: runs/demo cannot be written \(2:1\d min\)",
        r"restored the checkpoint of step 6: trainer-0 at x:1 is a new process",
    ):
        assert re.search(words, text), words


def test_a_coordinator_that_hangs_is_told_once_and_so_is_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run stood for as long as the coordinator was stopped, without a line."""
    seconds, output = 1000.0, io.StringIO()
    monkeypatch.setattr(time, "monotonic", lambda: seconds)
    display = dashboard(output, live=False)
    display.refresh()
    seconds += 30  # it starts
    display.refresh()
    display.update(snapshot(1))
    for _ in range(3):
        seconds += 7
        display.refresh()
    display.update(snapshot(1))
    display.refresh()
    assert [line for line in output.getvalue().splitlines() if "coordinator" in line] == [
        "the coordinator did not answer for 14 s: it hangs, ended, or is out of reach",
        "the coordinator answered again after 21 s",
    ]


@pytest.mark.parametrize("live", [True, False])
def test_text_of_other_processes_is_drawn_as_text(live: bool) -> None:
    evil = "[bold red]x[/bold red] [/] \x1b[2J\r\nsecond line"
    status = snapshot(1)
    status.name = status.waiting_for = status.failure = evil
    status.members.add(member_id=evil, state=pb.MEMBER_STATE_SILENT)
    status.conditions.add(subject=evil, text=evil)
    status.recoveries.add(step=1, reason=evil)
    status.steps[0].alarms.append(evil)
    clean_strings(status)  # as the client does with every response
    output = io.StringIO()
    console = Console(file=output, width=400, force_terminal=live, color_system=None, highlight=False)
    with Dashboard(
        name="[b]demo[/b]", run_dir=Path("runs/[b]"), schedule=Schedule(), console=console, live=live
    ) as display:
        display.refresh()
        display.update(status)
        display.refresh()
    text = output.getvalue()
    assert "\x1b[2J" not in text and "\r\n" not in text
    # Markup would be taken out, or raise and switch the display off.
    assert "[bold red]x[/bold red] [/]   second line" in text
    assert not live or ("[b]demo[/b]" in text and "runs/[b]/logs" in text)
