"""Clients of a reward service: score samples, and check each response before it is used.

Third parties implement this service, so a client trusts no response.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Final

import numpy as np
from google.rpc.code_pb2 import INTERNAL, OK, Code

from fourfold.errors import PeerFault
from fourfold.reward.v1 import reward_service_pb2 as pb
from fourfold.reward.v1 import reward_service_pb2_grpc as pb_grpc
from fourfold.rpc.client import AsyncClient, SyncClient, blocking
from fourfold.rpc.codec import chunks
from fourfold.text import MAX_COMPONENTS, MAX_ERROR, MAX_NAME, clean, is_metric_name, is_reason
from fourfold.tracing.spans import part_of_work

# The proto allows 8 MiB. Smaller calls are spread over several services more evenly.
_REQUEST_BYTES: Final = 4 << 20
_REASON_RULE: Final = "it must be UPPER_SNAKE_CASE of at most 63 characters"


class AsyncRewardClient(AsyncClient):
    """Scores samples with a reward service, with asyncio.

    All methods raise FourfoldError. Timeouts are seconds; the default is the client's.
    """

    _role = "reward"

    @cached_property
    def _stub(self) -> pb_grpc.RewardServiceAsyncStub:
        return pb_grpc.RewardServiceStub(self._open())

    async def get_info(self, *, timeout: float | None = None) -> pb.GetInfoResponse:
        """Return name and limits of the scorer. The name has at most 200 characters."""
        info = await self._call(self._stub.GetInfo, pb.GetInfoRequest(), timeout)
        info.name = clean(info.name, MAX_NAME)
        check = self._check(info)
        check.contract(info.contract_version)
        check.tokenizer(info.tokenizer_sha256)
        check.not_negative(info, "max_sample_count")
        return info

    async def score(
        self, items: Sequence[pb.ScoreItem], *, timeout: float | None = None, max_sample_count: int = 0
    ) -> list[pb.SampleScore]:
        """Score items, in as few calls as the size limits allow.

        Each result keeps the contract. An outcome that breaks the contract (no outcome, a score that is not finite,
        an error with code 0, more than 64 components, rewards of other tokens) is replaced by an error of its sample
        with the code INTERNAL.

        Args:
            items: at least one; their sample ids are unique.
            timeout: seconds for all calls together.
            max_sample_count: limit of the service, from `get_info`; 0: no limit.

        Returns:
            One score per item, in order.

        Raises:
            InvalidInput: An item is malformed; nothing was scored.
            PeerFault: The response does not fit the request.
            FourfoldError: Any other error of the service or of the connection.
        """
        left = self._countdown(timeout)
        scores: list[pb.SampleScore] = []
        for part in chunks(items, _REQUEST_BYTES, max_sample_count):
            with part_of_work(range(len(scores), len(scores) + len(part))):
                response = await self._call(self._stub.Score, pb.ScoreRequest(items=part), left())
            if fault := ids_fault(part, response):
                raise PeerFault(self.peer, fault[0], f"Score: {fault[1]}")
            scores.extend(map(_checked, part, response.scores))
        return scores


class RewardClient(SyncClient[AsyncRewardClient]):
    """Scores samples with a reward service; each method blocks. For asyncio, use AsyncRewardClient."""

    _async_type = AsyncRewardClient
    get_info = blocking(AsyncRewardClient.get_info)
    score = blocking(AsyncRewardClient.score)


def ids_fault(items: Sequence[pb.ScoreItem], response: pb.ScoreResponse) -> tuple[str, str] | None:
    """Return reason and text of a fault in the ids of a response; None if they equal those of the request."""
    asked, answered = [i.experience.sample_id for i in items], [s.sample_id for s in response.scores]
    if asked == answered:
        return None
    if len(asked) != len(answered):
        kind, text = "WRONG_COUNT", f"answered {len(answered)} scores for {len(asked)} samples"
    elif sorted(asked) == sorted(answered):
        kind, text = "WRONG_ORDER", f"answered the {len(asked)} samples in another order"
    else:
        stranger = next(name for name, wanted in zip(answered, asked, strict=True) if name != wanted)
        kind, text = "WRONG_IDS", f"answered sample {stranger[:128]!r}, which is not the one that was asked for"
    return kind, f"{text}; a reward service must answer one score per item, in the order of the request"


def score_fault(score: pb.SampleScore) -> tuple[str, str] | None:
    """Return reason and text of how a score breaks the contract; None if it keeps it."""
    if len(score.components) > MAX_COMPONENTS:
        return "BAD_COMPONENTS", f"it sent {len(score.components)} components, of {MAX_COMPONENTS}"
    for name, value in score.components.items():
        if not is_metric_name(name):
            return "BAD_COMPONENTS", f"it sent a component named {clean(name, 64)!r}"
        if not math.isfinite(value):
            return "NOT_FINITE", f"it sent {value} as component {name}"
    outcome = score.WhichOneof("outcome")
    if fault := _extras_fault(score, scored=outcome == "score"):
        return fault
    match outcome:
        case None:
            return "NO_OUTCOME", "it sent neither score, abstention nor error"
        case "score" if not math.isfinite(score.score):
            return "NOT_FINITE", f"it sent the score {score.score}"
        case "abstain_reason" if not is_reason(score.abstain_reason):
            return "BAD_REASON", f"it abstained for {score.abstain_reason[:64]!r}; {_REASON_RULE}"
        case "error" if score.error.code not in Code.values() or score.error.code == OK:
            return "BAD_CODE", f"it sent an error with code {score.error.code}; 1 to 16 are errors"
        case "error" if not is_reason(score.error.reason):
            return "BAD_REASON", f"it sent the reason {score.error.reason[:64]!r}; {_REASON_RULE}"
    return None


def _extras_fault(score: pb.SampleScore, *, scored: bool) -> tuple[str, str] | None:
    """Return what is wrong with the cost and the rewards of tokens and turns, as far as the score alone shows it."""
    if not (score.cost_usd >= 0 and math.isfinite(score.cost_usd)):
        return "BAD_COST", f"it sent cost_usd = {score.cost_usd}; it must be finite and at least 0"
    for name, values in (("token_rewards", score.token_rewards), ("turn_rewards", score.turn_rewards)):
        if values and not scored:
            return f"BAD_{name.upper()}", f"it sent {name} without a score"
    if len(score.token_rewards) % 4:
        return "BAD_TOKEN_REWARDS", f"it sent token_rewards of {len(score.token_rewards)} bytes, no array of float32"
    if score.token_rewards and not np.isfinite(np.frombuffer(score.token_rewards, "<f4")).all():
        return "BAD_TOKEN_REWARDS", "it sent token_rewards that are not finite"
    if not all(map(math.isfinite, score.turn_rewards)):
        return "BAD_TURN_REWARDS", "it sent turn_rewards that are not finite"
    return None


def rewards_fault(item: pb.ScoreItem, score: pb.SampleScore) -> tuple[str, str] | None:
    """Return how the rewards of tokens and turns do not fit their item; None if they fit, or if there are none.

    The score has passed `score_fault`.
    """
    if not score.token_rewards and not score.turn_rewards:
        return None
    mask = np.frombuffer(item.experience.action_mask, np.bool_)
    if score.token_rewards:
        rewards = np.frombuffer(score.token_rewards, "<f4")
        if len(rewards) != len(mask):
            text = f"it sent {len(rewards)} token_rewards for an item of {len(mask)} tokens"
            return "BAD_TOKEN_REWARDS", text
        if rewards[~mask].any():
            return "BAD_TOKEN_REWARDS", "it sent token_rewards for tokens that the policy did not sample"
    if score.turn_rewards and len(mask):  # without arrays only the caller knows the turns
        turns = int(np.count_nonzero(np.diff(mask.astype(np.int8), prepend=0) == 1))
        if len(score.turn_rewards) != turns:
            return "BAD_TURN_REWARDS", f"it sent {len(score.turn_rewards)} turn_rewards for {turns} turns"
    return None


def _checked(item: pb.ScoreItem, score: pb.SampleScore) -> pb.SampleScore:
    """Return the score, or an INTERNAL error in its place when it breaks the contract."""
    if fault := score_fault(score) or rewards_fault(item, score):
        message = f"the reward service broke the contract: {fault[1]}"
        return pb.SampleScore(
            sample_id=score.sample_id, error=pb.SampleError(code=INTERNAL, reason=fault[0], message=message)
        )
    if score.HasField("error"):
        score.error.message = clean(score.error.message, MAX_ERROR)
    return score
