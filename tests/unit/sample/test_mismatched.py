"""Answers of other prompts."""

from __future__ import annotations

import pytest

from fourfold.errors import InvalidInput
from fourfold.sample.mismatched import mismatched
from tests.fakes.trainer_engine import sample


@pytest.mark.parametrize("count", [2, 3, 4])
def test_each_prompt_gets_the_answer_of_the_next_sample(count: int) -> None:
    samples = [sample(f"s{i}", group=str(i), prompt=2 + i, completion=3 + i, reference=True) for i in range(count)]
    found = mismatched(samples, max_tokens=100)
    for i, joined in enumerate(found):
        one, other = samples[i], samples[(i + 1) % count]
        assert joined.token_ids.tolist() == [*one.token_ids[: 2 + i], *other.token_ids[other.action_mask]]
        assert joined.action_mask.tolist() == [False] * (2 + i) + [True] * int(other.action_mask.sum())
        assert joined.loss_mask.tolist() == joined.action_mask.tolist()
        assert (joined.group_id, joined.score) == (one.group_id, None)
        assert not len(joined.reference_logprobs) and not len(joined.behavior_logprobs) and not joined.version_spans
    assert len({one.sample_id for one in [*samples, *found]}) == 2 * count


def test_an_answer_that_does_not_fit_is_cut_on_the_right() -> None:
    samples = [sample("a", prompt=6, completion=1), sample("b", prompt=2, completion=9)]
    first, second = mismatched(samples, max_tokens=8)
    assert first.token_ids.tolist() == [*samples[0].token_ids[:6], *samples[1].token_ids[2:4]]
    assert len(second.token_ids) == 3
    with pytest.raises(InvalidInput, match="sample a has a prompt of 6 tokens, which leaves no room"):
        mismatched(samples, max_tokens=6)


def test_a_single_sample_has_no_other_answer() -> None:
    with pytest.raises(InvalidInput, match="a step of 1 samples has no answers of other prompts; send at least 2"):
        mismatched([sample("a")], max_tokens=10)
