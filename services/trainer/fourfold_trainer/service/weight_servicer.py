"""Implements TrainerWeightService: the trainer's side of a weight update.

Offers are secrets of the members of an epoch, so nothing here logs them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

import grpc

from fourfold.address import LOOPBACK
from fourfold.bounds import MAX_RECEIVERS, check_number
from fourfold.errors import DeadlinePassed, InvalidInput, StaleEpoch, WrongState
from fourfold.trainer.v1 import trainer_weight_service_pb2 as pb
from fourfold.trainer.v1 import trainer_weight_service_pb2_grpc as pb_grpc
from fourfold.weights.transport.locality import host_id, reachable_gpus
from fourfold_trainer.engine import SentWeights
from fourfold_trainer.service.engine_thread import Phase
from fourfold_trainer.service.servicer import time_left
from fourfold_trainer.service.state import TrainerCore

_log = logging.getLogger("fourfold.trainer")

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

# A phase ends this much earlier than its caller's deadline, so that the caller receives the reason.
_MARGIN_SECONDS: Final = 0.05


class TrainerWeightServicer(pb_grpc.TrainerWeightServiceServicer):
    """Runs each phase of an update in the engine thread. An abort interrupts the phase that runs there."""

    def __init__(self, core: TrainerCore) -> None:
        self._core = core
        self._reachable: list[bytes] | None = None  # computed once: GPUs do not move
        self._aborts: set[asyncio.Task[None]] = set()  # references, because asyncio only keeps weak ones

    async def GetManifest(self, request: pb.GetManifestRequest, context: Context) -> pb.GetManifestResponse:
        """Describe the weights, and the GPUs and transports that they can be sent from."""
        timeout = time_left(context)
        manifest = await self._core.run(Phase.WAITING, timeout, lambda: self._core.engine.manifest())
        devices = self._core.engine.device_uuids
        if self._reachable is None:
            self._reachable = await asyncio.to_thread(reachable_gpus, devices)
        return pb.GetManifestResponse(
            manifest=manifest.to_bytes(),
            manifest_sha256=manifest.sha256,
            host_id=host_id(),
            backends=self._core.engine.backends,
            device_uuids=devices,
            reachable_device_uuids=self._reachable,
        )

    async def MakeOffer(self, request: pb.MakeOfferRequest, context: Context) -> pb.MakeOfferResponse:
        """Start an epoch, or add a group of receivers to it."""
        engine = self._core.engine
        if request.backend not in engine.backends:
            raise InvalidInput(f"backend is {request.backend[:40]!r}; the trainer has {', '.join(engine.backends)}")
        epoch = check_number(request.epoch, "epoch")
        count = check_number(request.receiver_count, "receiver_count", least=1, most=MAX_RECEIVERS)
        group = check_number(request.group, "group", most=MAX_RECEIVERS)

        def make(left: float) -> list[bytes]:
            host = request.host or LOOPBACK
            return engine.make_offers(
                epoch, request.backend, count, group=group, host=host, interface=request.interface, timeout=left
            )

        return pb.MakeOfferResponse(offers=await self._run_phase(epoch, make, context))

    async def OpenWeights(self, request: pb.OpenWeightsRequest, context: Context) -> pb.OpenWeightsResponse:
        """Connect to the receivers of all groups."""
        epoch = request.epoch
        await self._run_phase(epoch, lambda left: self._core.engine.open_weights(epoch, timeout=left), context)
        return pb.OpenWeightsResponse()

    async def SendWeights(self, request: pb.SendWeightsRequest, context: Context) -> pb.SendWeightsResponse:
        """Send the current weights. WrongState if they have another version."""
        epoch, version = request.epoch, request.policy_version

        def send(left: float) -> SentWeights:
            current = self._core.status().state.policy_version
            if version != current:
                raise WrongState(f"policy version {version} cannot be sent; the current weights are {current}")
            return self._core.engine.send_weights(epoch, version, skip_sums=request.skip_sums, timeout=left)

        sent = await self._run_phase(epoch, send, context)
        return pb.SendWeightsResponse(weights_digest=sent.weights_digest, sent_bytes=sent.sent_bytes, sums=sent.sums)

    async def AbortWeights(self, request: pb.AbortWeightsRequest, context: Context) -> pb.AbortWeightsResponse:
        """Abort and close the epoch immediately, whatever the engine thread does."""
        await asyncio.to_thread(self._core.engine.abort_weights, request.epoch)
        return pb.AbortWeightsResponse()

    async def _run_phase(self, epoch: int, phase: Callable[[float], T], context: Context) -> T:
        """Run a phase in the engine thread; it receives the seconds that remain after its time in the queue."""
        timeout = time_left(context)
        end = time.monotonic() + timeout - _MARGIN_SECONDS

        def timed() -> T:
            left = end - time.monotonic()
            if left <= 0:
                raise DeadlinePassed("the engine was busy until the deadline; call again")
            return phase(left)

        try:
            return await self._core.run(Phase.PUBLISHING, timeout, timed)
        except asyncio.CancelledError:
            # A coordinator that was killed aborts nothing. Without this abort the engine would wait for receivers until
            # the deadline, while the next coordinator waits for the engine.
            task = asyncio.get_running_loop().create_task(self._abort_abandoned(epoch))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)
            raise

    async def _abort_abandoned(self, epoch: int) -> None:
        with suppress(StaleEpoch):  # another epoch is open, which has its own caller
            await asyncio.to_thread(self._core.engine.abort_weights, epoch)
            _log.warning("weight epoch aborted: its caller is gone. epoch=%d", epoch)
