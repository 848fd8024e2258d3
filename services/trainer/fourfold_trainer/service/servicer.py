"""Implements TrainerService: checks and decodes requests, runs them in the engine thread, and encodes the answers."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Final, Literal, ParamSpec, TypeVar

import grpc
import numpy as np
from google.protobuf.message import Message

from fourfold import metrics
from fourfold.arrays import EMPTY_FLOATS, BoolArray, Float32Array
from fourfold.bounds import MAX_RAISED_VERSION, check_number
from fourfold.contract import CONTRACT_VERSION
from fourfold.errors import InvalidInput
from fourfold.rpc.codec import check_id, pack_floats, unpack_floats
from fourfold.sample import Sample, check_unique
from fourfold.sample.columns import Samples
from fourfold.sample.wire import decode, decode_token_ids
from fourfold.tracing import spans
from fourfold.trainer.v1 import trainer_service_pb2 as pb
from fourfold.trainer.v1 import trainer_service_pb2_grpc as pb_grpc
from fourfold.types.v1 import experience_pb2
from fourfold_trainer.checkpoint.store import StepAnswer
from fourfold_trainer.service import batch_stream
from fourfold_trainer.service.engine_thread import Phase
from fourfold_trainer.service.state import Status, TrainerCore
from fourfold_trainer.step.accumulation import OptimCall, Part

P = ParamSpec("P")
T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

_REQUEST_BYTES: Final = 8 << 20
_NO_FLAGS: Final[BoolArray] = np.empty(0, np.bool_)


class TrainerServicer(pb_grpc.TrainerServiceServicer):
    """Answers on the event loop; decoding and all work on the engine runs in threads."""

    def __init__(self, core: TrainerCore, *, tokenizer_sha256: bytes = b"") -> None:
        self._core = core
        self._admission = batch_stream.StreamAdmission()
        self.tokenizer_sha256 = tokenizer_sha256  # 32 bytes; empty until the model folder is known

    @property
    def admitted(self) -> set[int]:
        """Steps whose batches are read or trained."""
        return self._admission.steps

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(status=self._status(self._core.status()), contract_version=CONTRACT_VERSION)

    async def WatchStatus(
        self, request: pb.WatchStatusRequest, context: Context
    ) -> AsyncIterator[pb.WatchStatusResponse]:
        async for status in self._core.watch():
            yield pb.WatchStatusResponse(status=self._status(status))

    async def TrainStep(
        self, request_iterator: AsyncIterator[pb.TrainStepRequest], context: Context
    ) -> pb.TrainStepResponse:
        """Check the first message, then read the others and train."""
        requests = batch_stream.read_messages(
            request_iterator,
            timeout=self._core.config.trainer.step_timeout_seconds,
            may_wait=lambda: self._core.status().phase is not Phase.WAITING,  # of the next step, for its turn
        )
        async with aclosing(requests):
            first = await anext(requests, None)
            if first is None:
                raise InvalidInput("the call has no message; send the step and its experiences")
            step = check_number(first.step, "step", least=1)
            explicit = first.HasField("begin")
            is_new = self._core.check_step(step, running=self.admitted if explicit else ())
            with self._admission.enter(step):
                batch = batch_stream.IncomingBatch(step, self._core.config, self._decode, keep=is_new)
                await asyncio.to_thread(batch.add, first)
                async for request in requests:
                    await asyncio.to_thread(batch.add, request)
                if explicit and not batch.complete:  # gRPC also ends the stream of a caller that died
                    raise InvalidInput(f"the batch of step {step} ended without begin = true; send it again")
                samples = batch.samples if is_new else None
                with spans.current().child("optimizer_step", attributes={"fourfold.step": step}) as work:
                    answer = await self._run(
                        context, Phase.TRAINING, self._core.train_step, step, samples, batch.sha256
                    )
                    work.set({"fourfold.policy_version": answer.policy_version})
        return _step_response(answer)

    async def ForwardBackward(self, request: pb.ForwardBackwardRequest, context: Context) -> pb.ForwardBackwardResponse:
        part = await asyncio.to_thread(self._decode_part, request)
        answer = await self._run(context, Phase.TRAINING, self._core.forward_backward, part)
        return pb.ForwardBackwardResponse(
            loss=answer.loss,
            logprobs=[pack_floats(row) for row in answer.logprobs],
            policy_version=answer.policy_version,
        )

    async def OptimStep(self, request: pb.OptimStepRequest, context: Context) -> pb.OptimStepResponse:
        call = OptimCall(
            step=check_number(request.step, "step", least=1),
            learning_rate=_number(request, "learning_rate"),
            max_grad_norm=_number(request, "max_grad_norm"),
            sha256=_sha256(request),
        )
        answer = await self._run(context, Phase.TRAINING, self._core.optim_step, call)
        return pb.OptimStepResponse(
            step=answer.step,
            policy_version=answer.policy_version,
            skipped_reason=answer.skipped_reason,
            grad_norm=answer.metrics[metrics.GRAD_NORM],
        )

    async def DiscardGradient(self, request: pb.DiscardGradientRequest, context: Context) -> pb.DiscardGradientResponse:
        part_count = await self._run(context, Phase.TRAINING, self._core.discard_gradient)
        return pb.DiscardGradientResponse(part_count=part_count)

    async def ComputeLogprobs(self, request: pb.ComputeLogprobsRequest, context: Context) -> pb.ComputeLogprobsResponse:
        """Compute log-probabilities under the current weights, and entropies and values if asked for."""
        more = request.include_entropies or request.include_values
        _check_size(request, request.experiences, limit=_REQUEST_BYTES // 2 if more else _REQUEST_BYTES)
        if request.losses_of_step:
            return await self._losses(request, context)
        if request.reference_of_step:
            return await self._reference(request, context)
        samples = Samples.of(map(self._lookup_sample, request.experiences))
        found, version = await self._run(
            context,
            Phase.COMPUTING,
            self._core.forward,
            samples,
            entropies=request.include_entropies,
            values=request.include_values,
        )
        return pb.ComputeLogprobsResponse(
            logprobs=[pack_floats(row) for row in found.logprobs],
            entropies=[pack_floats(row) for row in found.entropies],
            values=[pack_floats(row) for row in found.values],
            policy_version=version,
        )

    async def _reference(self, request: pb.ComputeLogprobsRequest, context: Context) -> pb.ComputeLogprobsResponse:
        step = check_number(request.reference_of_step, "reference_of_step", least=1)
        if request.include_entropies or request.include_values:
            raise InvalidInput(f"reference_of_step = {step} has log-probabilities alone; ask for nothing else with it")
        samples = await asyncio.to_thread(lambda: [self._decode(message) for message in request.experiences])
        rows, version = await self._run(context, Phase.COMPUTING, self._core.compute_reference, samples, step)
        return pb.ComputeLogprobsResponse(logprobs=[pack_floats(row) for row in rows], policy_version=version)

    async def _losses(self, request: pb.ComputeLogprobsRequest, context: Context) -> pb.ComputeLogprobsResponse:
        step = check_number(request.losses_of_step, "losses_of_step", least=1)
        if request.include_entropies or request.include_values or request.reference_of_step:
            raise InvalidInput(f"losses_of_step = {step} has losses alone; ask for nothing else with it")
        samples = await asyncio.to_thread(lambda: [self._decode(message) for message in request.experiences])
        found, version = await self._run(context, Phase.COMPUTING, self._core.compute_unit_losses, samples, step)
        return pb.ComputeLogprobsResponse(unit_losses=found.losses, unit_margins=found.margins, policy_version=version)

    async def SaveCheckpoint(self, request: pb.SaveCheckpointRequest, context: Context) -> pb.SaveCheckpointResponse:
        score = request.score if request.HasField("score") else None
        if score is not None and not math.isfinite(score):
            raise InvalidInput(f"score is {score}; it must be finite: leave it out when there is none")
        return pb.SaveCheckpointResponse(step=await self._run(context, Phase.SAVING, self._core.save_checkpoint, score))

    async def LoadCheckpoint(self, request: pb.LoadCheckpointRequest, context: Context) -> pb.LoadCheckpointResponse:
        step = check_number(request.step, "step")
        status = await self._run(context, Phase.SAVING, self._core.load_checkpoint, step)
        return pb.LoadCheckpointResponse(status=self._status(status))

    async def ExportModel(self, request: pb.ExportModelRequest, context: Context) -> pb.ExportModelResponse:
        name = check_id(request.name, "name")
        path = await self._run(context, Phase.SAVING, self._core.export, name, ema=request.ema, critic=request.critic)
        return pb.ExportModelResponse(path=str(path))

    async def RaisePolicyVersion(
        self, request: pb.RaisePolicyVersionRequest, context: Context
    ) -> pb.RaisePolicyVersionResponse:
        asked = check_number(request.policy_version, "policy_version", most=MAX_RAISED_VERSION)
        version = await self._run(context, Phase.WAITING, self._core.raise_policy_version, asked)
        return pb.RaisePolicyVersionResponse(policy_version=version)

    async def _run(
        self, context: Context, phase: Phase, method: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a method of the core in the engine thread, within the caller's deadline."""
        return await self._core.run(phase, time_left(context), method, *args, **kwargs)

    def _status(self, status: Status) -> pb.TrainerStatus:
        return pb.TrainerStatus(
            step=status.state.step,
            policy_version=status.state.policy_version,
            phase=pb.TrainerPhase.Value(f"TRAINER_PHASE_{status.phase.name}"),
            checkpoint_step=status.checkpoint_step,
            skipped_step_count=status.state.skipped_step_count,
            rank_count=self._core.config.trainer.ranks,
            tokenizer_sha256=self.tokenizer_sha256,
            vocabulary_size=status.vocabulary_size,
            max_context_tokens=self._core.config.model.max_context_tokens,
            gradient_part_count=status.gradient.part_count,
            last_step=None if status.state.answer is None else _step_response(status.state.answer),
        )

    def _decode(self, message: experience_pb2.Experience) -> Sample:
        return decode(message, **self._token_limits())

    def _token_limits(self) -> dict[str, int]:
        return {
            "vocabulary_size": self._core.engine.vocabulary_size,
            "max_tokens": self._core.config.model.max_context_tokens,
        }

    def _decode_part(self, request: pb.ForwardBackwardRequest) -> Part:
        step, number = check_number(request.step, "step", least=1), check_number(request.part, "part", least=1)
        experiences = [message.experience for message in request.samples]
        _check_size(request, experiences, limit=_REQUEST_BYTES)
        samples = Samples.of(map(self._lookup_sample, experiences))
        weights = [
            _loss_weights(message, count) for message, count in zip(request.samples, samples.lengths, strict=True)
        ]
        return Part(step=step, number=number, samples=samples, weights=weights, sha256=_sha256(request))

    def _lookup_sample(self, message: experience_pb2.Experience) -> Sample:
        """Return a sample with id, token ids and temperature alone."""
        sample_id = check_id(message.sample_id, "sample_id")
        ids = decode_token_ids(message, **self._token_limits())
        if not 0 < message.temperature <= 2:
            raise InvalidInput(f"sample {sample_id}: temperature is {message.temperature}; it must be in (0, 2]")
        return Sample(
            sample_id=sample_id,
            group_id=sample_id,
            token_ids=ids,
            behavior_logprobs=EMPTY_FLOATS,
            action_mask=_NO_FLAGS,
            loss_mask=_NO_FLAGS,
            version_spans=(),
            temperature=message.temperature,
        )


