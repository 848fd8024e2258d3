"""Sampled tokens: chunks and parts are joined with the version and the mask of every token."""

from __future__ import annotations

import numpy as np
import pytest

from fourfold.rollout.v1.rollout_service_pb2 import SampleChunk
from fourfold.rpc.codec import pack_floats, pack_ints
from fourfold.sample import VersionSpan
from fourfold.sample.sampled import SampledTokens, TokenDraft, join_fields, join_spans


def chunk(*ids: int, version: int, mask: bytes = b"") -> SampleChunk:
    logprobs = pack_floats([-i / 8 for i in ids])
    return SampleChunk(token_ids=pack_ints(list(ids)), logprobs=logprobs, policy_version=version, constrained_mask=mask)


def spans(tokens: SampledTokens) -> list[tuple[int, int]]:
    return [(span.policy_version, span.token_count) for span in tokens.version_spans]


def test_a_draft_can_be_read_while_chunks_come() -> None:
    draft = TokenDraft()
    draft.append(chunk(1, 2, version=3), 2)
    first = SampledTokens(**draft.fields())
    draft.append(chunk(4, version=3), 1)
    draft.append(chunk(5, 6, 7, version=4, mask=b"\0\1\1"), 2)
    draft.append(SampleChunk(policy_version=9), 0)
    last = SampledTokens(**draft.fields())
    assert (first.token_ids.tolist(), spans(first), len(first.constrained)) == ([1, 2], [(3, 2)], 0)
    assert (last.token_ids.tolist(), spans(last)) == ([1, 2, 4, 5, 6], [(3, 3), (4, 2)])
    assert last.logprobs.tolist() == [-1 / 8, -2 / 8, -4 / 8, -5 / 8, -6 / 8]
    assert last.constrained.tolist() == [False, False, False, False, True]
    with pytest.raises(ValueError, match="read-only"):
        last.logprobs[0] = 0


def test_a_draft_without_chunks_has_no_tokens() -> None:
    nothing = SampledTokens(**TokenDraft().fields())
    assert nothing.token_ids.dtype == np.int32 and nothing.logprobs.dtype == np.float32
    assert (len(nothing.token_ids), nothing.version_spans) == (0, ())


def test_parts_keep_their_versions() -> None:
    parts = []
    for one in (chunk(1, version=2), chunk(2, 3, version=2, mask=b"\1\0"), chunk(4, version=5)):
        draft = TokenDraft()
        draft.append(one, len(one.token_ids) // 4)
        parts.append(SampledTokens(**draft.fields()))
    whole = SampledTokens(**join_fields(parts))
    assert (whole.token_ids.tolist(), spans(whole)) == ([1, 2, 3, 4], [(2, 3), (5, 1)])
    assert whole.constrained.tolist() == [False, True, False, False]
    assert len(SampledTokens(**join_fields(parts[::2])).constrained) == 0


def test_equal_neighbours_become_one_span() -> None:
    found = join_spans(VersionSpan(policy_version=v, token_count=n) for v, n in [(-1, 2), (3, 1), (3, 4), (-1, 1)])
    assert [(s.policy_version, s.token_count) for s in found] == [(-1, 2), (3, 5), (-1, 1)]
