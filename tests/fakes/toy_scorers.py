"""Fake reward and reference services of the toy model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from fourfold.config import Config
from fourfold.coordinator.v1.membership_service_pb2 import Role
from fourfold.reference.v1 import reference_service_pb2 as reference
from fourfold.reference.v1 import reference_service_pb2_grpc as reference_grpc
from fourfold.reward.v1 import reward_service_pb2 as reward
from fourfold.reward.v1 import reward_service_pb2_grpc as reward_grpc
from fourfold.rpc.codec import pack_floats, pack_ints
from tests.fakes.toy import Context, Member, Services, toy_logprobs


class FakeReward(Member, reward_grpc.RewardServiceServicer):
    """Scores 1 if the completion equals the answer, otherwise 0. `outcome` can replace the score of an item."""

    role = Role.ROLE_REWARD

    def __init__(self, member_id: str, config: Config) -> None:
        super().__init__(member_id, config)
        self.tokenizer_sha256 = b""  # a scorer of texts needs no tokenizer
        self.reads_messages = self.pure = False
        self.name = "toy@1"
        self.outcome: Callable[[reward.ScoreItem], reward.SampleScore | None] = lambda item: None
        self.calls = 0
        self.on_score: Callable[[], Any] | None = None
        """Awaited before each response."""

    def services(self) -> Services:
        service = reward.DESCRIPTOR.services_by_name["RewardService"]
        return [(service, reward_grpc.add_RewardServiceServicer_to_server)]

    async def GetInfo(self, request: reward.GetInfoRequest, context: Context) -> reward.GetInfoResponse:
        return reward.GetInfoResponse(
            name=self.name,
            max_sample_count=3,
            tokenizer_sha256=self.tokenizer_sha256,
            reads_messages=self.reads_messages,
            pure=self.pure,
        )

    async def Score(self, request: reward.ScoreRequest, context: Context) -> reward.ScoreResponse:
        self.calls += 1
        if self.on_score is not None:
            await self.on_score()
        return reward.ScoreResponse(scores=[self._score(item) for item in request.items])

    def _score(self, item: reward.ScoreItem) -> reward.SampleScore:
        special = self.outcome(item)
        if special is not None:
            special.sample_id = item.experience.sample_id
            return special
        right = float(item.completion_text == item.answer)
        return reward.SampleScore(sample_id=item.experience.sample_id, score=right)


def likely_tokens(count: int, k: int) -> tuple[Any, Any]:
    return np.tile(np.arange(k), (count, 1)), np.tile(-1.0 - np.arange(k), (count, 1))


class FakeReference(Member, reference_grpc.ReferenceServiceServicer):
    """Returns log-probabilities of the toy policy before training."""

    role = Role.ROLE_REFERENCE

    def __init__(self, member_id: str, config: Config) -> None:
        super().__init__(member_id, config)
        self.asked: list[str] = []
        """Ids of the samples in all calls."""
        self.top: Callable[[int, int], tuple[Any, Any]] = likely_tokens
        """Returns ids and log-probabilities of the k likeliest tokens in place of each of `count` tokens."""
        self.weights = 0
        self.on_call: Callable[[], Awaitable[None]] | None = None

    def services(self) -> Services:
        service = reference.DESCRIPTOR.services_by_name["ReferenceService"]
        return [(service, reference_grpc.add_ReferenceServiceServicer_to_server)]

    async def GetInfo(self, request: reference.GetInfoRequest, context: Context) -> reference.GetInfoResponse:
        return reference.GetInfoResponse(model="toy", tokenizer_sha256=self.tokenizer_sha256)

    async def ComputeLogprobs(
        self, request: reference.ComputeLogprobsRequest, context: Context
    ) -> reference.ComputeLogprobsResponse:
        self.asked += [e.sample_id for e in request.experiences]
        if self.on_call is not None:
            await self.on_call()
        rows = [toy_logprobs(self.weights, np.frombuffer(e.token_ids, "<i4")) for e in request.experiences]
        answer = reference.ComputeLogprobsResponse(logprobs=[pack_floats(row) for row in rows])
        for row in rows if request.top_k else []:
            ids, logprobs = self.top(len(row), request.top_k)
            answer.top_ids.append(pack_ints(ids))
            answer.top_logprobs.append(pack_floats(logprobs))
        return answer
