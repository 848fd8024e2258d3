"""Calls ComputeLogprobs, the method that the reference service and the trainer share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from google.protobuf.message import Message

from fourfold.arrays import Float32Array
from fourfold.rpc.client import AsyncClient
from fourfold.rpc.codec import chunks
from fourfold.tracing.spans import part_of_work
from fourfold.types.v1 import experience_pb2 as pb

# The protos allow 8 MiB per request.
_REQUEST_BYTES: Final = 4 << 20


async def compute_logprobs(
    client: AsyncClient,
    method: Callable[..., Awaitable[Any]],
    make_request: Callable[..., Message],
    experiences: Iterable[pb.Experience],
    timeout: float | None,
) -> list[Float32Array]:
    """Compute log-probabilities of samples in as few calls of the stub's ComputeLogprobs as the request size allows.

    Of the experiences, at least one, only sample_id, token_ids and temperature are sent. `timeout` holds for all calls
    together. The result is one float32 [n] per sample, in order; the first value of each is NaN, the others are finite.
    """
    left = client._countdown(timeout)
    rows: list[Float32Array] = []
    for chunk in chunks(experiences, _REQUEST_BYTES):
        with part_of_work(range(len(rows), len(rows) + len(chunk))):
            response = await client._call(method, make_request(experiences=chunk), left())
        check = client._check(response)
        unpacked = check.rows(response.logprobs, chunk)
        check.logprobs(unpacked, chunk)
        rows += unpacked
    return rows
