"""The mask of constrained tokens on its way: shared memory, split by versions, chunks, completions."""

from __future__ import annotations

import numpy as np
import pytest

from fourfold.errors import PeerFault
from fourfold.rollout.client import Completion, CompletionDraft
from fourfold.rollout.group_requests import GroupRequest, join_parts
from fourfold.rollout.stream_check import StreamCheck
from fourfold.rollout.v1 import rollout_service_pb2 as pb
from fourfold_rollout.engine import SampleOutput
from fourfold_rollout.generate.outputs import SampleVersions
from fourfold_rollout.vllm.logprob_table import LogprobTable, open_flags, open_table


def chunk(count: int, mask: bytes) -> pb.SampleChunk:
    zeros = bytes(4 * count)
    return pb.SampleChunk(token_ids=zeros, logprobs=zeros, constrained_mask=mask)


def part(count: int, mask: list[bool]) -> Completion:
    return Completion(
        sample_index=0,
        token_ids=np.zeros(count, np.int32),
        logprobs=np.zeros(count, np.float32),
        version_spans=(),
        finish_reason=pb.FINISH_REASON_ABORTED,
        constrained=np.array(mask, np.bool_),
    )


def test_the_flags_of_a_row_are_those_of_the_values_taken() -> None:
    table = LogprobTable(2, 8)
    try:
        flags, cells = open_flags(table.path, 2, 8), open_table(table.path, 2, 8)
        for grammar in (True, False):
            flags[:], cells[:] = 1, 0
            row = table.acquire(6, flags=grammar)
            cells[row.slot, :6] = -1
            flags[row.slot, 3] = 1
            row.take(2)
            row.take(3)
            assert row.taken_flags(3) == (b"\0\1\0" if grammar else b"")
            assert (cells[row.slot, :6] == -1).all()  # flags and values do not overlap
    finally:
        table.close()


def test_a_change_of_weights_splits_the_mask() -> None:
    versions = SampleVersions()
    versions.end(2, 4)
    output = SampleOutput(
        token_ids=np.arange(3, dtype=np.int32),
        logprobs=np.zeros(3, np.float32),
        constrained=np.array([True, False, True]),
    )
    pieces = [(version, piece.constrained.tolist()) for version, piece in versions.cut(output, 5)]
    assert pieces == [(4, [True, False]), (5, [True])]


def test_chunks_without_a_mask_count_as_unconstrained() -> None:
    draft = CompletionDraft(0)
    for one in (chunk(1, b""), chunk(2, b"\0\1"), chunk(1, b"")):
        draft.add(one)
    assert draft.join().constrained.tolist() == [False, False, True, False]


def test_parts_of_a_sample_are_joined_with_their_masks() -> None:
    joined = join_parts(0, (part(2, []), part(1, [True])), pb.FINISH_REASON_STOP)
    assert joined.constrained.tolist() == [False, False, True]
    assert len(join_parts(0, (part(2, []), part(1, [])), pb.FINISH_REASON_STOP).constrained) == 0


@pytest.mark.parametrize(("grammar", "count"), [(pb.Grammar(regex="a"), 3), (None, 0)])
def test_a_continued_sample_starts_its_grammar_after_its_tokens(grammar: pb.Grammar | None, count: int) -> None:
    params = pb.SamplingParams(max_tokens=9, seed=1, grammar=grammar)
    group = GroupRequest(name="g", prompt_token_ids=np.ones(4, np.int32), params=params, count=1, version=0)
    ((request, _),) = group.plan({0: (part(3, []),)}, number=0, flush_seconds=None)
    assert request.grammar_prefix_count == count
    assert len(request.prompt_token_ids) == 7


@pytest.mark.parametrize("mask", [b"\1", b"\1\2", b"\1\1\1"])
def test_a_malformed_mask_is_a_fault_of_the_engine(mask: bytes) -> None:
    check = StreamCheck(pb.GenerateRequest(), peer="rollout-0")
    with pytest.raises(PeerFault, match="constrained_mask"):
        check.add(chunk(2, mask))
    check.add(chunk(2, b"\1\0"))
