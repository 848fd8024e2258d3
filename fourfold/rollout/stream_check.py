"""Checks the response stream of a Generate call, chunk by chunk, so that a caller can rely on it."""

from __future__ import annotations

from typing import Final

import numpy as np

from fourfold.bounds import MAX_NUMBER
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold.rpc.responses import ResponseCheck
from fourfold.sample.sampled import CHUNK_FIELDS
from fourfold.sample.token_columns import SAMPLED_COLUMNS

_OPTIONAL: Final = {CHUNK_FIELDS[column.name]: column for column in SAMPLED_COLUMNS if not column.required}
_MAX_TOKENS: Final = 1 << 20
"""Limit of a sample whose request has no max_tokens, so that no service can stream without end."""


def sample_count(request: pb.GenerateRequest) -> int:
    """Return the number of samples that a request asks for."""
    return request.sample_count if request.HasField("sample_count") else 1


class StreamCheck:
    """Progress of each sample of one request. Its methods raise PeerFault."""

    def __init__(self, request: pb.GenerateRequest, *, peer: str) -> None:
        count, params = sample_count(request), request.sampling_params
        self._fault = ResponseCheck(peer, f"Generate of {request.request_id}").fault
        self._max_tokens = params.max_tokens if params.HasField("max_tokens") else _MAX_TOKENS
        self._versions = [request.min_policy_version] * count  # of the newest token of each sample
        self._tokens = [0] * count
        self._open = set(range(count))

    def check_size(self, response: pb.GenerateResponse) -> None:
        """Refuse a response without chunks: a service could send them without end."""
        if not response.chunks:
            raise self._fault("a response has no chunks; it must have at least one")

    # Thousands of chunks arrive per second, so a message is made only for a chunk that breaks a rule.
    def add(self, chunk: pb.SampleChunk) -> None:
        """Check the next chunk and record its tokens."""
        index, version, count = chunk.sample_index, chunk.policy_version, len(self._tokens)
        if index not in self._open:
            known = 0 <= index < count
            fault = "continues after its finish_reason" if known else f"was not requested; there are {count}"
            raise self._fault(f"sample {index} {fault}", "WRONG_SAMPLE")
        size = self._check_tokens(chunk)
        if size:
            if not self._versions[index] <= version <= MAX_NUMBER:
                due = f"{self._versions[index]} or a later one is due"
                raise self._fault(f"sample {index} has tokens of policy_version {version}; {due}", "BAD_VERSION")
            self._versions[index] = version
        self._tokens[index] += size
        if self._tokens[index] > self._max_tokens:
            fault = f"has more tokens than the {self._max_tokens} that were requested"
            raise self._fault(f"sample {index} {fault}", "TOO_MANY_TOKENS")
        if chunk.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
            self._open.discard(index)
        elif not size:
            raise self._fault(f"sample {index} has a chunk with neither tokens nor a finish_reason")

    def check_end(self) -> None:
        """Check at the end of the stream that every sample is finished."""
        if self._open:
            raise self._fault(f"the stream ended before sample {min(self._open)} was finished", "UNFINISHED")

    def _check_tokens(self, chunk: pb.SampleChunk) -> int:
        """Check the arrays of a chunk; return its number of tokens."""
        size, data = len(chunk.token_ids), chunk.logprobs
        if size % 4 or len(data) != size:
            raise self._fault(
                f"sample {chunk.sample_index} has {size} bytes of token_ids and {len(data)} of logprobs; both must be "
                f"4 bytes a token",
                "WRONG_LENGTH",
            )
        values = np.frombuffer(data, "<f4")
        if size and not (np.maximum.reduce(values) <= 0 and np.minimum.reduce(values) > -np.inf):  # NaN fails both
            fault = "has log-probabilities that are NaN, -inf or above 0"
            raise self._fault(f"sample {chunk.sample_index} {fault}", "NOT_FINITE")
        for name, column in _OPTIONAL.items():
            found: bytes = getattr(chunk, name)
            is_mask, item = column.dtype == np.bool_, column.dtype.itemsize
            if found and (len(found) != size // 4 * item or (is_mask and found.strip(b"\0\1"))):
                value = "a byte of 0 or 1" if is_mask else f"{item} bytes"
                rule = f"{len(found)} bytes of {name}; it must be empty or have {value} for each token"
                raise self._fault(f"sample {chunk.sample_index} has {rule}", "WRONG_LENGTH")
        return size // 4
