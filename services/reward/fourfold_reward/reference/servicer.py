"""ReferenceService on one frozen model.

    ComputeLogprobs --checked--> rounds of many calls, in a thread (merging.py) --> answer

Health and GetInfo are answered meanwhile. A round whose clients all went away stops at its next batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import grpc

from fourfold.arrays import Int32Array
from fourfold.errors import InvalidInput, Overloaded, Unavailable
from fourfold.reference.v1 import reference_service_pb2 as pb
from fourfold.reference.v1 import reference_service_pb2_grpc as pb_grpc
from fourfold.rpc.codec import check_id, decode_token_ids, pack_floats
from fourfold.types.v1.experience_pb2 import Experience
from fourfold_reward.reference.merging import Merger
from fourfold_reward.reference.model import ReferenceModel, Stopped

MAX_REQUEST_BYTES: Final = 8 << 20
# All groups of a step may come at once; what they hold while they wait is limited by its size.
MAX_CALLS: Final = 1024
MAX_WAITING_BYTES: Final = 128 << 20
_LONGEST_RETRY_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What is served once it is loaded."""

    model: ReferenceModel
    tokenizer_sha256: bytes


class ReferenceServicer(pb_grpc.ReferenceServiceServicer):
    """Stateless. UNAVAILABLE until `set_ready`."""

    def __init__(self, *, name: str, max_context_tokens: int) -> None:
        """Serve a model that may still be loading.

        Args:
            name: of the model, as configured.
            max_context_tokens: longest sample.
        """
        self._name = name
        self._max_context_tokens = max_context_tokens
        self._loaded: Loaded | None = None
        self._merger = Merger()
        self._calls = self._waiting_bytes = 0

    def set_ready(self, loaded: Loaded) -> None:
        """Serve this from now on."""
        self._loaded = loaded

    async def close(self) -> None:
        """Stop what is being computed at its next batch, and what waits."""
        self._merger.close()

    async def GetInfo(
        self, request: pb.GetInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetInfoResponse:
        """Describe the model."""
        loaded = self._ready()
        return pb.GetInfoResponse(
            model=self._name,
            tokenizer_sha256=loaded.tokenizer_sha256,
            max_context_tokens=self._max_context_tokens,
            vocabulary_size=loaded.model.vocabulary_size,
        )

    async def ComputeLogprobs(
        self, request: pb.ComputeLogprobsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ComputeLogprobsResponse:
        """Check every sample, then look them up."""
        model = self._ready().model
        token_ids = self._decode(request, model)
        size = request.ByteSize()
        if self._calls >= MAX_CALLS or self._waiting_bytes + size > MAX_WAITING_BYTES:
            raise Overloaded(
                f"{self._calls} calls with {self._waiting_bytes >> 20} MiB are being worked on; at most {MAX_CALLS} "
                f"with {MAX_WAITING_BYTES >> 20} MiB may wait: come back later, or start more reference services",
                reason="QUEUE_FULL",
                retry_after=min(self._merger.mean_seconds, _LONGEST_RETRY_SECONDS),
            )
        self._calls += 1
        self._waiting_bytes += size
        try:
            rows = await self._merger.look_up(model, token_ids, [e.temperature for e in request.experiences])
        except Stopped:
            raise Unavailable("the reference service is stopping; try another one") from None
        finally:
            self._calls -= 1
            self._waiting_bytes -= size
        return pb.ComputeLogprobsResponse(logprobs=[pack_floats(row) for row in rows])

    def _ready(self) -> Loaded:
        if self._loaded is None:
            raise Unavailable("the reference model is loading; try again in a few seconds", retry_after=1.0)
        if self._merger.closing:
            raise Unavailable("the reference service is stopping; try another one")
        return self._loaded

    def _decode(self, request: pb.ComputeLogprobsRequest, model: ReferenceModel) -> list[Int32Array]:
        """Return the token ids of every sample, or refuse all because of one."""
        if not request.experiences:
            raise InvalidInput("the request has no experiences; send at least one")
        size = request.ByteSize()
        if size > MAX_REQUEST_BYTES:
            raise InvalidInput(f"the request has {size} bytes; at most {MAX_REQUEST_BYTES} fit: split it")
        return [self._token_ids(experience, model) for experience in request.experiences]

    def _token_ids(self, experience: Experience, model: ReferenceModel) -> Int32Array:
        who = check_id(experience.sample_id, "sample_id")
        if not 0 < experience.temperature <= 2:
            raise InvalidInput(f"sample {who}: temperature is {experience.temperature}; it must be in (0, 2]")
        return decode_token_ids(experience, vocabulary_size=model.vocabulary_size, max_tokens=self._max_context_tokens)
