"""A run without a trainer: the real coordinator's tasks and store, a gateway process, and agents that are killed.

    Books (this process): ExperienceService, MembershipService, RunService over gRPC; ledger and segment files
      ^
    GatewayProcess: `fourfold serve gateway`, may be killed and started again
      ^
    Agents: processes of tests/support/agent_process.py

`check` compares the store with the journals of the agents.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np

from fourfold.agent.v1 import agent_service_pb2 as pb
from fourfold.config import Config, dump
from fourfold.coordinator.v1 import experience_service_pb2, membership_service_pb2, run_service_pb2
from fourfold.coordinator.v1.experience_service_pb2_grpc import add_ExperienceServiceServicer_to_server
from fourfold.coordinator.v1.membership_service_pb2_grpc import add_MembershipServiceServicer_to_server
from fourfold.coordinator.v1.run_service_pb2_grpc import add_RunServiceServicer_to_server
from fourfold.host.clock import SYSTEM_CLOCK
from fourfold.host.process_tree import PARENT_PID_VARIABLE
from fourfold.model.tokenizer import tokenizer_sha256
from fourfold.rpc.server import Server
from fourfold.sample import Sample
from fourfold.sample.record import TrajectoryRecord
from fourfold_coordinator.data.prompts import Prompt, own_prompt
from fourfold_coordinator.reporting.run_service import RunServicer
from fourfold_coordinator.routing.membership import MembershipServicer
from fourfold_coordinator.routing.registry import Registry
from fourfold_coordinator.state.experiences import ExperienceStore
from fourfold_coordinator.state.faults import FaultLog
from fourfold_coordinator.state.files import DiskWriter
from fourfold_coordinator.state.ledger import Ledger, SampleState
from fourfold_coordinator.state.run_board import RunBoard
from fourfold_coordinator.state.samples import SampleGroup
from fourfold_coordinator.state.segments import SegmentFiles
from fourfold_coordinator.tasks.servicer import ExperienceServicer, TaskSource
from fourfold_coordinator.tasks.task_queue import AttemptState, TaskGroup, TaskQueue
from tests.support import agent_process
from tests.support.agent_process import AgentPlan, Record
from tests.support.gateway_process import CENSUS_VARIABLE
from tests.support.rollout_process import free_port

_START_SECONDS: Final = 60.0
_CENSUS_SECONDS: Final = 20.0
ROOT: Final = Path(__file__).parents[2]


class Books:
    """The coordinator's side."""

    def __init__(
        self, folder: Path, config: Config, *, vocabulary_size: int, newest_version: Callable[[], int]
    ) -> None:
        self.config, self.vocabulary_size = config, vocabulary_size
        self.ledger = Ledger(folder / "ledger.sqlite")
        self.board = RunBoard(name=config.name, step_count=1)
        self._files = SegmentFiles(folder / "experiences")
        self.experiences = ExperienceStore(self._files, self.ledger, DiskWriter(folder, self.board, wait_seconds=1))
        self.tasks, self.faults = TaskQueue(config.agents), FaultLog()
        servicer = ExperienceServicer()
        servicer.open(
            TaskSource(
                config=config,
                run_id="0" * 32,
                queue=self.tasks,
                experiences=self.experiences,
                faults=self.faults,
                vocabulary_size=lambda: vocabulary_size,
                newest_version=newest_version,
            )
        )
        registry = Registry(clock=SYSTEM_CLOCK, tokenizer_sha256=tokenizer_sha256(Path(config.model.source)))
        self._server = Server(listen="127.0.0.1:0", security=None)
        for module, name, add, served in (
            (experience_service_pb2, "ExperienceService", add_ExperienceServiceServicer_to_server, servicer),
            (
                membership_service_pb2,
                "MembershipService",
                add_MembershipServiceServicer_to_server,
                MembershipServicer(registry),
            ),
            (run_service_pb2, "RunService", add_RunServiceServicer_to_server, RunServicer(self.board)),
        ):
            self._server.add(module.DESCRIPTOR.services_by_name[name], add, served)
        self.target = ""
        self._time: asyncio.Task[None] | None = None
        self._groups: list[tuple[TaskGroup, int, asyncio.Task[None]]] = []

    async def start(self, engines: Mapping[str, str]) -> None:
        """Serve, with these engines by their member ids."""
        rows = [run_service_pb2.Member(member_id=k, role="rollout", target=v) for k, v in engines.items()]
        self.board.set_members(rows)
        self.target = await self._server.start()
        self._server.set_ready(True)
        self._time = asyncio.create_task(self.tasks.run())

    def issue(self, count: int) -> None:
        """Offer `count` attempts, in groups of the recipe's size."""
        for position in range(len(self._groups), len(self._groups) + count // self.config.batch.group_size):
            issued = self.ledger.issue(step=1, position=position, count=self.config.batch.group_size)
            self.ledger.move(issued.sample_ids, SampleState.RUNNING)
            group = TaskGroup(
                group_id=issued.group_id, prompt=_prompt(position), task_ids=issued.sample_ids, seed=position
            )
            self._groups.append((group, position, asyncio.create_task(self.tasks.collect(group))))

    @property
    def taken(self) -> int:
        """Number of attempts whose trajectories are stored."""
        return sum(a.state is AttemptState.TAKEN for group, _, _ in self._groups for a in group.attempts)

    async def finish(self, seconds: float) -> list[TrajectoryRecord]:
        """Wait for all attempts; make their groups READY, and return the records as a new coordinator reads them."""
        async with asyncio.timeout(seconds):
            await asyncio.gather(*(task for _, _, task in self._groups))
        for group, position, _ in self._groups:
            assert {a.state for a in group.attempts} == {AttemptState.TAKEN}, [a.reason for a in group.attempts]
            trajectories = tuple(a.trajectory for a in group.attempts if a.trajectory is not None)
            await self.experiences.put(SampleGroup(position=position, seed=position, trajectories=trajectories))
        limits = {"vocabulary_size": self.vocabulary_size, "max_tokens": self.config.model.max_context_tokens}
        found = [each for _, group in await self.experiences.load(**limits) for each in group]
        assert not any(row.dropped for row, _ in found)
        return [record for _, record in found]

    async def stop(self) -> None:
        """End the server and the tasks."""
        await self._server.stop(0)
        tasks = [task for _, _, task in self._groups] + ([self._time] if self._time else [])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.experiences.close()
        self.ledger.close()


def _prompt(position: int) -> Prompt:
    text = f"{position % 97} * {position % 89} ="
    return own_prompt(text, answer="", metadata_json="")


class GatewayProcess:
    """A gateway of the run, with addresses that its next process has, too."""

    def __init__(self, folder: Path, config: Config, coordinator: str) -> None:
        self._folder, self._coordinator = folder, coordinator
        ports = [free_port() for _ in range(2)]
        self.target, self.http = (f"127.0.0.1:{port}" for port in ports)
        gateway = config.gateway.model_copy(update={"http_listen": self.http})
        self._recipe = folder / "gateway.toml"
        self._recipe.write_text(dump(config.model_copy(update={"gateway": gateway})))
        self._census = folder / "census.json"
        self.process: asyncio.subprocess.Process | None = None
        self.starts = 0

    async def start(self) -> None:
        """Start a process, and wait for its READY line."""
        words = ["-m", "tests.support.gateway_process", "serve", "gateway", str(self._recipe)]
        words += ["--listen", self.target, "--coordinator", self._coordinator, "--run-dir", str(self._folder)]
        with (self._folder / f"gateway-{self.starts}.log").open("w") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, *words, stdout=-1, stderr=log, env=_environment() | {CENSUS_VARIABLE: str(self._census)}
            )
        self.starts += 1
        assert self.process.stdout is not None
        async with asyncio.timeout(_START_SECONDS):
            line = await self.process.stdout.readline()
        assert line.startswith(b"READY "), self.log()

    def log(self) -> str:
        """Return the log of the last process."""
        return (self._folder / f"gateway-{self.starts - 1}.log").read_text()

    def errors(self) -> list[str]:
        """Return the errors that all processes logged: those that are neither the agents' nor the engines'."""
        logs = [(self._folder / f"gateway-{number}.log").read_text() for number in range(self.starts)]
        return [line for log in logs for line in log.splitlines() if '"level": "error"' in line]

    async def census(self) -> dict[str, int]:
        """Return what the process holds."""
        assert self.process is not None
        self._census.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        async with asyncio.timeout(_CENSUS_SECONDS):
            while not self._census.exists():
                await asyncio.sleep(0.02)
        found: dict[str, int] = json.loads(self._census.read_text())
        return found

    def states(self) -> dict[str, int]:
        """Return the state of each session in the gateway's store."""
        path = self._folder / "gateway" / "gateway-0" / "sessions.sqlite"
        with closing(sqlite3.connect(path)) as db:
            return dict(db.execute("SELECT session_id, state FROM sessions"))

    async def kill(self) -> None:
        """SIGKILL the process."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


class Agents:
    """Agent processes, of which some are killed."""

    def __init__(self, folder: Path, plan: AgentPlan) -> None:
        self._folder, self._plan = folder, plan
        folder.mkdir()
        self._random = random.Random(1)
        self._server: asyncio.subprocess.Process | None = None
        self.pids: dict[int, Path] = {}  # with their journals
        self.kills: Counter[str] = Counter()

    async def start(self, count: int) -> None:
        """Start `count` agents."""
        self._server = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.support.agent_process", stdin=-1, stdout=-1, env=_environment()
        )
        for number in range(count):
            await self._start_one(self._folder / f"agent-{number}.jsonl")

    async def _start_one(self, journal: Path) -> None:
        assert self._server is not None and self._server.stdin is not None and self._server.stdout is not None
        plan = asdict(self._plan) | {"journal": str(journal)}
        self._server.stdin.write(json.dumps(plan).encode() + b"\n")
        self.pids[int(await self._server.stdout.readline())] = journal

    async def kill_one(self) -> Path:
        """SIGKILL an agent, and return its journal.

        In half of the cases the next agent goes on with its sessions, else they stay open.
        """
        self.check()
        pid, journal = self._random.choice(list(self.pids.items()))
        del self.pids[pid]
        os.kill(pid, signal.SIGKILL)
        kind = self._random.choice(("resumed", "deserted"))
        self.kills[kind] += 1
        number = self.kills.total()
        await self._start_one(journal if kind == "resumed" else self._folder / f"late-{number}.jsonl")
        return journal

    def journals(self) -> list[Record]:
        """Return the sessions of all journals; fail when an agent failed."""
        self.check()
        return [record for path in sorted(self._folder.glob("*.jsonl")) for record in agent_process.read(path)]

    def check(self) -> None:
        """Fail when an agent ended by itself."""
        failures = [path.read_text() for path in self._folder.glob("*.failure")]
        assert not failures, failures[0]

    async def stop(self) -> None:
        """Kill all agents."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.pids.clear()
        if self._server is not None and self._server.returncode is None:
            self._server.kill()
            await self._server.wait()


