"""Serves the trainer's real services with a fake engine on a loopback server, for contract and security tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold.config import Config
from fourfold.sample import Sample
from fourfold.sample.wire import encode
from fourfold.trainer.client import AsyncTrainerClient, TrainerWeightClient
from fourfold.trainer.v1 import trainer_service_pb2 as pb
from fourfold.trainer.v1 import trainer_service_pb2_grpc as pb_grpc
from fourfold.trainer.v1 import trainer_weight_service_pb2 as weight
from fourfold.trainer.v1 import trainer_weight_service_pb2_grpc as weight_grpc
from fourfold_trainer.service.servicer import TrainerServicer
from fourfold_trainer.service.state import TrainerCore
from fourfold_trainer.service.weight_servicer import TrainerWeightServicer
from tests.conftest import Serve
from tests.fakes.trainer_engine import FakeEngine

SHA256 = bytes(range(32))
SECONDS = 10.0


def config(**changes: dict[str, Any]) -> Config:
    tables: dict[str, Any] = {
        "name": "test",
        "steps": 10,
        "model": {"source": "nowhere", "max_context_tokens": 16},
        "data": {"train": {"path": "train.jsonl"}},
        "batch": {"prompts_per_step": 2, "group_size": 2, "tokens_per_micro_batch": 32},
        "sampling": {"max_new_tokens": 8},
    }
    for table, values in changes.items():
        tables[table] = {**tables.get(table, {}), **values}
    return Config.model_validate(tables)


@dataclass(slots=True, kw_only=True, eq=False)
class Trainer:
    """A trainer that is being served, and clients of it."""

    engine: FakeEngine
    core: TrainerCore
    servicer: TrainerServicer
    client: AsyncTrainerClient
    weights: TrainerWeightClient
    stub: pb_grpc.TrainerServiceAsyncStub
    run_dir: Path
    fatal: list[str]

    async def train(self, step: int, samples: Sequence[Sample], timeout: float = SECONDS) -> pb.TrainStepResponse:
        return await self.client.train_step(step, [encode(s) for s in samples], timeout=timeout)

    async def status(self) -> pb.TrainerStatus:
        return await self.client.get_status(timeout=SECONDS)


Start = Callable[..., Awaitable[Trainer]]


@asynccontextmanager
async def trainers(serve: Serve, run_dir: Path) -> AsyncIterator[Start]:
    """Give `start(engine=None, *, started=True, **tables)`, which serves a trainer; stop all trainers at the end."""
    cores: list[TrainerCore] = []

    async def make(engine: FakeEngine | None = None, *, started: bool = True, **changes: dict[str, Any]) -> Trainer:
        engine = engine or FakeEngine()
        fatal: list[str] = []
        core = TrainerCore(config(**changes), run_dir=run_dir, make_engine=lambda: engine, fatal=fatal.append)
        cores.append(core)
        servicer = TrainerServicer(core, tokenizer_sha256=SHA256)
        channel = await serve(
            (
                pb.DESCRIPTOR.services_by_name["TrainerService"],
                pb_grpc.add_TrainerServiceServicer_to_server,
                servicer,
            ),
            (
                weight.DESCRIPTOR.services_by_name["TrainerWeightService"],
                weight_grpc.add_TrainerWeightServiceServicer_to_server,
                TrainerWeightServicer(core),
            ),
        )
        if started:
            await core.start()
        return Trainer(
            engine=engine,
            core=core,
            servicer=servicer,
            client=AsyncTrainerClient(channel, peer="trainer-0"),
            weights=TrainerWeightClient(channel, peer="trainer-0"),
            stub=pb_grpc.TrainerServiceStub(channel),
            run_dir=run_dir,
            fatal=fatal,
        )

    yield make
    for core in cores:
        await core.stop()
