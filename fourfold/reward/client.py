"""Client of a reward service, ours or anybody's: what it answers is checked before it is used."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Final

import grpc
from google.rpc.code_pb2 import INTERNAL

from fourfold.channel import call
from fourfold.errors import InvalidInput
from fourfold.reward.v1 import reward_service_pb2 as pb
from fourfold.reward.v1 import reward_service_pb2_grpc as pb_grpc

# The proto allows 8 MiB; smaller calls spread their work better.
_REQUEST_BYTES: Final = 4 << 20


class RewardClient:
    """Calls `RewardService`. All methods raise FourfoldError; timeouts are seconds."""

    def __init__(self, channel: grpc.aio.Channel, *, peer: str) -> None:
        self._stub = pb_grpc.RewardServiceStub(channel)
        self.peer = peer

    async def get_info(self, *, timeout: float) -> pb.GetInfoResponse:
        """Name and limits of the scorer."""
        return await call(self._stub.GetInfo, pb.GetInfoRequest(), timeout=timeout, peer=self.peer, name="GetInfo")

    async def score(
        self, items: Sequence[pb.ScoreItem], *, timeout: float, max_sample_count: int = 0
    ) -> list[pb.SampleScore]:
        """Score `items`, in as few calls as the limits allow; all of them together take at most `timeout`.

        Every result has an outcome: one that the service left out, or a score that is not
        finite, comes back as an error of that sample.

        Args:
            items: at least one; unique sample ids.
            timeout: seconds.
            max_sample_count: from GetInfo; 0: no limit.

        Raises:
            InvalidInput: the answer does not fit the request.
            FourfoldError: what the service raised.
        """
        end = time.monotonic() + timeout
        scores: list[pb.SampleScore] = []
        for part in _split(items, max_sample_count):
            request = pb.ScoreRequest(items=part)
            left = max(end - time.monotonic(), 0.001)
            response = await call(self._stub.Score, request, timeout=left, peer=self.peer, name="Score")
            asked = [item.experience.sample_id for item in part]
            answered = [score.sample_id for score in response.scores]
            if asked != answered:
                raise InvalidInput(
                    f"{self.peer}: Score answered {len(answered)} samples for {len(asked)}, or in another order; "
                    f"a reward service must answer one score per item, in the order of the request"
                )
            scores.extend(_checked(score) for score in response.scores)
        return scores


def _split(items: Sequence[pb.ScoreItem], max_count: int) -> Iterator[list[pb.ScoreItem]]:
    part: list[pb.ScoreItem] = []
    size = 0
    for item in items:
        item_size = item.ByteSize()
        if part and (size + item_size > _REQUEST_BYTES or len(part) == max_count):
            yield part
            part, size = [], 0
        part.append(item)
        size += item_size
    if part:
        yield part


def _checked(score: pb.SampleScore) -> pb.SampleScore:
    match score.WhichOneof("outcome"):
        case None:
            return _error(score, "NO_OUTCOME", "the reward service sent neither score, abstention nor error")
        case "score" if not math.isfinite(score.score):
            return _error(score, "NOT_FINITE", f"the reward service sent the score {score.score}")
        case _:
            return score


def _error(score: pb.SampleScore, reason: str, message: str) -> pb.SampleScore:
    return pb.SampleScore(
        sample_id=score.sample_id, error=pb.SampleError(code=INTERNAL, reason=reason, message=message)
    )
