"""The steps of a completion: their texts are those of the training, and their scores go to the sampled tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fourfold.config.sources import DataSourceConfig
from fourfold.model.tokenizer import Tokenizer
from fourfold_coordinator.rows.encode import EncodingSettings
from fourfold_coordinator.rows.normal import Form, RowFields
from fourfold_coordinator.rows.store import prepare_store
from fourfold_reward.models.steps import StepEncoder, StepText, split_steps, tokens_at
from fourfold_reward.protocol import Outcome
from tests.support.chat_templates import write_tokenizer
from tests.support.reward_jobs import make_job
from tests.support.template_shapes import SHAPES

STEPS = ["2 * 3 = 6", "6 + 4 = <|im_end|> 10", "\u00e4 \U0001f600: 10"]
PROMPT = "2 * 3 + 4?"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_tokenizer(tmp_path, SHAPES["qwen25"], {"eos_token": "<|im_end|>"})
    return Tokenizer.load(tmp_path)


def encode(tokenizer: Tokenizer, completion: str, *, chat: bool = True, ids: list[int] | None = None) -> object:
    encoder = StepEncoder(
        tokenizer,
        chat=chat,
        vocabulary_size=tokenizer.vocabulary_size,
        max_tokens=None,
        separator="\n\n",
        policy=tokenizer,
    )
    messages = json.dumps([{"role": "user", "content": PROMPT}])
    sampled = tokenizer.encode(completion) if ids is None else ids
    return encoder.encode([make_job(completion, prompt=PROMPT, messages_json=messages, completion_ids=sampled)])[0]


@pytest.mark.parametrize("chat", [True, False])
def test_steps_are_trained_on_the_tokens_that_are_scored_later(
    tmp_path: Path, tokenizer: Tokenizer, chat: bool
) -> None:
    row = {"prompt": PROMPT, "completions": STEPS, "labels": [1, 0.5, 0]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    settings = EncodingSettings(form=Form.STEPS, fields=RowFields(chat=chat), max_tokens=200)
    source = DataSourceConfig(path=str(tmp_path / "rows.jsonl"))
    stored = prepare_store(source, settings, tokenizer, tmp_path / "tokens").sample(0)
    served = encode(tokenizer, "\n\n".join(STEPS), chat=chat)
    assert isinstance(served, StepText)
    assert served.token_ids.tolist() == stored.token_ids.tolist()
    assert served.ends.tolist() == np.flatnonzero(stored.loss_mask).tolist()
    assert stored.labels[served.ends].tolist() == [1, 0.5, 0]


def test_a_score_goes_to_the_token_in_which_the_separator_ends(tokenizer: Tokenizer) -> None:
    completion = "\n\n".join(STEPS)
    text = encode(tokenizer, completion)
    assert isinstance(text, StepText)
    outcome = text.outcome(np.array([0.5, -1.0, 2.0], np.float32))
    assert outcome.score == 2.0 and outcome.components == {"steps": 3.0, "step_min": -1.0}
    ids = tokenizer.encode(completion)
    at = np.flatnonzero(outcome.token_rewards)
    assert [outcome.token_rewards[i] for i in at] == [0.5, -1.0] and len(outcome.token_rewards) == len(ids)
    for place, end in zip(at.tolist(), ["6\n\n", "10\n\n"], strict=True):
        before, through = (tokenizer.decode(ids[:count]) for count in (place, place + 1))
        assert end in through and not before.endswith(end)


def test_places_are_found_with_tokens_whose_bytes_are_not_those_of_the_text(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "\u00e4\U0001f600 one\n\ntwo \u00f6\n\nthree"
    ids = tokenizer.encode(text)
    ends = [text.index("two"), text.index("three")]
    found = tokens_at(ends, text, ids, tokenizer).tolist()
    monkeypatch.setattr(Tokenizer, "token_bytes", lambda self, token_id: b"")
    assert tokens_at(ends, text, ids, tokenizer).tolist() == found and found[0] < found[1] < len(ids)
    assert tokens_at([len(text)], text, ids[:3], tokenizer).tolist() == [2], "tokens that end before the text does"


def test_blank_steps_have_no_score_and_an_empty_answer_has_one(tokenizer: Tokenizer) -> None:
    assert split_steps("a\n\n\n\nb\n\n", "\n\n") == [("a", 3), ("b", 8)]
    assert split_steps(" \n\n", "\n\n") == [("", 3)] and split_steps("", "\n\n") == [("", 0)]
    empty = encode(tokenizer, "", ids=[])
    assert isinstance(empty, StepText)
    assert empty.outcome(np.array([1.5], np.float32)) == Outcome(score=1.5, components={"steps": 1.0, "step_min": 1.5})
    wrong = empty.outcome(np.array([np.nan], np.float32))
    assert wrong.error_reason == "NOT_FINITE"


def test_steps_need_the_tokens_that_get_their_scores(tokenizer: Tokenizer) -> None:
    found = encode(tokenizer, "a\n\nb", ids=[])
    assert isinstance(found, Outcome) and found.error_reason == "BAD_TOKEN_REWARDS"
    assert "2 steps and no sampled tokens" in found.message
