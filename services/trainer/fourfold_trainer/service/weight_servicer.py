"""TrainerWeightService: the trainer's side of a weight update. Offers are secrets of an epoch's members: not logged."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc

from fourfold.bounds import check_number
from fourfold.errors import InvalidInput
from fourfold.trainer.v1 import trainer_weight_service_pb2 as pb
from fourfold.trainer.v1 import trainer_weight_service_pb2_grpc as pb_grpc
from fourfold.weights.transport.locality import host_id, reachable_gpus
from fourfold_trainer.service.servicer import time_left
from fourfold_trainer.service.state import TrainerCore

# Each takes memory that is made before the first one comes.
_MAX_RECEIVERS: Final = 4096

Context = grpc.aio.ServicerContext[Any, Any]


class TrainerWeightServicer(pb_grpc.TrainerWeightServiceServicer):
    """Hands each phase to the engine thread; an abort overtakes whatever runs there."""

    def __init__(self, core: TrainerCore) -> None:
        self._transfers = core.transfers
        self._reachable: list[bytes] | None = None  # asked once: GPUs do not move

    async def GetManifest(self, request: pb.GetManifestRequest, context: Context) -> pb.GetManifestResponse:
        """Describe what will be sent, and from where."""
        manifest = await self._transfers.manifest(timeout=time_left(context))
        devices = self._transfers.device_uuids
        if self._reachable is None:
            self._reachable = await asyncio.to_thread(reachable_gpus, devices)
        return pb.GetManifestResponse(
            manifest=manifest.to_bytes(),
            manifest_sha256=manifest.sha256,
            host_id=host_id(),
            backends=self._transfers.backends,
            device_uuids=devices,
            reachable_device_uuids=self._reachable,
        )

    async def MakeOffer(self, request: pb.MakeOfferRequest, context: Context) -> pb.MakeOfferResponse:
        """Start an epoch, or add a group of receivers to it."""
        backends = self._transfers.backends
        if request.backend not in backends:
            raise InvalidInput(f"backend is {request.backend[:40]!r}; the trainer has {', '.join(backends)}")
        offers = await self._transfers.make_offers(
            check_number(request.epoch, "epoch"),
            request.backend,
            check_number(request.receiver_count, "receiver_count", least=1, most=_MAX_RECEIVERS),
            group=check_number(request.group, "group", most=_MAX_RECEIVERS),
            timeout=time_left(context),
        )
        return pb.MakeOfferResponse(offers=offers)

    async def OpenWeights(self, request: pb.OpenWeightsRequest, context: Context) -> pb.OpenWeightsResponse:
        """Join the receivers."""
        await self._transfers.open(request.epoch, timeout=time_left(context))
        return pb.OpenWeightsResponse()

    async def SendWeights(self, request: pb.SendWeightsRequest, context: Context) -> pb.SendWeightsResponse:
        """Send the present weights."""
        sent = await self._transfers.send(
            request.epoch, request.policy_version, skip_sums=request.skip_sums, timeout=time_left(context)
        )
        return pb.SendWeightsResponse(weights_digest=sent.weights_digest, sent_bytes=sent.sent_bytes, sums=sent.sums)

    async def AbortWeights(self, request: pb.AbortWeightsRequest, context: Context) -> pb.AbortWeightsResponse:
        """Abort and close the epoch."""
        await self._transfers.abort(request.epoch)
        return pb.AbortWeightsResponse()