def check(
    stored: Sequence[TrajectoryRecord], records: Sequence[Record], states: Mapping[str, int], *, tasks: int
) -> Counter[str]:
    """Check that each task has one trajectory, that of a session that was closed, with the tokens of its agent.

    Args:
        stored: trajectories of the coordinator's store.
        records: journals of all agents.
        states: of the gateway's sessions, by session.
        tasks: number of tasks.

    Returns:
        What was checked, so that a test can see that it has a meaning.
    """
    by_task = {each.segments[0].sample_id: each for each in stored}
    assert len(by_task) == len(stored) == tasks
    closed = [record for record in records if record.end == "closed"]
    # The agent of a session that is "closing" was killed before it knew the outcome.
    ended = [r for r in records if r.end in ("closed", "closing") and states.get(r.session) == pb.SESSION_STATE_STORED]
    by_name = {record.task["id"]: record for record in ended}
    assert len(by_name) == len(ended), "a task has two sessions that are STORED"
    assert by_name.keys() == by_task.keys(), "the store has what no agent closed, or lacks a session"
    for record in closed:
        # Another agent may get the task of a gateway that is away for long; the first trajectory counts.
        refused = states[record.session] == pb.SESSION_STATE_REFUSED and by_name[record.task["id"]] is not record
        assert refused or by_name[record.task["id"]] is record, f"{record.session} is in state {states[record.session]}"
    checked: Counter[str] = Counter(sessions=len(records), closed=len(closed))
    for name, each in by_task.items():
        record = by_name[name]
        assert each.segments[0].score == float(record.task["sample_index"] % 2)
        assert each.metrics == {"turns": len(record.turns)}
        check_session(each.segments, record, checked)
    return checked


