"""TrainerService: messages in, messages out. What they mean is in core.py."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Iterable
from typing import Any, Final

import grpc
import numpy as np

from fourfold.errors import InvalidInput
from fourfold.trainer.v1 import trainer_service_pb2 as pb
from fourfold.trainer.v1 import trainer_service_pb2_grpc as pb_grpc
from fourfold.types.v1 import experience_pb2
from fourfold.wire import BoolArray, Float32Array, Sample, check_id, check_unique, decode, decode_token_ids, pack_floats
from fourfold_trainer.core import Status, TrainerCore
from fourfold_trainer.engine_thread import Phase

Context = grpc.aio.ServicerContext[Any, Any]

_MESSAGE_BYTES: Final = 4 << 20
_BATCH_BYTES: Final = 2 << 30
_LOOKUP_BYTES: Final = 8 << 20
_NO_FLOATS: Final[Float32Array] = np.empty(0, np.float32)
_NO_FLAGS: Final[BoolArray] = np.empty(0, np.bool_)
_PHASES: Final = {
    Phase.STARTING: pb.TRAINER_PHASE_STARTING,
    Phase.WAITING: pb.TRAINER_PHASE_WAITING,
    Phase.TRAINING: pb.TRAINER_PHASE_TRAINING,
    Phase.PUBLISHING: pb.TRAINER_PHASE_PUBLISHING,
    Phase.SAVING: pb.TRAINER_PHASE_SAVING,
    Phase.COMPUTING: pb.TRAINER_PHASE_COMPUTING,
}


class TrainerServicer(pb_grpc.TrainerServiceServicer):
    """Answers on the event loop; whatever takes longer than a millisecond runs in a thread."""

    def __init__(self, core: TrainerCore, *, tokenizer_sha256: bytes = b"") -> None:
        self._core = core
        self.tokenizer_sha256 = tokenizer_sha256
        """32 bytes; empty until the model folder is known."""

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        """Report once."""
        return pb.GetStatusResponse(status=self._status(self._core.status()))

    async def WatchStatus(
        self, request: pb.WatchStatusRequest, context: Context
    ) -> AsyncIterator[pb.WatchStatusResponse]:
        """Report now and on every change."""
        async for status in self._core.watch():
            yield pb.WatchStatusResponse(status=self._status(status))

    async def TrainStep(
        self, request_iterator: AsyncIterator[pb.TrainStepRequest], context: Context
    ) -> pb.TrainStepResponse:
        """Read and check the whole batch, train. A message is decoded while the next one travels."""
        step, size = 0, 0
        samples: list[Sample] = []
        # Of the batch; it does not depend on how that was cut into messages.
        digest = hashlib.sha256()
        async for request in request_iterator:
            step = _check_step(request.step, step)
            part, part_size = await asyncio.to_thread(self._decode_part, request.experiences, digest)
            samples += part
            size += part_size
            if size > _BATCH_BYTES:
                raise InvalidInput(f"the batch has more than {_BATCH_BYTES} bytes; train on fewer samples a step")
        if not step:
            raise InvalidInput("the call has no message; send the step and its experiences")
        answer = await self._core.train_step(step, samples, digest.hexdigest(), timeout=time_left(context))
        return pb.TrainStepResponse(
            step=answer.step,
            policy_version=answer.policy_version,
            skipped_reason=answer.skipped_reason,
            metrics=answer.metrics,
        )

    async def ComputeLogprobs(self, request: pb.ComputeLogprobsRequest, context: Context) -> pb.ComputeLogprobsResponse:
        """Look samples up under the present weights."""
        samples = self._decode_lookup(request)
        rows, version = await self._core.compute_logprobs(samples, timeout=time_left(context))
        return pb.ComputeLogprobsResponse(logprobs=[pack_floats(row) for row in rows], policy_version=version)

    async def SaveCheckpoint(self, request: pb.SaveCheckpointRequest, context: Context) -> pb.SaveCheckpointResponse:
        """Write a checkpoint."""
        score = request.score if request.HasField("score") else None
        if score is not None and not math.isfinite(score):
            raise InvalidInput(f"score is {score}; it must be finite: leave it out when there is none")
        step = await self._core.save_checkpoint(score=score, timeout=time_left(context))
        return pb.SaveCheckpointResponse(step=step)

    async def LoadCheckpoint(self, request: pb.LoadCheckpointRequest, context: Context) -> pb.LoadCheckpointResponse:
        """Restore a checkpoint."""
        if request.step < 0:
            raise InvalidInput(f"step is {request.step}; it must be at least 0")
        status = await self._core.load_checkpoint(request.step, timeout=time_left(context))
        return pb.LoadCheckpointResponse(status=self._status(status))

    async def ExportModel(self, request: pb.ExportModelRequest, context: Context) -> pb.ExportModelResponse:
        """Write a Hugging Face folder."""
        name = check_id(request.name, "name")
        path = await self._core.export(name, ema=request.ema, timeout=time_left(context))
        return pb.ExportModelResponse(path=str(path))

    async def RaisePolicyVersion(
        self, request: pb.RaisePolicyVersionRequest, context: Context
    ) -> pb.RaisePolicyVersionResponse:
        """Give the present weights a higher version."""
        if request.policy_version < 0:
            raise InvalidInput(f"policy_version is {request.policy_version}; it must be at least 0")
        version = await self._core.raise_policy_version(request.policy_version, timeout=time_left(context))
        return pb.RaisePolicyVersionResponse(policy_version=version)

    def _status(self, status: Status) -> pb.TrainerStatus:
        return pb.TrainerStatus(
            step=status.state.step,
            policy_version=status.state.policy_version,
            phase=_PHASES[status.phase],
            checkpoint_step=status.checkpoint_step,
            skipped_step_count=status.state.skipped_step_count,
            rank_count=self._core.config.trainer.ranks,
            tokenizer_sha256=self.tokenizer_sha256,
            vocabulary_size=status.vocabulary_size,
            max_context_tokens=self._core.config.model.max_context_tokens,
        )

    def _decode_part(
        self, experiences: Iterable[experience_pb2.Experience], digest: hashlib._Hash
    ) -> tuple[list[Sample], int]:
        """Return one message's samples and their bytes, and add them to the batch's SHA-256."""
        samples, size = [], 0
        for message in experiences:
            data = message.SerializeToString(deterministic=True)
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
            size += len(data)
            if size > _MESSAGE_BYTES:
                raise InvalidInput(f"a message has more than {_MESSAGE_BYTES} bytes of experiences; send several")
            samples.append(
                decode(
                    message,
                    vocabulary_size=self._core.vocabulary_size,
                    max_tokens=self._core.config.model.max_context_tokens,
                )
            )
        return samples, size

    def _decode_lookup(self, request: pb.ComputeLogprobsRequest) -> list[Sample]:
        """Return samples of which only id, tokens and temperature are read."""
        if not request.experiences:
            raise InvalidInput("the request has no experiences; send at least one")
        if request.ByteSize() > _LOOKUP_BYTES:
            raise InvalidInput(f"the request has {request.ByteSize()} bytes; send at most {_LOOKUP_BYTES} at once")
        check_unique(message.sample_id for message in request.experiences)
        return [self._lookup_sample(message) for message in request.experiences]

    def _lookup_sample(self, message: experience_pb2.Experience) -> Sample:
        who = check_id(message.sample_id, "sample_id")
        ids = decode_token_ids(
            message,
            vocabulary_size=self._core.vocabulary_size,
            max_tokens=self._core.config.model.max_context_tokens,
        )
        if not 0 < message.temperature <= 2:
            raise InvalidInput(f"sample {who}: temperature is {message.temperature}; it must be in (0, 2]")
        return Sample(
            sample_id=who,
            group_id=who,
            token_ids=ids,
            behavior_logprobs=_NO_FLOATS,
            action_mask=_NO_FLAGS,
            loss_mask=_NO_FLAGS,
            version_spans=(),
            temperature=message.temperature,
        )


def _check_step(step: int, before: int) -> int:
    """Return the step of one message of a batch; `before` is that of the message before it, 0 for the first."""
    if step < 1 or before not in (0, step):
        raise InvalidInput(
            f"step is {step}; it must be at least 1, and the same in every message of a call ({before or step})"
        )
    return step


def time_left(context: Context) -> float:
    """Return seconds to the caller's deadline; there always is one, the interceptor sees to it."""
    left = context.time_remaining()
    return max(left, 0.0) if left is not None else 0.0
