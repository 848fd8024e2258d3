"""TrainerWeightService: the trainer's side of a weight update. Offers are secrets of an epoch's members: not logged."""

from __future__ import annotations

from typing import Any, Final

import grpc

from fourfold.errors import InvalidInput
from fourfold.trainer.v1 import trainer_weight_service_pb2 as pb
from fourfold.trainer.v1 import trainer_weight_service_pb2_grpc as pb_grpc
from fourfold.weights.host import host_id
from fourfold_trainer.core import TrainerCore
from fourfold_trainer.servicer import time_left

Context = grpc.aio.ServicerContext[Any, Any]

BACKENDS: Final = ("shm", "gloo")


class TrainerWeightServicer(pb_grpc.TrainerWeightServiceServicer):
    """Hands each phase to the engine thread; an abort overtakes whatever runs there."""

    def __init__(self, core: TrainerCore) -> None:
        self._core = core

    async def GetManifest(self, request: pb.GetManifestRequest, context: Context) -> pb.GetManifestResponse:
        """Describe what will be sent."""
        manifest = await self._core.manifest(timeout=time_left(context))
        return pb.GetManifestResponse(
            manifest=manifest.to_bytes(), manifest_sha256=manifest.sha256, host_id=host_id(), backends=BACKENDS
        )

    async def MakeOffer(self, request: pb.MakeOfferRequest, context: Context) -> pb.MakeOfferResponse:
        """Start an epoch."""
        if request.backend not in BACKENDS:
            raise InvalidInput(f"backend is {request.backend!r}; the trainer has {', '.join(BACKENDS)}")
        if request.receiver_count < 1:
            raise InvalidInput(f"receiver_count is {request.receiver_count}; it must be at least 1")
        offers = await self._core.make_offers(
            request.epoch, request.backend, request.receiver_count, timeout=time_left(context)
        )
        return pb.MakeOfferResponse(offers=offers)

    async def OpenWeights(self, request: pb.OpenWeightsRequest, context: Context) -> pb.OpenWeightsResponse:
        """Join the receivers."""
        await self._core.open_weights(request.epoch, timeout=time_left(context))
        return pb.OpenWeightsResponse()

    async def SendWeights(self, request: pb.SendWeightsRequest, context: Context) -> pb.SendWeightsResponse:
        """Send the present weights."""
        sent = await self._core.send_weights(request.epoch, request.policy_version, timeout=time_left(context))
        return pb.SendWeightsResponse(weights_digest=sent.weights_digest, sent_bytes=sent.sent_bytes)

    async def AbortWeights(self, request: pb.AbortWeightsRequest, context: Context) -> pb.AbortWeightsResponse:
        """Abort and close the epoch."""
        await self._core.abort_weights(request.epoch)
        return pb.AbortWeightsResponse()
