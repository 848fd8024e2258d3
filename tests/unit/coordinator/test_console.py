"""The terminal of a coordinator that was started by hand has the lines of `fourfold run`."""

from __future__ import annotations

import asyncio
import io
import logging

import pytest

from fourfold.coordinator.v1 import run_service_pb2 as pb
from fourfold_coordinator.cli.console import RunConsole
from fourfold_coordinator.state.eval_results import EvalRow
from fourfold_coordinator.state.run_board import RunBoard
from tests.fakes.clock import FakeClock


class Terminal:
    """A console, and half-seconds of its clock."""

    def __init__(self) -> None:
        self.clock, self.out = FakeClock(), io.StringIO()
        self.board = RunBoard(name="demo", step_count=2, clock=self.clock)
        self.task = asyncio.create_task(RunConsole(self.board, out=self.out, clock=self.clock).run())

    async def lines(self, seconds: float = 0.5) -> list[str]:
        """Return the lines of so many seconds."""
        start = len(self.out.getvalue())
        for _ in range(round(seconds / 0.5)):
            await self.clock.advance(0.5)
        return self.out.getvalue()[start:].splitlines()


async def test_waits_services_steps_and_scores_are_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fourfold.coordinator")
    terminal = Terminal()
    board = terminal.board
    board.set_waiting_for("rollout 0 of 1 (none has registered), trainer 0 of 1 (none has registered)")
    waits = await terminal.lines(36.0)
    assert waits == [
        "waiting for rollout 0 of 1 (none has registered), trainer 0 of 1 (none has registered)",
        "still waiting for rollout 0 of 1 (none has registered), trainer 0 of 1 (none has registered), for 33 s",
    ]
    board.set_members([pb.Member(member_id="trainer-0", role="trainer", state=pb.MEMBER_STATE_LIVE)])
    assert await terminal.lines() == ["trainer-0 is ready (36 s)"]
    board.set_waiting_for("")
    assert await terminal.lines(2.0) == ["waited 37 s for rollout, trainer"]
    assert [record.getMessage() for record in caplog.records] == [*waits, "waited 37 s for rollout, trainer"]
    board.add_eval(EvalRow(0, 0.25, None, 8, 0, []))
    board.add_step(1, {"reward/mean": 0.5})
    held_out, step = await terminal.lines()
    assert held_out.startswith("step 0: held-out score 0.25") and step.startswith("step 1/2")
    board.add_eval(EvalRow(2, 0.75, None, 8, 0, []))
    board.add_step(2, {"alarms": ["all \x1b[31m equal"]})
    terminal.task.cancel()
    await asyncio.gather(terminal.task, return_exceptions=True)
    end = terminal.out.getvalue().splitlines()[-3:]
    assert end[0].startswith("step 2/2") and end[2].startswith("step 2: held-out score 0.75"), "the last lines, too"
    assert end[1].startswith("  ! all ") and "\x1b" not in end[1]


async def test_without_a_terminal_the_log_has_the_waits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fourfold.coordinator")
    clock = FakeClock()
    board = RunBoard(name="demo", step_count=2, clock=clock)
    console = RunConsole(board, clock=clock)
    board.add_step(1, {})
    board.set_waiting_for("a reward service")
    for _ in range(4):
        console.show()
        await clock.advance(1.0)
    assert [record.getMessage() for record in caplog.records] == ["waiting for a reward service"]


async def test_a_coordinator_that_took_over_does_not_repeat_the_steps_before() -> None:
    terminal = Terminal()
    terminal.board.add_recovery(2, "coordinator-0 was stopped", trainer_kept=True)
    terminal.board.set_history([(1, {}), (2, {})], [])
    assert await terminal.lines() == ["continued after step 2 with the trainer's weights: coordinator-0 was stopped"]
    terminal.board.add_step(3, {})
    assert await terminal.lines() == ["step 3/2"]
    terminal.task.cancel()


async def test_a_terminal_that_is_gone_does_not_end_the_display() -> None:
    terminal = Terminal()
    terminal.out.close()
    terminal.board.add_step(1, {})
    for _ in range(3):
        await terminal.clock.advance(0.5)
    assert not terminal.task.done()
    terminal.task.cancel()
