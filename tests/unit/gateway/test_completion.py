"""The text of one sample of a turn, as agents and the parsers of tool calls read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.model.tokenizer import Tokenizer
from fourfold.rollout.v1 import rollout_service_pb2 as rollout
from fourfold.rpc.codec import pack_floats, pack_ints
from fourfold_gateway.completion import TurnText
from tests.support.chat_templates import FAMILIES, family_tokenizer

CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_parsers_read_special_tokens_without_the_one_that_ends_the_turn(family: str, tmp_path: Path) -> None:
    tokenizer = family_tokenizer(tmp_path, family)
    (stop, *_) = tokenizer.stop_token_ids
    other = next(i for i in range(tokenizer.vocabulary_size) if i != stop and tokenizer.added_text(i))
    ids = [other, *tokenizer.encode(CALL)]
    for end, finish in (([stop], rollout.FINISH_REASON_STOP), ([], rollout.FINISH_REASON_LENGTH)):
        completion = sampled(tokenizer, [*ids, *end], finish)
        assert completion.raw_text() == f"{tokenizer.added_text(other)}{CALL}"
        assert (stop_text := tokenizer.added_text(stop))
        assert completion.ids == [*ids, *end]
        assert stop_text not in completion.text


def sampled(tokenizer: Tokenizer, ids: list[int], finish: rollout.FinishReason.ValueType) -> TurnText:
    completion = TurnText(0, tokenizer, ())
    completion.add(
        rollout.SampleChunk(token_ids=pack_ints(ids), logprobs=pack_floats([-0.5] * len(ids)), finish_reason=finish)
    )
    return completion
