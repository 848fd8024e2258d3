"""Checks the response stream of a Generate call, chunk by chunk, so that a caller can rely on it."""

from __future__ import annotations

from typing import Final

import numpy as np

from fourfold.bounds import MAX_NUMBER
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rpc.responses import ResponseCheck

_MAX_TOKENS: Final = 1 << 20
"""Limit of a sample whose request has no max_tokens, so that no service can stream without end."""


def sample_count(request: pb.GenerateRequest) -> int:
    """Return the number of samples that a request asks for."""
    return request.sample_count if request.HasField("sample_count") else 1


class StreamCheck:
    """Progress of each sample of one request. Its methods raise PeerFault."""

    def __init__(self, request: pb.GenerateRequest, *, peer: str) -> None:
        count, params = sample_count(request), request.sampling_params
        self._require = ResponseCheck(peer, f"Generate of {request.request_id}").require
        self._max_tokens = params.max_tokens if params.HasField("max_tokens") else _MAX_TOKENS
        self._versions = [request.min_policy_version] * count  # of the newest token of each sample
        self._tokens = [0] * count
        self._open = set(range(count))

    def check_size(self, response: pb.GenerateResponse) -> None:
        """Refuse a response without chunks: a service could send them without end."""
        self._require(bool(response.chunks), "a response has no chunks; it must have at least one")

    def add(self, chunk: pb.SampleChunk) -> None:
        """Check the next chunk and record its tokens."""
        index, version, count = chunk.sample_index, chunk.policy_version, len(self._tokens)
        if index not in self._open:
            known = 0 <= index < count
            fault = "continues after its finish_reason" if known else f"was not requested; there are {count}"
            self._require(False, f"sample {index} {fault}", "WRONG_SAMPLE")
        what, size = f"sample {index}", self._check_tokens(chunk)
        if size:
            self._require(
                self._versions[index] <= version <= MAX_NUMBER,
                f"{what} has tokens of policy_version {version}; {self._versions[index]} or a later one is due",
                "BAD_VERSION",
            )
            self._versions[index] = version
        self._tokens[index] += size
        fault = f"{what} has more tokens than the {self._max_tokens} that were requested"
        self._require(self._tokens[index] <= self._max_tokens, fault, "TOO_MANY_TOKENS")
        if chunk.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
            self._open.discard(index)
        else:
            self._require(size > 0, f"{what} has a chunk with neither tokens nor a finish_reason")

    def check_end(self) -> None:
        """Check at the end of the stream that every sample is finished."""
        fault = f"the stream ended before sample {min(self._open, default=0)} was finished"
        self._require(not self._open, fault, "UNFINISHED")

    def _check_tokens(self, chunk: pb.SampleChunk) -> int:
        """Check the arrays of a chunk; return its number of tokens."""
        size, data = len(chunk.token_ids), chunk.logprobs
        self._require(
            not size % 4 and len(data) == size,
            f"sample {chunk.sample_index} has {size} bytes of token_ids and {len(data)} of logprobs; both must be 4 "
            f"bytes a token",
            "WRONG_LENGTH",
        )
        values = np.frombuffer(data, "<f4")
        self._require(
            not size or bool(values.max() <= 0 and values.min() > -np.inf),  # NaN fails both comparisons
            f"sample {chunk.sample_index} has log-probabilities that are NaN, -inf or above 0",
            "NOT_FINITE",
        )
        return size // 4
