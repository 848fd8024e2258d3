"""What a run waits for: each wait of the coordinator is told after 10 s, with its start and with what ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fourfold.config import AgentsConfig
from fourfold.coordinator.v1 import run_service_pb2 as pb
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold_coordinator.cli.event_lines import EventLines
from fourfold_coordinator.data.prompts import own_prompt
from fourfold_coordinator.state.run_board import RunBoard
from fourfold_coordinator.tasks.task_queue import TaskGroup, TaskQueue
from fourfold_coordinator.training.standstill import StandstillMonitor
from tests.fakes.clock import FakeClock


def member(name: str, role: int, **fields: Any) -> SimpleNamespace:
    values = {"pending_call": "", "calls_since": None, "outstanding": 0, "moved_at": 0.0, **fields}
    return SimpleNamespace(member=SimpleNamespace(member_id=name, role=role), **values)


class Scene:
    """A run whose parts are set by hand."""

    def __init__(self, phase: pb.RunPhase.ValueType = pb.RUN_PHASE_GENERATING) -> None:
        self.clock = FakeClock()
        self.board = RunBoard(name="demo", step_count=9, clock=self.clock)
        self.members: list[SimpleNamespace] = []
        self.disk = SimpleNamespace(pending_since=None)
        self.update = ""
        self.tasks = TaskQueue(AgentsConfig(source="tasks", lease_seconds=60), clock=self.clock)
        self.lines = EventLines(self.clock.monotonic(), epoch_seconds=self.clock.now)
        self.monitor = StandstillMonitor(
            cast(Any, SimpleNamespace(trainer=SimpleNamespace(step_timeout_seconds=3600.0))),
            self.board,
            cast(Any, SimpleNamespace(replicas=self.replicas, explain=lambda _role: "none")),
            tasks=self.tasks,
            weights=cast(Any, SimpleNamespace(describe=lambda: self.update)),
            disk=cast(Any, self.disk),
            clock=self.clock,
        )
        self.board.set_phase(phase)

    def replicas(self, role: int | None = None) -> list[SimpleNamespace]:
        return [each for each in self.members if role in (None, each.member.role)]

    async def advance(self, seconds: int) -> list[str]:
        """Return the console's lines of so many seconds."""
        found: list[str] = []
        for _ in range(seconds):
            await self.clock.advance(1.0)
            self.monitor.tick()
            found += self.lines.new(self.board.status, (), (), self.clock.monotonic())
        return found

    @property
    def waits(self) -> str:
        return self.board.status.waiting_for


def trainer(scene: Scene, call: str = "TrainStep") -> None:
    scene.members.append(member("trainer-0", Role.ROLE_TRAINER, pending_call=call))


def services(scene: Scene) -> None:
    began = scene.clock.monotonic()
    scene.members += [
        member("reward-0", Role.ROLE_REWARD, calls_since=began, outstanding=3),
        member("rollout-0", Role.ROLE_ROLLOUT, calls_since=began - 20, outstanding=4),
    ]


def disk(scene: Scene) -> None:
    scene.disk.pending_since = scene.clock.monotonic()


def update(scene: Scene) -> None:
    scene.update = "weights of version 3: transfer for 12 s (rollout-0)"


def tasks(scene: Scene) -> None:
    prompt = own_prompt("3 * 4", answer="12", metadata_json="")
    scene.work = asyncio.create_task(  # type: ignore[attr-defined]
        scene.tasks.collect(TaskGroup(group_id="g", prompt=prompt, task_ids=["g-0"], seed=3))
    )


@pytest.mark.parametrize(
    ("phase", "begin", "cause"),
    [
        (pb.RUN_PHASE_RECOVERING, lambda scene: trainer(scene, "GetStatus"), "trainer-0 (GetStatus)"),
        (
            pb.RUN_PHASE_GENERATING,
            services,
            "rollout-0 (4 samples, the first for 30 s, ended after 5:00 min without a token), "
            "reward-0 (3 samples, the first for 10 s)",
        ),
        (pb.RUN_PHASE_EVALUATING, tasks, "agents (1 task for which no agent asks; environments: none)"),
        (pb.RUN_PHASE_PUBLISHING, update, "weights of version 3: transfer for 12 s (rollout-0)"),
        (pb.RUN_PHASE_SAVING, disk, "the disk (it has not ended a write for 10 s)"),
        (pb.RUN_PHASE_WAITING_FOR_SERVICES, lambda _: None, "the coordinator (reads the data of the run)"),
        (pb.RUN_PHASE_RECOVERING, lambda _: None, "the coordinator (reads the samples of the run)"),
        (
            pb.RUN_PHASE_PUBLISHING,
            lambda _: None,
            "the coordinator (has no call in flight; its log says what it did last)",
        ),
    ],
)
async def test_each_wait_is_told_after_ten_seconds(
    phase: pb.RunPhase.ValueType, begin: Callable[[Scene], None], cause: str
) -> None:
    """A run stood for minutes without a line."""
    scene = Scene(phase)
    scene.monitor.tick()
    begin(scene)
    assert await scene.advance(9) == []
    assert await scene.advance(1) == [f"waiting for {cause}, for 10 s"]
    assert scene.waits == cause
    assert scene.board.status.waiting_since.seconds == scene.clock.now() - 10


