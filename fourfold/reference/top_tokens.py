"""Asks a reference service for the likeliest tokens at each position of samples, and checks what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fourfold.arrays import Float32Array, Int32Array
from fourfold.reference.client import AsyncReferenceClient
from fourfold.reference.v1 import reference_service_pb2 as pb
from fourfold.rpc.codec import chunks, read_floats, read_ints
from fourfold.rpc.responses import ResponseCheck
from fourfold.sample import Sample
from fourfold.sample.wire import from_samples
from fourfold.types.v1.experience_pb2 import Experience

_RESPONSE_BYTES: Final = 6 << 20  # the proto allows 8 MiB
# Rounding of a sum of probabilities, of which each is that of a normaliser in float32.
_SUM_ROUNDING: Final = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopTokens:
    """The k likeliest tokens in place of each of n tokens, given the tokens before it, the likeliest first."""

    ids: Int32Array  # [n, k], different in each row; the first row is 0
    logprobs: Float32Array  # [n, k], natural logarithms; the first row is NaN


async def top_tokens(
    client: AsyncReferenceClient,
    samples: Sequence[Sample],
    *,
    top_k: int,
    vocabulary_size: int,
    timeout: float | None = None,
) -> list[TopTokens]:
    """Compute the `top_k` likeliest tokens in place of every token of `samples`, at the temperature of each.

    Args:
        client: of the service.
        samples: of at least 2 tokens each.
        top_k: 1 to 64, and at most the vocabulary size.
        vocabulary_size: a service with other ids than those below it is at fault.
        timeout: seconds for all samples; a large batch takes several calls.

    Returns:
        One for each sample, in order.

    Raises:
        FourfoldError: a sample is malformed, or the service cannot compute.
        PeerFault: the response breaks a rule of the contract, or the service is older than contract 1.11.
    """
    left, found = client._countdown(timeout), list[TopTokens]()
    # A token has 4 bytes in the request, and 4 + 8 k in the response.
    for part in chunks(from_samples(samples), _RESPONSE_BYTES // (1 + 2 * top_k)):
        request = pb.ComputeLogprobsRequest(experiences=part, top_k=top_k)
        response = await client._call(client._stub.ComputeLogprobs, request, left())
        found += read_top(response, part, client._check(response), top_k=top_k, vocabulary_size=vocabulary_size)
    return found


def read_top(
    response: pb.ComputeLogprobsResponse,
    asked: Sequence[Experience],
    check: ResponseCheck,
    *,
    top_k: int,
    vocabulary_size: int,
) -> list[TopTokens]:
    """Unpack and check the likeliest tokens of a response to `asked`; raise PeerFault if a rule is broken.

    Ids must be different and in the vocabulary, and log-probabilities finite, at most 0 and descending, with
    probabilities that add up to at most 1. The rows of the first token have no meaning.
    """
    for rows, what in ((response.top_ids, "top_ids"), (response.top_logprobs, "top_logprobs")):
        old = "" if len(rows) else "; a service older than contract 1.11 has none: upgrade it"
        rule = f"answered {len(rows)} rows of {what} for {len(asked)} samples{old}"
        check.require(len(rows) == len(asked), rule, "WRONG_COUNT")
        for row, sample in zip(rows, asked, strict=True):
            expected = len(sample.token_ids) * top_k
            rule = f"{what} of sample {sample.sample_id} have {len(row)} bytes; they need {expected}"
            check.require(len(row) == expected, rule, "WRONG_LENGTH")
    found = []
    for ids, logprobs, sample in zip(response.top_ids, response.top_logprobs, asked, strict=True):
        top = TopTokens(ids=read_ints(ids).reshape(-1, top_k), logprobs=read_floats(logprobs).reshape(-1, top_k))
        _check_rows(check, top.ids[1:], top.logprobs[1:], f"of sample {sample.sample_id}", vocabulary_size)
        found.append(top)
    return found


def _check_rows(check: ResponseCheck, ids: Int32Array, logprobs: Float32Array, where: str, vocabulary: int) -> None:
    ordered = np.sort(ids, axis=1)
    inside = bool(ordered[:, 0].min() >= 0 and ordered[:, -1].max() < vocabulary)
    check.require(inside, f"top_ids {where} have an id outside the vocabulary [0, {vocabulary})", "BAD_TOKEN")
    distinct = bool((np.diff(ordered, axis=1) > 0).all())
    check.require(distinct, f"top_ids {where} have an id twice in a row; they must be different", "BAD_TOKEN")
    possible = bool((np.isfinite(logprobs) & (logprobs <= 0)).all())
    check.require(possible, f"top_logprobs {where} are not finite and at most 0 after the first row", "NOT_FINITE")
    descends = bool((np.diff(logprobs, axis=1) <= 0).all())
    check.require(descends, f"top_logprobs {where} do not descend; the likeliest token comes first", "NOT_SORTED")
    most = float(np.exp(logprobs, dtype=np.float64).sum(axis=1).max())
    rule = f"top_logprobs {where} are of probabilities that add up to {most:.4f}; at most 1 is possible"
    check.require(most <= 1 + _SUM_ROUNDING, rule, "BAD_SUM")
