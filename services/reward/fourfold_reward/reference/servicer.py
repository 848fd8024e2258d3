"""Implements ReferenceService on one frozen model: checks the requests and returns the rows of the dynamic batcher.

The model runs in a thread, so that health checks and GetInfo are answered at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import grpc

from fourfold.arrays import Int32Array
from fourfold.bounds import MAX_TEACHER_TOKENS
from fourfold.contract import CONTRACT_VERSION
from fourfold.errors import InvalidInput, Overloaded, Unavailable
from fourfold.reference.v1 import reference_service_pb2 as pb
from fourfold.reference.v1 import reference_service_pb2_grpc as pb_grpc
from fourfold.rpc.codec import check_id, pack_floats, pack_ints
from fourfold.sample.wire import decode_token_ids
from fourfold_reward.reference.batcher import DynamicBatcher
from fourfold_reward.reference.model import ReferenceModel, Stopped

MAX_REQUEST_BYTES: Final = 8 << 20
# All groups of a step may arrive at once. MAX_WAITING_BYTES limits the memory of the calls that wait.
MAX_CALLS: Final = 1024
MAX_WAITING_BYTES: Final = 128 << 20
_MAX_RETRY_AFTER_SECONDS: Final = 30.0


class ReferenceServicer(pb_grpc.ReferenceServiceServicer):
    """Computes log-probabilities. Calls fail with UNAVAILABLE until `set_ready`."""

    def __init__(self, *, name: str, max_context_tokens: int, on_failure: Callable[[str], None]) -> None:
        """Serve a model that may still be loading.

        Args:
            name: the model's in the recipe.
            max_context_tokens: of the longest sample.
            on_failure: called with a message when the model cannot compute any more.
        """
        self._name = name
        self._max_context_tokens = max_context_tokens
        self._model: ReferenceModel | None = None
        self._tokenizer_sha256 = b""
        self.batcher = DynamicBatcher(on_failure)
        self._calls = self._waiting_bytes = 0

    def set_ready(self, model: ReferenceModel, *, tokenizer_sha256: bytes) -> None:
        """Accept calls for this model."""
        self._tokenizer_sha256 = tokenizer_sha256
        self._model = model

    async def close(self) -> None:
        """Stop the running batch before its next forward pass, and fail the waiting calls."""
        self.batcher.closing.set()

    async def GetInfo(
        self, request: pb.GetInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetInfoResponse:
        """Return the model's name, sizes and tokenizer hash."""
        model = self._ready_model()
        return pb.GetInfoResponse(
            model=self._name,
            tokenizer_sha256=self._tokenizer_sha256,
            max_context_tokens=self._max_context_tokens,
            vocabulary_size=model.vocabulary_size,
            contract_version=CONTRACT_VERSION,
        )

    async def ComputeLogprobs(
        self, request: pb.ComputeLogprobsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ComputeLogprobsResponse:
        """Check every sample, then compute their log-probabilities."""
        model = self._ready_model()
        token_ids = self._decode(request, model)
        size = request.ByteSize()
        if self._calls >= MAX_CALLS or self._waiting_bytes + size > MAX_WAITING_BYTES:
            raise Overloaded(
                f"{self._calls} calls with {self._waiting_bytes >> 20} MiB are in progress; at most {MAX_CALLS} "
                f"with {MAX_WAITING_BYTES >> 20} MiB are allowed: come back later, or start more reference services",
                reason="QUEUE_FULL",
                retry_after=min(self.batcher.mean_seconds, _MAX_RETRY_AFTER_SECONDS),
            )
        self._calls += 1
        self._waiting_bytes += size
        try:
            temperatures, top_k = [e.temperature for e in request.experiences], request.top_k
            rows = await self.batcher.logprobs(model, token_ids, temperatures, top_k=top_k)
        except Stopped:
            raise Unavailable("the reference service is stopping; try another one") from None
        finally:
            self._calls -= 1
            self._waiting_bytes -= size
        # The calls of a batch share the largest top_k, so that a row may have more.
        return pb.ComputeLogprobsResponse(
            logprobs=[pack_floats(row.logprobs) for row in rows],
            top_ids=[pack_ints(row.top_ids[:, :top_k]) for row in rows if top_k],
            top_logprobs=[pack_floats(row.top_logprobs[:, :top_k]) for row in rows if top_k],
        )

    def _ready_model(self) -> ReferenceModel:
        if self._model is None:
            raise Unavailable("the reference model is loading; try again in a few seconds", retry_after=1.0)
        if self.batcher.closing.is_set():
            raise Unavailable("the reference service is stopping; try another one")
        return self._model

    def _decode(self, request: pb.ComputeLogprobsRequest, model: ReferenceModel) -> list[Int32Array]:
        """Return the token ids of every sample; one malformed sample fails the call."""
        if not request.experiences:
            raise InvalidInput("the request has no experiences; send at least one")
        size = request.ByteSize()
        if size > MAX_REQUEST_BYTES:
            raise InvalidInput(f"the request has {size} bytes; at most {MAX_REQUEST_BYTES} fit: split it")
        limits = {"vocabulary_size": model.vocabulary_size, "max_tokens": self._max_context_tokens}
        token_ids = []
        for experience in request.experiences:
            sample_id = check_id(experience.sample_id, "sample_id")
            if not 0 < experience.temperature <= 2:
                raise InvalidInput(f"sample {sample_id}: temperature is {experience.temperature}; it must be in (0, 2]")
            token_ids.append(decode_token_ids(experience, **limits))
        top_k, tokens, most = request.top_k, sum(map(len, token_ids)), min(MAX_TEACHER_TOKENS, model.ids_below)
        if not 0 <= top_k <= most:
            raise InvalidInput(f"top_k is {top_k}; it must be in [0, {most}]")
        if top_k and (size := tokens * (4 + 8 * top_k)) > MAX_REQUEST_BYTES:
            raise InvalidInput(
                f"the response to {tokens} tokens with top_k = {top_k} has {size} bytes; at most {MAX_REQUEST_BYTES} "
                f"fit: split the request"
            )
        return token_ids
