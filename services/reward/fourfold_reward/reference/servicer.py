"""ReferenceService on one frozen model.

    ComputeLogprobs --checked--> executor of one thread (one call at a time) --> answer

The model runs in a thread, so that health and GetInfo are answered meanwhile. A call whose
client went away stops at its next batch.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import grpc

from fourfold.errors import InvalidInput, Overloaded, Unavailable
from fourfold.reference.v1 import reference_service_pb2 as pb
from fourfold.reference.v1 import reference_service_pb2_grpc as pb_grpc
from fourfold.types.v1.experience_pb2 import Experience
from fourfold.wire import Float32Array, Int32Array, check_id, decode_token_ids, pack_floats
from fourfold_reward.reference.model import ReferenceModel, Stopped

MAX_REQUEST_BYTES: Final = 8 << 20
MAX_CALLS: Final = 16


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
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reference")
        self._closing = threading.Event()
        self._calls = 0
        self._mean_seconds = 1.0

    def set_ready(self, loaded: Loaded) -> None:
        """Serve this from now on."""
        self._loaded = loaded

    async def close(self) -> None:
        """Stop what is being computed at its next batch, and what waits at once."""
        self._closing.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

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
        if self._calls >= MAX_CALLS:
            raise Overloaded(
                f"{self._calls} calls are being worked on; at most {MAX_CALLS} may wait: come back later, or start "
                "more reference services",
                reason="QUEUE_FULL",
                retry_after=min(self._mean_seconds * MAX_CALLS / 2, 30.0),
            )
        self._calls += 1
        try:
            rows = await self._compute(model, token_ids, [e.temperature for e in request.experiences])
        finally:
            self._calls -= 1
        return pb.ComputeLogprobsResponse(logprobs=[pack_floats(row) for row in rows])

    async def _compute(
        self, model: ReferenceModel, token_ids: list[Int32Array], temperatures: list[float]
    ) -> list[Float32Array]:
        gone = threading.Event()

        def work() -> list[Float32Array]:
            started = time.monotonic()
            rows = model.logprobs(token_ids, temperatures, stopped=lambda: gone.is_set() or self._closing.is_set())
            self._mean_seconds += 0.2 * (time.monotonic() - started - self._mean_seconds)
            return rows

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except Stopped:
            raise Unavailable("the reference service is stopping; try another one") from None
        finally:
            gone.set()

    def _ready(self) -> Loaded:
        if self._loaded is None:
            raise Unavailable("the reference model is loading; try again in a few seconds", retry_after=1.0)
        if self._closing.is_set():
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
