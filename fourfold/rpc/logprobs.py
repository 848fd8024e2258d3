"""Calls ComputeLogprobs, the method that the reference service and the trainer share."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike

from fourfold.arrays import Float32Array, Sample
from fourfold.rpc.channel import call
from fourfold.rpc.codec import chunks, pack_ints
from fourfold.rpc.responses import check_logprobs, unpack_rows
from fourfold.types.v1 import experience_pb2 as pb

# The protos allow 8 MiB per request.
_REQUEST_BYTES: Final = 4 << 20
_NAME: Final = "ComputeLogprobs"


async def compute_logprobs(
    method: Callable[..., Awaitable[Any]],
    make_request: Callable[..., Any],
    experiences: Iterable[pb.Experience],
    *,
    timeout: float,
    peer: str,
) -> list[Float32Array]:
    """Compute log-probabilities of samples in as few calls as the request size allows.

    Args:
        method: the stub's ComputeLogprobs.
        make_request: its request class.
        experiences: at least one; only sample_id, token_ids and temperature are sent.
        timeout: seconds for all calls together.
        peer: name and address of the service, for messages.

    Returns:
        One float32 [n] per sample, in order; the first value of each is NaN, the others are finite.

    Raises:
        InvalidInput: the service refused a sample.
        PeerFault: the response does not fit the request.
        FourfoldError: any other error of the service.
    """
    end = time.monotonic() + timeout
    rows: list[Float32Array] = []
    for chunk in chunks(experiences, _REQUEST_BYTES):
        left = max(end - time.monotonic(), 0.001)
        response = await call(method, make_request(experiences=chunk), timeout=left, peer=peer, name=_NAME)
        unpacked = unpack_rows(response.logprobs, chunk, peer=peer, name=_NAME)
        check_logprobs(unpacked, chunk, peer=peer, name=_NAME)
        rows += unpacked
    return rows


def from_samples(samples: Iterable[Sample]) -> Iterator[pb.Experience]:
    """Yield the fields of samples that a forward pass needs."""
    for sample in samples:
        yield pb.Experience(
            sample_id=sample.sample_id, token_ids=pack_ints(sample.token_ids), temperature=sample.temperature
        )


def from_token_ids(token_ids: Iterable[ArrayLike], temperature: float) -> Iterator[pb.Experience]:
    """Yield samples of bare tokens, int [n] each, named by their index."""
    for index, ids in enumerate(token_ids):
        yield pb.Experience(
            sample_id=str(index), token_ids=pack_ints(np.asarray(ids, np.int32)), temperature=temperature
        )