def _step_response(answer: StepAnswer) -> pb.TrainStepResponse:
    return pb.TrainStepResponse(
        step=answer.step,
        policy_version=answer.policy_version,
        skipped_reason=answer.skipped_reason,
        metrics=answer.metrics,
    )


def _check_size(request: Message, experiences: Sequence[experience_pb2.Experience], *, limit: int) -> None:
    if not experiences:
        raise InvalidInput("the request has no samples; send at least one")
    if request.ByteSize() > limit:
        raise InvalidInput(
            f"the request has {request.ByteSize()} bytes; send at most {limit} at once, and the rest after"
        )
    check_unique(message.sample_id for message in experiences)


def _loss_weights(message: pb.WeightedSample, count: int) -> Float32Array:
    sample_id = message.experience.sample_id
    weights = unpack_floats(message.loss_weights, count, sample_id, "loss_weights")
    wrong = np.flatnonzero(~np.isfinite(weights))
    if len(wrong):
        raise InvalidInput(f"sample {sample_id}: loss_weights[{wrong[0]}] is {weights[wrong[0]]}; it must be finite")
    if weights[0]:
        raise InvalidInput(
            f"sample {sample_id}: loss_weights[0] is {weights[0]}; it must be 0: nothing comes before the first token"
        )
    return weights


def _number(request: pb.OptimStepRequest, name: Literal["learning_rate", "max_grad_norm"]) -> float | None:
    """Return an optional field, None if unset; raise InvalidInput unless it is finite and not negative."""
    if not request.HasField(name):
        return None
    value: float = getattr(request, name)
    if not (math.isfinite(value) and value >= 0):
        raise InvalidInput(f"{name} is {value}; it must be finite and at least 0, or unset for the recipe's")
    return value


def _sha256(request: Message) -> str:
    return hashlib.sha256(request.SerializeToString(deterministic=True)).hexdigest()


def time_left(context: Context) -> float:
    """Return the seconds to the caller's deadline. The server's interceptor refuses calls without one."""
    left = context.time_remaining()
    return max(left, 0.0) if left is not None else 0.0
