"""Implements RewardService on any backend: checks the request, queues the samples, packs the outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import grpc
import numpy as np
from google.rpc.code_pb2 import Code

from fourfold.arrays import BoolArray
from fourfold.contract import CONTRACT_VERSION
from fourfold.errors import InvalidInput, Unavailable
from fourfold.reward.v1 import reward_service_pb2 as pb
from fourfold.reward.v1 import reward_service_pb2_grpc as pb_grpc
from fourfold.rpc.codec import check_id, pack_floats
from fourfold.sample import check_unique
from fourfold.types.v1.experience_pb2 import Experience
from fourfold_reward.backend import Backend
from fourfold_reward.job import Job
from fourfold_reward.pool import WorkerPool
from fourfold_reward.protocol import Outcome

MAX_SAMPLES: Final = 4096
MAX_REQUEST_BYTES: Final = 8 << 20
MAX_METADATA_BYTES: Final = 64 << 10
# The response leaves this long before the caller's deadline, and after 80 % of the time if that is later; a response
# after the deadline would lose the finished scores.
_ANSWER_MARGIN_SECONDS: Final = 0.5


class RewardServicer(pb_grpc.RewardServiceServicer):
    """Scores requests without state: a deterministic reward function gives equal responses to equal requests."""

    def __init__(self, backend: Backend, *, name: str = "") -> None:
        """Serve a backend that may still be starting; `name` is that of the table [[reward]]."""
        self._backend = backend
        self._name = name
        self._ready = False
        self._tokenizer_sha256 = b""
        self.outcomes: Counter[str] = Counter()  # of all samples so far, by `outcome_name`

    def set_ready(self, tokenizer_sha256: bytes = b"") -> None:
        """Accept calls, because the backend has started; with the tokenizer's hash if the verifier reads tokens."""
        self._tokenizer_sha256 = tokenizer_sha256
        self._ready = True

    async def GetInfo(
        self, request: pb.GetInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetInfoResponse:
        """Return name, version and inputs of the scorer."""
        self._check_ready()
        return pb.GetInfoResponse(
            name=self._backend.scorer,
            max_sample_count=MAX_SAMPLES,
            contract_version=CONTRACT_VERSION,
            tokenizer_sha256=self._tokenizer_sha256,
            reads_messages=self._backend.reads.messages,
            pure=self._backend.pure,
        )

    async def Score(self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.ScoreResponse:
        """Score a batch. A sample that is not scored shortly before the deadline gets an error."""
        self._check_ready()
        _check(request)
        prepared = [self._prepare(item) for item in request.items]
        jobs = [job for job in prepared if isinstance(job, Job)]
        remaining = context.time_remaining() or 0.0
        timeout = max(remaining - min(_ANSWER_MARGIN_SECONDS, 0.2 * remaining), 0.0)
        scored = iter(await self._backend.score(jobs, timeout=timeout) if jobs else ())
        outcomes = [next(scored) if isinstance(entry, Job) else entry for entry in prepared]
        outcomes = list(map(_with_token_rewards_checked, request.items, outcomes))
        self.outcomes.update(map(outcome_name, outcomes))
        return pb.ScoreResponse(
            scores=[_pack(item.experience, outcome) for item, outcome in zip(request.items, outcomes, strict=True)]
        )

    def _check_ready(self) -> None:
        if not self._ready:
            raise Unavailable("the reward service is loading its verifier; try again in a few seconds", retry_after=1.0)

    def _prepare(self, item: pb.ScoreItem) -> Job | Outcome:
        """Return the job of an item, or the error of an item that cannot be scored."""
        size = len(item.metadata_json.encode())
        if size > MAX_METADATA_BYTES:
            return Outcome.error(
                "BAD_METADATA", f"metadata_json has {size} bytes; it may have {MAX_METADATA_BYTES}: send less"
            )
        if error := self._refusal(item.verifier):
            return Outcome.error("NOT_FOUND", error)
        return Job(
            sample_id=item.experience.sample_id,
            prompt=item.prompt_text,
            completion=item.completion_text,
            answer=item.answer,
            metadata_json=item.metadata_json,
            messages_json=item.prompt_messages_json,
            completion_ids=sampled_ids(item.experience),
            size_bytes=item.ByteSize(),
        )

    def _refusal(self, name: str) -> str:
        """Return why an item cannot select a scorer of this name; empty if it is the one here."""
        function = self._backend.verifier.name if isinstance(self._backend, WorkerPool) else ""
        if name in ("", function, self._name):
            return ""
        known = function or self._name
        here = f"; the scorer here is {known!r}" if known else ""
        return f"verifier {name!r:.200} is not known here{here}. Leave it empty"


def sampled_ids(experience: Experience) -> list[int]:
    """Return the tokens that the policy sampled; none if the item has no arrays, or they do not fit each other."""
    if not experience.action_mask:  # nearly always: few functions read tokens
        return []
    mask = _mask(experience)
    if len(experience.token_ids) != 4 * len(mask):
        return []
    return [int(token) for token in np.frombuffer(experience.token_ids, "<i4")[mask]]


def _mask(experience: Experience) -> BoolArray:
    """Return the mask of the tokens that the policy sampled; any byte but 0 is true."""
    mask: BoolArray = np.frombuffer(experience.action_mask, np.uint8) != 0
    return mask


def _check(request: pb.ScoreRequest) -> None:
    """Refuse a malformed request before any sample is queued."""
    if not request.items:
        raise InvalidInput("the request has no items; send at least one")
    if len(request.items) > MAX_SAMPLES:
        raise InvalidInput(f"the request has {len(request.items)} items; at most {MAX_SAMPLES} fit: split it")
    size = request.ByteSize()
    if size > MAX_REQUEST_BYTES:
        raise InvalidInput(f"the request has {size} bytes; at most {MAX_REQUEST_BYTES} fit: split it")
    for item in request.items:
        check_id(item.experience.sample_id, "sample_id")
    check_unique(item.experience.sample_id for item in request.items)


def outcome_name(outcome: Outcome) -> str:
    """Return SCORED, ABSTAINED, or the reason of the error, a key of ERROR_CODES."""
    return outcome.error_reason or ("ABSTAINED" if outcome.score is None else "SCORED")


def _with_token_rewards_checked(item: pb.ScoreItem, outcome: Outcome) -> Outcome:
    """Return the outcome, or an error if its token rewards do not fit the sampled tokens of the item."""
    if not outcome.token_rewards or len(outcome.token_rewards) == (sampled := _sampled_count(item.experience)):
        return outcome
    hint = "" if sampled else ", because the function does not read tokens: set its attribute reads_tokens = True"
    return Outcome.error(
        "BAD_TOKEN_REWARDS",
        f"token_rewards has {len(outcome.token_rewards)} numbers, and the item {sampled} sampled tokens{hint}",
    )


def _sampled_count(experience: Experience) -> int:
    return int(np.count_nonzero(_mask(experience)))


def _token_rewards(experience: Experience, rewards: Sequence[float]) -> bytes:
    """Return the rewards of the sampled tokens as an array of all tokens."""
    mask = _mask(experience)
    values = np.zeros(len(mask), np.float32)
    values[mask] = rewards
    return pack_floats(values)


def _pack(experience: Experience, outcome: Outcome) -> pb.SampleScore:
    score = pb.SampleScore(sample_id=experience.sample_id, cost_usd=outcome.cost_usd)
    if outcome.components:
        score.components.update(outcome.components)
    if outcome.error_reason:
        score.error.code = Code.Value(outcome.error_code)
        score.error.reason = outcome.error_reason
        score.error.message = outcome.message
    elif outcome.score is None:
        score.abstain_reason = outcome.abstain_reason
    else:
        score.score = outcome.score
        score.turn_rewards.extend(outcome.turn_rewards)
        if outcome.token_rewards:
            score.token_rewards = _token_rewards(experience, outcome.token_rewards)
    return score
