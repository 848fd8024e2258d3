"""A rollout service whose tokens are a function of all tokens before them and of the version that samples them.

So a test can compute every token of a stored trajectory again. One id in the context that the engine did not get, or a
token of another version, changes all ids after it.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Sequence
from typing import Final

import numpy as np

from fourfold.config import Config
from fourfold.errors import Unavailable
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rpc.codec import pack_floats, pack_ints
from fourfold.sample import Sample
from tests.fakes.toy import END, VOCABULARY, Context
from tests.fakes.toy_rollout import FakeRollout

_CHUNK: Final = 3  # tokens of one message
_WORDS: Final = 256  # ids below are bytes of text


class ChainRollout(FakeRollout):
    """An engine for many short turns. `version` may be changed at any time: the next token is of the new one."""

    def __init__(self, member_id: str, config: Config, *, fault_share: float = 0.0, seconds: float = 0.0) -> None:
        """Make an engine; a share of its calls fails in the middle, and each message takes some seconds."""
        super().__init__(member_id, config)
        self.running = self.calls = self.faults = 0
        self.fault_share, self.seconds = fault_share, seconds
        self._random = random.Random(member_id)

    async def GetInfo(self, request: rollout.GetInfoRequest, context: Context) -> rollout.GetInfoResponse:
        return rollout.GetInfoResponse(
            model="toy",
            tokenizer_sha256=self.tokenizer_sha256,
            max_context_tokens=self.config.model.max_context_tokens,
            policy_version=self.version,
            vocabulary_size=VOCABULARY,
            max_concurrent_samples=256,
        )

    async def Generate(
        self, request: rollout.GenerateRequest, context: Context
    ) -> AsyncIterator[rollout.GenerateResponse]:
        self.calls += 1
        fails = self._random.random() < self.fault_share
        self.running += 1
        try:
            for index in range(request.sample_count):
                async for chunk in self._sample(request, index):
                    yield rollout.GenerateResponse(chunks=[chunk])
                    if fails and chunk.finish_reason == rollout.FINISH_REASON_UNSPECIFIED:
                        self.faults += 1
                        raise Unavailable("the engine lost the sample, as the test asked")
        finally:
            self.running -= 1

    async def _sample(self, request: rollout.GenerateRequest, index: int) -> AsyncIterator[rollout.SampleChunk]:
        state, left = fold(b"", request.prompt_token_ids), request.sampling_params.max_tokens
        reason = rollout.FINISH_REASON_UNSPECIFIED
        while reason == rollout.FINISH_REASON_UNSPECIFIED:
            await asyncio.sleep(self.seconds)
            version, ids, logprobs = self.version, list[int](), list[float]()
            while len(ids) < min(_CHUNK, left) and END not in ids:
                token, logprob = draw(state, version)
                ids.append(token)
                logprobs.append(logprob)
                state = fold(state, [token])
            left -= len(ids)
            if END in ids:
                reason = rollout.FINISH_REASON_STOP
            elif not left:
                reason = rollout.FINISH_REASON_LENGTH
            yield rollout.SampleChunk(
                sample_index=index,
                token_ids=pack_ints(ids),
                logprobs=pack_floats(np.array(logprobs, np.float32)),
                policy_version=version,
                finish_reason=reason,
            )


def fold(state: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the state after some more tokens; that of no tokens is empty."""
    for token in token_ids:
        state = hashlib.blake2b(state + token.to_bytes(4, "little"), digest_size=8).digest()
    return state


def draw(state: bytes, version: int) -> tuple[int, float]:
    """Return the token that a version samples after a state, and its log-probability, which float32 has exactly."""
    value = int.from_bytes(hashlib.blake2b(state + version.to_bytes(8, "little"), digest_size=4).digest(), "little")
    token = END if value >> 8 & 7 == 0 else value % _WORDS
    return token, -(1 + version % 64 + (value >> 16) / 65536) / 8


def check_chain(sample: Sample) -> None:
    """Check that each sampled token of a segment is the one that its version draws after all tokens before it."""
    versions = np.repeat(
        [span.policy_version for span in sample.version_spans], [span.token_count for span in sample.version_spans]
    )
    state = b""
    for position, token in enumerate(sample.token_ids.tolist()):
        if sample.action_mask[position]:
            expected = draw(state, int(versions[position]))
            found = token, float(sample.behavior_logprobs[position])
            assert found == expected, f"{sample.sample_id}: token {position} is {found}; it must be {expected}"
        else:
            assert versions[position] == -1 and np.isnan(sample.behavior_logprobs[position])
        state = fold(state, [token])
