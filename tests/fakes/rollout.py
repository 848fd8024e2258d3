"""A rollout service on a loopback server, with a fake engine that samples when the test ticks it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from fourfold.rollout.client import AsyncRolloutClient, RolloutControlClient
from fourfold.rollout.v1 import rollout_control_service_pb2 as control_pb
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rollout.v1.rollout_control_service_pb2_grpc import add_RolloutControlServiceServicer_to_server
from fourfold.rollout.v1.rollout_service_pb2_grpc import add_RolloutServiceServicer_to_server
from fourfold.rpc.limits import Quotas
from fourfold.security.principal import UNLIMITED
from fourfold_rollout.engine import TextWork
from fourfold_rollout.generate.admission import GenerateLimits
from fourfold_rollout.generate.servicer import RolloutServicer, ServedModel
from fourfold_rollout.update.controller import WeightController
from fourfold_rollout.update.servicer import RolloutControlServicer
from tests.conftest import Serve, Servicer
from tests.fakes.engine import CONTEXT, STOP_TOKEN, VOCABULARY, FakeEngine

SHA256 = bytes(range(32))
NO_QUOTAS = Quotas(lambda _principal: UNLIMITED)
OPEN: dict[str, Any] = {
    "backend": "shm", "manifest": b"m", "offers": [b"o"], "receiver_count": 1, "first_receiver_index": 0,
}  # fmt: skip


@dataclass(slots=True)
class Service:
    """A running service and its clients."""

    engine: FakeEngine
    servicer: RolloutServicer
    channel: grpc.aio.Channel
    client: AsyncRolloutClient
    control: RolloutControlClient

    async def running(self, count: int) -> None:
        """Wait until so many samples are in the engine."""
        await until(lambda: self.engine.running_count == count)

    async def pause(self, version: int = 1, mode: Any = control_pb.PAUSE_MODE_WAIT) -> None:
        await self.control.open(epoch=version, timeout=2, **OPEN)
        await self.control.begin(epoch=version, policy_version=version, pause_mode=mode, timeout=2)

    async def publish(self, version: int) -> None:
        await self.pause(version)
        await self.control.receive(epoch=version, policy_version=version, timeout=2)
        await self.control.commit(epoch=version, policy_version=version, timeout=2)


@dataclass(slots=True, kw_only=True)
class RealServicers:
    """Both servicers of a rollout service, and the weights that they share."""

    rollout: RolloutServicer
    control: RolloutControlServicer
    weights: WeightController

    def services(self) -> list[Servicer]:
        """Return descriptor, registration and servicer of each service."""
        return [
            (pb.DESCRIPTOR.services_by_name["RolloutService"], add_RolloutServiceServicer_to_server, self.rollout),
            (
                control_pb.DESCRIPTOR.services_by_name["RolloutControlService"],
                add_RolloutControlServiceServicer_to_server,
                self.control,
            ),
        ]


def real_servicers(
    engine: FakeEngine,
    *,
    max_concurrent_samples: int = 8,
    quotas: Quotas = NO_QUOTAS,
    text: TextWork | None = None,
    rollout: Callable[..., RolloutServicer] = RolloutServicer,
    **limits: Any,
) -> RealServicers:
    """Make the servicers of an engine; `limits` are further fields of `GenerateLimits`."""
    fields: dict[str, Any] = {
        "max_context_tokens": CONTEXT,
        "vocabulary_size": VOCABULARY,
        "max_concurrent_samples": max_concurrent_samples,
        "kv_cache_tokens": engine.description.kv_cache_tokens,
        "stop_token_ids": (STOP_TOKEN,),
    }
    weights = WeightController(engine, update_timeout=5)
    model = ServedModel(name="tiny", tokenizer_sha256=SHA256, limits=GenerateLimits(**fields | limits))
    return RealServicers(
        rollout=rollout(model, engine, weights, quotas, text),
        control=RolloutControlServicer(engine, weights, model_sha256=SHA256, host_id="here", update_timeout=5),
        weights=weights,
    )


@asynccontextmanager
async def rollout_service(serve: Serve, *, kv_cache_tokens: int = 100, **options: Any) -> AsyncIterator[Service]:
    """Run both servicers on a loopback server; `options` are those of `real_servicers`."""
    engine = FakeEngine(kv_cache_tokens=kv_cache_tokens)
    servicers = real_servicers(engine, **options)
    channel = await serve(*servicers.services())
    yield Service(
        engine,
        servicers.rollout,
        channel,
        AsyncRolloutClient(channel, peer="rollout-0"),
        RolloutControlClient(channel, peer="rollout-0"),
    )
    await servicers.weights.close()


async def until(condition: Callable[[], bool], seconds: float = 5) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def request(name: str = "r", *, flush_seconds: float | None = None, **fields: Any) -> pb.GenerateRequest:
    defaults = {"request_id": name, "prompt_token_ids": [1, 2, 3], "sampling_params": pb.SamplingParams(max_tokens=4)}
    message = pb.GenerateRequest(**{**defaults, **fields})
    if flush_seconds is not None:
        message.flush_interval.FromNanoseconds(int(flush_seconds * 1e9))
    return message
