"""Log-probabilities of given samples over gRPC: the same request and answer at reference and trainer."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from fourfold.channel import call
from fourfold.errors import InvalidInput
from fourfold.types.v1 import experience_pb2 as pb
from fourfold.wire import Float32Array, Sample, chunks, floats, pack_ints

# The protos allow 8 MiB a request.
_REQUEST_BYTES: Final = 4 << 20


async def compute_logprobs(
    method: Callable[..., Awaitable[Any]],
    make_request: Callable[..., Any],
    samples: Sequence[Sample],
    *,
    timeout: float,
    peer: str,
) -> list[Float32Array]:
    """Look samples up, in as few calls as the size limit allows; together they take at most `timeout` seconds.

    Args:
        method: the stub's ComputeLogprobs.
        make_request: its request class.
        samples: at least one; only sample_id, token_ids and temperature travel.
        timeout: seconds.
        peer: who is called, for messages.

    Returns:
        One float32 [n] per sample, in order; the first value of each is NaN, the others are finite.

    Raises:
        InvalidInput: the service refused a sample, or its answer does not fit the request.
        FourfoldError: what the service raised.
    """
    end = time.monotonic() + timeout
    rows: list[Float32Array] = []
    for part in chunks((_tokens_of(s) for s in samples), _REQUEST_BYTES):
        left = max(end - time.monotonic(), 0.001)
        request = make_request(experiences=part)
        response = await call(method, request, timeout=left, peer=peer, name="ComputeLogprobs")
        rows.extend(_rows(response.logprobs, part, peer))
    return rows


def _tokens_of(sample: Sample) -> pb.Experience:
    return pb.Experience(
        sample_id=sample.sample_id, token_ids=pack_ints(sample.token_ids), temperature=sample.temperature
    )


def _rows(answers: Sequence[bytes], asked: list[pb.Experience], peer: str) -> Iterator[Float32Array]:
    if len(answers) != len(asked):
        raise InvalidInput(f"{peer}: ComputeLogprobs answered {len(answers)} rows for {len(asked)} samples")
    for data, experience in zip(answers, asked, strict=True):
        row = floats(data, len(experience.token_ids) // 4, experience.sample_id, f"logprobs of {peer}")
        if not np.isfinite(row[1:]).all():
            raise InvalidInput(
                f"{peer}: logprobs of sample {experience.sample_id} are not finite after the first token"
            )
        yield row
