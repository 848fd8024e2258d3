"""`fourfold agents`: its table, what `drop` chooses, and errors; against a real coordinator's service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fourfold.cli import main as cli_main
from fourfold.config import AgentsConfig, dump
from fourfold.coordinator.v1 import experience_service_pb2 as pb
from fourfold.coordinator.v1.experience_service_pb2_grpc import add_ExperienceServiceServicer_to_server
from fourfold.rpc.server import Server
from fourfold_coordinator.data.prompts import own_prompt
from fourfold_coordinator.launch.run_names import ADDRESS_FILE, CONFIG_FILE
from fourfold_coordinator.state.faults import FaultLog
from fourfold_coordinator.tasks.servicer import ExperienceServicer, TaskSource
from fourfold_coordinator.tasks.task_queue import AgentSession, AttemptState, TaskGroup, TaskQueue
from tests.fakes.toy import make_config


class Run:
    """A coordinator's service with three tasks, of which agents have two."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run"
        self.folder.mkdir()
        config = make_config(folder, agents={"source": "tasks"})
        (self.folder / CONFIG_FILE).write_text(dump(config))
        self.queue = TaskQueue(AgentsConfig(source="tasks"), max_releases=5)
        prompt = own_prompt("3 * 4", answer="12", metadata_json="")
        self.group = TaskGroup(group_id="g", prompt=prompt, task_ids=["g-0", "g-1", "g-2"], seed=3)
        self.servicer = ExperienceServicer()
        self.source = TaskSource(
            config=config,
            run_id="0" * 32,
            queue=self.queue,
            experiences=None,  # type: ignore[arg-type]
            faults=FaultLog(),
            vocabulary_size=lambda: 258,
            newest_version=lambda: 3,
        )

    async def start(self) -> None:
        self.server = Server(listen="127.0.0.1:0", security=None)
        service = pb.DESCRIPTOR.services_by_name["ExperienceService"]
        self.server.add(service, add_ExperienceServiceServicer_to_server, self.servicer)
        self.address = await self.server.start()
        (self.folder / ADDRESS_FILE).write_text(self.address + "\n")
        self.work = asyncio.create_task(self.queue.collect(self.group))
        await asyncio.sleep(0)
        (first, _) = await self.queue.lease("gateway-0", 2, wait=0)
        now = asyncio.get_running_loop().time()
        session = AgentSession(session_id="s-0", turn_count=2, idle_since=now - 95, expires_at=now + 480)
        assert self.queue.renew(["g-0"], [first.lease], [session]) == []

    @property
    def states(self) -> list[AttemptState]:
        return [attempt.state for attempt in self.group.attempts]


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    run = Run(tmp_path)
    await run.start()
    yield run
    run.work.cancel()
    await run.server.stop(0)


async def agents(*words: object) -> int:
    return await asyncio.to_thread(cli_main.main, ["agents", *map(str, words)])


LEASED, WAITING = AttemptState.LEASED, AttemptState.WAITING


async def test_sessions_are_listed_and_their_tasks_go_to_other_agents(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await agents("list", run.address) == 1
    assert "the coordinator reads its data; try again" in capsys.readouterr().err
    run.servicer.open(run.source)
    assert await agents("list", run.folder) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["task", "session", "gateway", "turns", "idle", "expires", "in", "leased", "for"]
    assert first.split() == ["g-0", "s-0", "gateway-0", "2", "1:35", "min", "8:00", "min", "0", "s"]
    assert second.split() == ["g-1", "-", "gateway-0", "-", "-", "2:00", "min", "0", "s"]
    assert await agents("drop", run.address, "--idle", 600) == 0
    assert capsys.readouterr().out == "no session is idle for 600 s\n" and run.states == [LEASED, LEASED, WAITING]
    assert await agents("drop", run.address, "--idle", 60) == 0
    assert capsys.readouterr().out == "g-0: other agents get it\n" and run.states == [WAITING, LEASED, WAITING]
    assert await agents("drop", run.folder, "g-1", "g-1") == 0 and run.states == [WAITING] * 3
    assert await agents("list", run.folder) == 0
    assert "no agent has a task of this run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["drop", "RUN"], "drop needs the ids of sessions or tasks, or --idle SECONDS, and not both"),
        (["drop", "RUN", "x", "--idle", "5"], "and not both"),
        (["drop", "RUN", "unknown"], "'unknown': no agent has a session or task with this id"),
        (["list", "nowhere"], "nowhere: neither a folder of runs/ nor HOST:PORT of a coordinator"),
        (["list", "127.0.0.1:1"], "nothing listens there"),
    ],
)
async def test_wrong_arguments_are_one_line(
    run: Run, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run.servicer.open(run.source)
    assert await agents(*(str(run.folder) if word == "RUN" else word for word in words)) == 1
    errors = capsys.readouterr().err
    assert text in errors and "Traceback" not in errors


async def test_a_run_that_does_not_run_says_so(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    await run.server.stop(0)
    assert await agents("list", run.folder) == 1
    assert f"{run.folder} does not run, and no agent has a session of it; start it again with:" in (
        capsys.readouterr().err
    )