def check_session(segments: Sequence[Sample], record: Record, checked: Counter[str]) -> None:
    """Check that the segments of a trajectory have each turn of the agent once, after the prompt that it sent."""
    where = f"{record.session} ({record.kind})"
    assert len(segments) == record.segment_count, f"{where}: {len(segments)} segments, not {record.segment_count}"
    turns = iter(record.turns)
    for index, segment in enumerate(segments):
        assert (segment.segment_index, segment.segment_count or 1) == (index, len(segments))
        versions = np.repeat(
            [span.policy_version for span in segment.version_spans], [s.token_count for s in segment.version_spans]
        )
        edges = np.flatnonzero(np.diff(np.concatenate(([0], segment.action_mask, [0]))))
        for number, (begin, end) in enumerate(edges.reshape(-1, 2).tolist()):
            turn = next(turns)
            assert turn["edited"] == (index > 0 and number == 0), where
            assert segment.token_ids[begin:end].tolist() == turn["ids"], where
            assert segment.behavior_logprobs[begin:end].tolist() == np.float32(turn["logprobs"]).tolist(), where
            assert versions[begin:end].tolist() == turn["versions"], where
            if turn["prompt"] is not None:
                assert segment.token_ids[:begin].tolist() == turn["prompt"], where
            checked[record.kind] += 1
            checked["crossed an update"] += len(set(turn["versions"])) > 1
        checked["segments"] += 1
    assert next(turns, None) is None, f"{where}: the store lacks a turn"


async def wait_for_gateway(check_now: Callable[[], Any], gateway: GatewayProcess, *, seconds: float) -> dict[str, int]:
    """Return the census of the gateway when it has no session any more, or at the end of the time."""
    census = await gateway.census()
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while check_now() or census["sessions"] or census["turns in flight"]:
                await asyncio.sleep(0.2)
                census = await gateway.census()
    return census


def _environment() -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), *sys.path])
    return {**os.environ, "PYTHONPATH": paths, PARENT_PID_VARIABLE: str(os.getpid())}
