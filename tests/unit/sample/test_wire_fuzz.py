"""Property tests of the codec: bitwise round trips of any sample, and damaged messages."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn

from fourfold.errors import InvalidInput
from fourfold.rpc import codec
from fourfold.rpc.codec import chunks
from fourfold.sample import Sample, VersionSpan, wire
from fourfold.sample.wire import decode, encode
from fourfold.types.v1 import experience_pb2 as pb

VOCABULARY = 1000
float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
ids = st.from_regex(codec.ID_PATTERN, fullmatch=True)


def spans_of(mask: np.ndarray[Any, Any], versions: list[int]) -> tuple[VersionSpan, ...]:
    """Return spans that fit the mask: -1 where it is 0, the given versions in turn where it is 1."""
    spans: list[VersionSpan] = []
    for index, run in enumerate(np.split(mask, np.flatnonzero(np.diff(mask)) + 1)):
        version = versions[index % len(versions)] if run[0] else -1
        spans.append(VersionSpan(policy_version=version, token_count=len(run)))
    return tuple(spans)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Draw any sample that the contract allows."""
    n = draw(st.integers(2, 40))
    mask = draw(stn.arrays(np.bool_, n))
    mask[0] = False
    logprobs = draw(stn.arrays(np.float32, n, elements=st.floats(-100, 0, width=32)))
    reference = np.empty(0, np.float32)
    if draw(st.booleans()):
        reference = draw(stn.arrays(np.float32, n, elements=float32))
        reference[0] = np.nan
    rewards = np.empty(0, np.float32)
    if draw(st.booleans()):
        rewards = np.where(mask, draw(stn.arrays(np.float32, n, elements=float32)), np.float32(0))
    segment: dict[str, Any] = draw(
        st.sampled_from([{}, {"trajectory_id": "t-1", "segment_index": 2, "segment_count": 3}])
    )
    return Sample(
        sample_id=draw(ids),
        group_id=draw(ids),
        token_ids=draw(stn.arrays(np.int32, n, elements=st.integers(0, VOCABULARY - 1))),
        behavior_logprobs=np.where(mask, logprobs, np.float32("nan")).astype(np.float32),
        action_mask=mask,
        loss_mask=mask & draw(stn.arrays(np.bool_, n)),
        version_spans=spans_of(mask, draw(st.lists(st.integers(0, 2**53), min_size=1, max_size=3))),
        temperature=draw(st.floats(0.0625, 2, width=32)),
        top_p=draw(st.floats(0.0625, 1, width=32)),
        top_k=draw(st.integers(0, 1000)),
        truncated=draw(st.booleans()),
        score=draw(st.none() | float32),
        scorer=draw(st.text(max_size=10)),
        reference_logprobs=reference,
        token_rewards=rewards,
        baseline_score=draw(st.none() | float32),
        **segment,
    )


@given(samples())
def test_decoding_inverts_encoding(sample: Sample) -> None:
    message = pb.Experience.FromString(encode(sample).SerializeToString())
    result = decode(message, vocabulary_size=VOCABULARY, max_tokens=40)
    for name in Sample.__dataclass_fields__:
        expected, got = getattr(sample, name), getattr(result, name)
        if isinstance(expected, np.ndarray):
            assert (got.dtype, got.tobytes()) == (expected.dtype, expected.tobytes()), name
        else:
            assert got == expected, name


@given(samples())
def test_the_oldest_version_is_that_of_the_sampled_tokens(sample: Sample) -> None:
    versions = [s.policy_version for s in sample.version_spans if s.policy_version >= 0]
    assert sample.oldest_version == (min(versions) if versions else -1)


@given(samples(), st.data())
def test_a_damaged_message_is_refused_or_decoded_but_never_breaks_the_reader(
    sample: Sample, data: st.DataObject
) -> None:
    damaged = bytearray(encode(sample).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with suppress(InvalidInput, DecodeError):
        message = pb.Experience.FromString(bytes(damaged))
        result = decode(message, vocabulary_size=VOCABULARY, max_tokens=40)
        n = len(result.token_ids)
        assert 2 <= n <= 40
        assert {len(result.behavior_logprobs), len(result.action_mask), len(result.loss_mask)} == {n}
        assert result.action_mask.view(np.uint8).max() <= 1
        assert sum(s.token_count for s in result.version_spans) == n


def test_decoded_arrays_are_read_only() -> None:
    message = pb.Experience(token_ids=b"\1\0\0\0\2\0\0\0")
    with pytest.raises(ValueError, match="read-only"):
        wire.decode_token_ids(message, vocabulary_size=VOCABULARY, max_tokens=8)[0] = 7


@given(st.lists(st.integers(0, 300), max_size=30), st.integers(1, 400))
def test_chunks_keep_every_message_in_order_and_are_as_full_as_the_limit_allows(sizes: list[int], limit: int) -> None:
    messages = [pb.Experience(token_ids=b"x" * size) for size in sizes]
    groups = list(chunks(iter(messages), limit))
    assert [m for group in groups for m in group] == messages
    for group in groups:
        assert len(group) == 1 or sum(m.ByteSize() for m in group) <= limit
    for left, right in itertools.pairwise(groups):
        assert sum(m.ByteSize() for m in (*left, right[0])) > limit
