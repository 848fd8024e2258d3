"""Log-probabilities of given samples over gRPC: the same request and answer at reference and trainer."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import numpy as np

from fourfold.arrays import Float32Array, Sample
from fourfold.rpc.channel import call, require
from fourfold.rpc.codec import chunks, pack_ints
from fourfold.types.v1 import experience_pb2 as pb

# The protos allow 8 MiB a request.
_REQUEST_BYTES: Final = 4 << 20
# A float32 in nats beyond which sums over a batch lose their meaning; no softmax gives as much.
_LARGEST: Final = 1e6


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
        InvalidInput: the service refused a sample.
        PeerFault: its answer does not fit the request.
        FourfoldError: what the service raised.
    """
    end = time.monotonic() + timeout
    rows: list[Float32Array] = []
    for part in chunks((_tokens_of(s) for s in samples), _REQUEST_BYTES):
        left = max(end - time.monotonic(), 0.001)
        request = make_request(experiences=part)
        response = await call(method, request, timeout=left, peer=peer, name="ComputeLogprobs")
        found = unpack_rows(response.logprobs, part, peer=peer, name="ComputeLogprobs")
        check_logprobs(found, part, peer=peer, name="ComputeLogprobs")
        rows += found
    return rows


def _tokens_of(sample: Sample) -> pb.Experience:
    return pb.Experience(
        sample_id=sample.sample_id, token_ids=pack_ints(sample.token_ids), temperature=sample.temperature
    )


def unpack_rows(
    answers: Sequence[bytes], asked: Sequence[pb.Experience], *, peer: str, name: str, what: str = "logprobs"
) -> list[Float32Array]:
    """Unpack one float32 [n] for each sample of a request.

    Raises:
        PeerFault: their number or a length is wrong.
    """
    require(
        len(answers) == len(asked), f"answered {len(answers)} rows of {what} for {len(asked)} samples",
        peer=peer, name=name, kind="WRONG_COUNT",
    )  # fmt: skip
    for data, experience in zip(answers, asked, strict=True):
        require(
            len(data) == len(experience.token_ids),
            f"{what} of sample {experience.sample_id} have {len(data)} bytes; they need {len(experience.token_ids)}",
            peer=peer, name=name, kind="WRONG_LENGTH",
        )  # fmt: skip
    return [np.frombuffer(data, "<f4").astype(np.float32, copy=False) for data in answers]


def check_logprobs(rows: Sequence[Float32Array], asked: Sequence[pb.Experience], *, peer: str, name: str) -> None:
    """Check that log-probabilities after the first token can be any; NaN and 1e30 cannot.

    Raises:
        PeerFault: they cannot.
    """
    for row, experience in zip(rows, asked, strict=True):
        require(
            bool((np.abs(row[1:]) <= _LARGEST).all()),
            f"logprobs of sample {experience.sample_id} are not finite after the first token, or above {_LARGEST:g}",
            peer=peer, name=name, kind="NOT_FINITE",
        )  # fmt: skip
