"""A run folder, its services with toy engines, and the real coordinators that live in it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fourfold import config as configuration
from fourfold.config import Config
from fourfold.coordinator.client import AsyncCoordinatorClient
from fourfold.coordinator.v1 import run_service_pb2 as run_pb
from fourfold.rpc.channel import open_channel
from fourfold.service.lifecycle import ServeOptions
from fourfold_coordinator.launch.run_names import ADDRESS_FILE
from fourfold_coordinator.serve import Coordinator
from fourfold_coordinator.state.ledger import Ledger, SampleState
from tests.fakes.toy import Member, make_config
from tests.fakes.toy_rollout import FakeRollout
from tests.fakes.toy_scorers import FakeReward
from tests.fakes.toy_trainer import FakeTrainer


class Stage:
    """One run folder, its services, and the coordinators that live in it."""

    def __init__(self, root: Path, **changes: Any) -> None:
        self.config: Config = make_config(root, **changes)
        self.folder = root / "run"
        self.folder.mkdir(exist_ok=True)
        (self.folder / "config.toml").write_text(configuration.dump(self.config))
        self.rollouts = [FakeRollout(f"rollout-{i}", self.config) for i in range(self.config.rollout_replicas)]
        self.trainer = FakeTrainer("trainer-0", self.config)
        self.reward = FakeReward("reward-0", self.config)
        self.others: list[Member] = []
        self.address = ""
        self.run: asyncio.Task[int] | None = None

    @property
    def members(self) -> list[Member]:
        return [*self.rollouts, self.trainer, self.reward, *self.others]

    async def start(self, *, start_seconds: float = 30.0, join: bool = True) -> None:
        """Start a coordinator in this folder, and let the services register."""
        (self.folder / ADDRESS_FILE).unlink(missing_ok=True)
        coordinator = Coordinator(self.options(), self.folder, start_seconds=start_seconds)
        self.run = asyncio.create_task(coordinator.run())
        await until(lambda: (self.folder / ADDRESS_FILE).exists() or self.ended)
        self.address = (self.folder / ADDRESS_FILE).read_text().strip()
        if join:
            for member in self.members:
                await member.join(self.address)

    def options(self) -> ServeOptions:
        """Return the options of a coordinator in this folder."""
        return ServeOptions(
            role="coordinator",
            recipe=self.folder / "config.toml",
            config=self.config,
            member_id="coordinator",
            run_dir=self.folder,
        )

    @property
    def ended(self) -> bool:
        return self.run is not None and self.run.done()

    async def finish(self, seconds: float = 20.0) -> int:
        """Wait for the coordinator's end; return its exit code."""
        assert self.run is not None
        async with asyncio.timeout(seconds):
            return await self.run

    async def check_end(self, seconds: float = 20.0) -> None:
        """Wait for the end of the run, which must have succeeded, and check its books."""
        assert await self.finish(seconds) == 0
        check_books(self)

    async def complete(self) -> None:
        """Run to the end, which must be a success, and check the books."""
        await self.start()
        await self.check_end()

    async def kill(self) -> None:
        """End the coordinator without any of its own last words."""
        assert self.run is not None
        self.run.cancel()
        with suppress(asyncio.CancelledError):
            await self.run

    def ledger(self) -> Ledger:
        return Ledger(self.folder / "ledger.sqlite")

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.folder / "report.json").read_text())
        return report

    async def close(self) -> None:
        if self.run is not None and not self.run.done():
            await self.kill()
        for member in self.members:
            await member.kill()


async def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def fresh_processes(stage: Stage) -> None:
    """All services anew, as after kill -9 of everything; the trainer's checkpoints stay."""
    for member in stage.members:
        await member.kill()
    stage.rollouts = [FakeRollout("rollout-0", stage.config)]
    stage.trainer = successor(stage.trainer)
    stage.reward = FakeReward("reward-0", stage.config)


def successor(trainer: FakeTrainer, kind: type[FakeTrainer] = FakeTrainer) -> FakeTrainer:
    """Return a new process in place of a trainer: it has the checkpoints, and the steps up to the last of them."""
    fresh = kind(trainer.member_id, trainer.config, checkpoints=trainer.checkpoints)
    last = max(trainer.checkpoints, default=0)
    fresh.batches = {step: ids for step, ids in trainer.batches.items() if step <= last}
    return fresh


def hang_in_step(stage: Stage, step: int) -> asyncio.Event:
    """Make the first TrainStep call of a step hang; return the event that it has."""
    hangs = asyncio.Event()

    async def hang(trained: int) -> None:
        if trained == step and not hangs.is_set():
            hangs.set()
            await asyncio.sleep(30)

    stage.trainer.on_train = hang
    return hangs


async def watch_for(stage: Stage, condition: Callable[[run_pb.RunStatus], bool]) -> run_pb.RunStatus:
    client = AsyncCoordinatorClient(open_channel(stage.address, None), peer="coordinator")
    async with asyncio.timeout(10):
        async for status in client.watch_run():
            if condition(status):
                return status
    raise AssertionError("the run ended before")


def check_books(stage: Stage) -> None:
    """Check that ledger, trainer and files agree, as at the end of any run."""
    ledger = stage.ledger()
    steps = ledger.steps()
    counts = ledger.counts()
    assert set(counts) <= {SampleState.TRAINED, SampleState.DROPPED}
    assert [row.step for row in steps] == list(range(1, stage.config.steps + 1))
    assert [row["step"] for row in stage.lines("metrics.jsonl")] == [row.step for row in steps]
    assert [row["reward/mean"] for row in stage.lines("metrics.jsonl")] == [r.metrics["reward/mean"] for r in steps]
    trained = [sample_id for step in sorted(stage.trainer.batches) for sample_id in stage.trainer.batches[step]]
    assert len(trained) == len(set(trained)) == counts[SampleState.TRAINED], "each sample enters exactly one step"
    assert all(ledger.state(sample_id) is SampleState.TRAINED for sample_id in trained)
    written = {row["sample_id"]: row["step"] for row in stage.lines("samples.jsonl")}
    for step, sample_ids in stage.trainer.batches.items():
        assert all(written[sample_id] == step for sample_id in sample_ids)
    lines = stage.lines("samples.jsonl")
    assert len(lines) == len(written), "no sample is written twice"
    assert all(line["dropped"] or ledger.state(line["sample_id"]) is SampleState.TRAINED for line in lines)
    checkpoint = ledger.last_checkpoint()
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.data_position) == (stage.config.steps, steps[-1].data_position)
    assert checkpoint.eval_count == len(ledger.evals())
    versions = [row.policy_version for row in steps]
    assert versions == sorted(versions), "versions never go back"
    ledger.close()