async def test_a_first_step_of_a_quarter_of_a_minute_is_no_wait_and_a_trainer_that_hangs_is_named() -> None:
    """The quickstart's steps of 14 s on a CPU were waits."""
    scene = Scene(pb.RUN_PHASE_TRAINING)
    trainer(scene)
    scene.monitor.tick()
    assert await scene.advance(17) == []
    cause = "trainer-0 (TrainStep, which has no usual time yet, at most 1:00 h: trainer.step_timeout_seconds)"
    assert await scene.advance(1) == [f"waiting for {cause}, for 18 s"]


async def test_the_coordinator_is_not_named_for_the_time_of_a_call_that_has_ended() -> None:
    """After a checkpoint of 14 s, the coordinator that wrote its report was waited for since 16 s."""
    scene = Scene(pb.RUN_PHASE_SAVING)
    trainer(scene, "SaveCheckpoint")
    scene.monitor.tick()
    assert await scene.advance(17) == []
    scene.members[0].pending_call, scene.members[0].moved_at = "", scene.clock.monotonic()
    assert await scene.advance(9) == []
    assert await scene.advance(1) == []
    assert await scene.advance(1) == ["waiting for the coordinator (writes the report of the run), for 10 s"]


async def moves(scene: Scene, change: Callable[[], None]) -> None:
    """Check that a change ends the wait."""
    await scene.advance(10)
    assert scene.waits
    change()
    await scene.advance(1)
    assert not scene.waits and not scene.board.status.HasField("waiting_since")


async def test_a_wait_ends_with_a_sample_a_turn_a_group_or_a_step() -> None:
    scene = Scene()
    services(scene)
    scene.monitor.tick()

    def answer() -> None:
        scene.members[0].moved_at = scene.clock.monotonic()

    def turn() -> None:
        scene.tasks.moved_at = scene.clock.monotonic()

    def step() -> None:
        scene.board.set_step(step=1, policy_version=1)

    for change in (answer, turn, step):
        await moves(scene, change)
    await moves(scene, lambda: scene.board.set_progress(0.5))


async def test_samples_of_the_next_step_do_not_hide_that_the_trainer_hangs() -> None:
    scene = Scene(pb.RUN_PHASE_TRAINING)
    trainer(scene)
    services(scene)
    scene.monitor.tick()
    for _ in range(60):
        scene.members[1].moved_at = scene.clock.monotonic()
        await scene.advance(1)
    assert scene.waits.startswith("trainer-0 (TrainStep")


def phases(*seconds: int) -> Sequence[tuple[pb.RunPhase.ValueType, int]]:
    return [step for each in seconds for step in ((pb.RUN_PHASE_TRAINING, each), (pb.RUN_PHASE_GENERATING, 2))]


async def test_a_phase_that_takes_long_in_every_step_is_told_when_it_takes_longer() -> None:
    scene = Scene()
    trainer(scene)
    told = []
    for phase, seconds in phases(30, 90, 80, 89, 110):
        scene.board.set_phase(phase)
        told.append(sum("waiting for" in line for line in await scene.advance(seconds)))
    assert told[::2] == [1, 3, 3, 0, 1] and not any(told[1::2]), "from the fourth on it is known what is usual"


async def test_a_wait_for_a_missing_service_says_more_than_a_standstill() -> None:
    scene = Scene()
    services(scene)
    scene.board.set_waiting_for("a reward service (none has registered)")
    await scene.advance(15)
    assert scene.waits == "a reward service (none has registered)"
    scene.board.set_waiting_for("")
    await scene.advance(9)
    assert not scene.waits, "the run has moved"
    await scene.advance(2)
    assert scene.waits.startswith("rollout-0")
