"""Client of a reference service: log-probabilities of samples under the frozen model."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from fourfold.arrays import Float32Array, Sample
from fourfold.reference.v1 import reference_service_pb2 as pb
from fourfold.reference.v1 import reference_service_pb2_grpc as pb_grpc
from fourfold.rpc import logprobs
from fourfold.rpc.channel import call
from fourfold.rpc.responses import check_model


class AsyncReferenceClient:
    """Calls `ReferenceService`. All methods raise FourfoldError; timeouts are seconds."""

    def __init__(self, channel: grpc.aio.Channel, *, peer: str) -> None:
        self._stub = pb_grpc.ReferenceServiceStub(channel)
        self.peer = peer

    async def get_info(self, *, timeout: float) -> pb.GetInfoResponse:
        """Model, tokenizer and limits."""
        info = await call(self._stub.GetInfo, pb.GetInfoRequest(), timeout=timeout, peer=self.peer, name="GetInfo")
        check_model(info, peer=self.peer)
        return info

    async def compute_logprobs(self, samples: Sequence[Sample], *, timeout: float) -> list[Float32Array]:
        """Return one float32 [n] per sample, in order; the first value of each is NaN, the others are finite."""
        method, request = self._stub.ComputeLogprobs, pb.ComputeLogprobsRequest
        return await logprobs.compute_logprobs(method, request, samples, timeout=timeout, peer=self.peer)
