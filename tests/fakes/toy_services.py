"""The toy services of `tests.fakes.toy` as processes of their own, for tests of `fourfold run` that load no engine.

`install(folder)` writes metadata that puts them in the place of the real rollout and trainer
distributions for every child process with `folder` first in its PYTHONPATH. Weights and
checkpoints, which are in memory there, go through files of the run's folder here.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from fourfold.service.lifecycle import ServeOptions, ServiceHost
from fourfold.trainer.v1 import trainer_service_pb2 as trainer
from fourfold.trainer.v1 import trainer_weight_service_pb2 as weight
from tests.fakes import toy_rollout
from tests.fakes.toy import Member
from tests.fakes.toy_rollout import FakeRollout
from tests.fakes.toy_trainer import FakeTrainer

DELAY_VARIABLE = "TOY_SECONDS"
"""Duration of each sampling call."""
CALLS_VARIABLE = "TOY_CALLS"
"""Sampling calls that an engine works on at once; more wait. Without it, all."""

_WEIGHTS_FILE = "toy-weights"  # in an exported model


def install(folder: Path) -> Path:
    """Write the metadata of two distributions; return the folder."""
    for role in ("rollout", "trainer"):
        info = folder / f"fourfold_{role}-0.1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fourfold-{role}\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(f"[fourfold.services]\n{role} = tests.fakes.toy_services:{role}_main\n")
    return folder


class Checkpoints(dict[int, tuple[int, int]]):
    """A trainer's checkpoints, also on disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        found = sorted(folder.glob("step-*/toy.json"))
        super().__init__((int(p.parent.name[5:]), tuple(json.loads(p.read_text()))) for p in found)

    def setdefault(self, step: int, value: Any = None) -> tuple[int, int]:
        path = self._folder / f"step-{step:06d}" / "toy.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))
        return super().setdefault(step, value)


class ToyTrainer(FakeTrainer):
    """Sends its weights through a file."""

    def __init__(self, options: ServeOptions) -> None:
        assert options.run_dir is not None
        self.run_dir = options.run_dir
        super().__init__(options.member_id, options.config, checkpoints=Checkpoints(self.run_dir / "checkpoints"))

    async def SendWeights(self, request: weight.SendWeightsRequest, context: Any) -> weight.SendWeightsResponse:
        write_weights(self.run_dir, request.epoch, request.policy_version, self.weights)
        return await super().SendWeights(request, context)

    async def ExportModel(self, request: trainer.ExportModelRequest, context: Any) -> trainer.ExportModelResponse:
        path = self.run_dir / request.name
        shutil.copytree(self.config.model.source, path, dirs_exist_ok=True)
        (path / _WEIGHTS_FILE).write_text(str(self.weights))
        return trainer.ExportModelResponse(path=str(path))


def weights_file(run_dir: Path, epoch: int, version: int) -> Path:
    return run_dir / f"weights-{epoch}-{version}"


def write_weights(run_dir: Path, epoch: int, version: int, weights: int) -> None:
    path = weights_file(run_dir, epoch, version)
    fresh = path.with_name(f"{path.name}-{os.getpid()}")
    fresh.write_text(str(weights))
    fresh.rename(path)


def rollout_main(options: ServeOptions) -> int:
    """Entry point."""
    run_dir = options.run_dir or Path()  # none: nobody sends weights

    async def receive(epoch: int, version: int) -> int:
        while not (path := weights_file(run_dir, epoch, version)).exists():
            await asyncio.sleep(0.01)
        return int(path.read_text())

    toy_rollout.receive = receive  # type: ignore[attr-defined]
    toy_rollout.send = partial(write_weights, run_dir)  # type: ignore[attr-defined]

    async def serve() -> int:
        fake = FakeRollout(options.member_id, options.config)
        exported = Path(options.config.model.source) / _WEIGHTS_FILE
        fake.weights = int(exported.read_text()) if exported.exists() else 0
        turns = asyncio.Semaphore(int(os.environ.get(CALLS_VARIABLE, "1000000")))

        async def sample() -> None:
            async with turns:
                await asyncio.sleep(float(os.environ.get(DELAY_VARIABLE, "0")))

        fake.on_generate = sample
        return await host(options, fake)

    return asyncio.run(serve())


def trainer_main(options: ServeOptions) -> int:
    """Entry point."""

    async def serve() -> int:
        return await host(options, ToyTrainer(options))

    return asyncio.run(serve())


async def host(options: ServeOptions, fake: Member) -> int:
    home = ServiceHost(options, role=fake.role)
    home.tokenizer_sha256 = fake.tokenizer_sha256
    for descriptor, register in fake.services():
        home.server.add(descriptor, register, fake)
    return await home.run()
