"""Servicers that answer what a test tells them to, and the messages that tests send them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np

from fourfold import errors
from fourfold.reference.v1 import reference_service_pb2 as reference
from fourfold.reference.v1 import reference_service_pb2_grpc as reference_grpc
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.reward.v1 import reward_service_pb2_grpc as reward_grpc
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rollout.v1 import rollout_service_pb2_grpc as rollout_grpc
from fourfold.rpc.codec import pack_floats, pack_ints
from fourfold.sample import Sample, VersionSpan
from fourfold.trainer.v1 import trainer_service_pb2 as trainer
from fourfold.trainer.v1 import trainer_service_pb2_grpc as trainer_grpc
from fourfold.types.v1 import experience_pb2 as types
from tests.conftest import Servicer

REWARD = reward.DESCRIPTOR.services_by_name["RewardService"]
ROLLOUT = rollout.DESCRIPTOR.services_by_name["RolloutService"]
TRAINER = trainer.DESCRIPTOR.services_by_name["TrainerService"]
REFERENCE = reference.DESCRIPTOR.services_by_name["ReferenceService"]
Context = grpc.aio.ServicerContext[Any, Any]


class Reward(reward_grpc.RewardServiceServicer):
    """Raises what it is given, or answers what it is given."""

    def __init__(self, *, raises: BaseException | None = None, answer: reward.ScoreResponse | None = None) -> None:
        self.raises, self.answer = raises, answer
        self.calls: list[reward.ScoreRequest] = []
        self.failures_left = 0

    async def GetInfo(self, request: reward.GetInfoRequest, context: Context) -> reward.GetInfoResponse:
        self.calls.append(reward.ScoreRequest())
        if self.failures_left:
            self.failures_left -= 1
            raise errors.Unavailable("not yet")
        return reward.GetInfoResponse(name="x@1")

    async def Score(self, request: reward.ScoreRequest, context: Context) -> reward.ScoreResponse:
        self.calls.append(request)
        if self.raises is not None:
            raise self.raises
        if self.answer is not None:
            return self.answer
        ids = [item.experience.sample_id for item in request.items]
        return reward.ScoreResponse(scores=[reward.SampleScore(sample_id=i, score=1.0) for i in ids])

    def servicer(self) -> Servicer:
        return REWARD, reward_grpc.add_RewardServiceServicer_to_server, self


class Rollout(rollout_grpc.RolloutServiceServicer):
    """Streams what it is given; remembers how its generator ended."""

    def __init__(self, *chunks: rollout.SampleChunk | Exception, hang: bool = False) -> None:
        self.chunks, self.hang = chunks, hang
        self.entered, self.hanging, self.closed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.how = ""

    async def GetInfo(self, request: rollout.GetInfoRequest, context: Context) -> rollout.GetInfoResponse:
        return rollout.GetInfoResponse()

    async def Generate(
        self, request: rollout.GenerateRequest, context: Context
    ) -> AsyncIterator[rollout.GenerateResponse]:
        self.entered.set()
        try:
            for chunk in self.chunks:
                if isinstance(chunk, Exception):
                    raise chunk
                yield rollout.GenerateResponse(chunks=[chunk])
            if self.hang:
                self.hanging.set()
                await asyncio.sleep(30)
        except BaseException as error:
            self.how = type(error).__name__
            raise
        finally:
            self.closed.set()

    async def ScoreTokens(self, request: rollout.ScoreTokensRequest, context: Context) -> rollout.ScoreTokensResponse:
        raise errors.WrongState("scores no tokens")

    async def ParseCompletion(
        self, request: rollout.ParseCompletionRequest, context: Context
    ) -> rollout.ParseCompletionResponse:
        raise errors.WrongState("parses no completions")

    async def WatchLoad(
        self, request: rollout.WatchLoadRequest, context: Context
    ) -> AsyncIterator[rollout.WatchLoadResponse]:
        yield rollout.WatchLoadResponse(policy_version=7)

    def servicer(self) -> Servicer:
        return ROLLOUT, rollout_grpc.add_RolloutServiceServicer_to_server, self


class Trainer(trainer_grpc.TrainerServiceServicer):
    """Collects a batch."""

    def __init__(self, *, raises: Exception | None = None) -> None:
        self.raises = raises
        self.messages: list[trainer.TrainStepRequest] = []

    async def GetStatus(self, request: trainer.GetStatusRequest, context: Context) -> trainer.GetStatusResponse:
        return trainer.GetStatusResponse(status=trainer.TrainerStatus(step=3))

    async def WatchStatus(
        self, request: trainer.WatchStatusRequest, context: Context
    ) -> AsyncIterator[trainer.WatchStatusResponse]:
        for step in (3, 4):
            yield trainer.WatchStatusResponse(status=trainer.TrainerStatus(step=step))

    async def TrainStep(
        self, request_iterator: AsyncIterator[trainer.TrainStepRequest], context: Context
    ) -> trainer.TrainStepResponse:
        async for message in request_iterator:
            if self.raises is not None:
                raise self.raises
            self.messages.append(message)
        count = sum(len(m.experiences) for m in self.messages)
        return trainer.TrainStepResponse(step=self.messages[-1].step, metrics={"train/samples_per_step": count})

    async def _never(self, request: Any, context: Context) -> Any:
        raise AssertionError("not called here")

    ForwardBackward = OptimStep = DiscardGradient = _never
    ComputeLogprobs = SaveCheckpoint = LoadCheckpoint = ExportModel = RaisePolicyVersion = _never

    def servicer(self) -> Servicer:
        return TRAINER, trainer_grpc.add_TrainerServiceServicer_to_server, self


class Reference(reference_grpc.ReferenceServiceServicer):
    """Answers minus the token id; `broken` changes the rows."""

    def __init__(self, broken: Any = None) -> None:
        self.broken = broken
        self.calls = 0

    async def GetInfo(self, request: reference.GetInfoRequest, context: Context) -> reference.GetInfoResponse:
        return reference.GetInfoResponse(model="m")

    async def ComputeLogprobs(
        self, request: reference.ComputeLogprobsRequest, context: Context
    ) -> reference.ComputeLogprobsResponse:
        self.calls += 1
        rows = []
        for experience in request.experiences:
            row = -np.frombuffer(experience.token_ids, "<i4").astype(np.float32) * experience.temperature
            row[0] = np.nan
            rows.append(pack_floats(row))
        return reference.ComputeLogprobsResponse(logprobs=self.broken(rows) if self.broken else rows)

    def servicer(self) -> Servicer:
        return REFERENCE, reference_grpc.add_ReferenceServiceServicer_to_server, self


def score_item(sample_id: str, text: str = "") -> reward.ScoreItem:
    return reward.ScoreItem(experience=types.Experience(sample_id=sample_id), prompt_text=text)


def generated(index: int, *ids: int, version: int = 0, done: bool = False) -> rollout.SampleChunk:
    return rollout.SampleChunk(
        sample_index=index,
        token_ids=pack_ints(ids),
        logprobs=pack_floats(np.full(len(ids), -0.5, np.float32)),
        policy_version=version,
        finish_reason=rollout.FINISH_REASON_STOP if done else rollout.FINISH_REASON_UNSPECIFIED,
    )


def sample(sample_id: str, tokens: int = 4) -> Sample:
    mask = np.arange(tokens) > 0
    return Sample(
        sample_id=sample_id,
        group_id="g",
        token_ids=np.arange(tokens, dtype=np.int32),
        behavior_logprobs=np.where(mask, np.float32(-1), np.float32("nan")).astype(np.float32),
        action_mask=mask,
        loss_mask=mask,
        version_spans=(
            VersionSpan(policy_version=-1, token_count=1),
            VersionSpan(policy_version=0, token_count=tokens - 1),
        ),
        temperature=1.0,
    )
