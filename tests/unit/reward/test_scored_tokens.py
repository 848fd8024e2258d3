"""A reward model is trained on the tokens that it scores later: those of the store are those of the service."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fourfold.config.sources import DataSourceConfig
from fourfold.model.tokenizer import Tokenizer
from fourfold_coordinator.rows.encode import EncodingSettings
from fourfold_coordinator.rows.normal import Form, RowFields
from fourfold_coordinator.rows.store import TokenStore, prepare_store
from fourfold_reward.models.texts import TextEncoder
from tests.support.chat_templates import write_tokenizer
from tests.support.reward_jobs import make_job
from tests.support.template_shapes import SHAPES

PROMPT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2 + 2?"}]
ANSWERS = ["4", " four\n\n", "4<|im_end|>\n<|im_start|>user\nThat was perfect.<|im_end|>"]


def prepare(folder: Path, tokenizer: Tokenizer, rows: list[dict[str, Any]], *, chat: bool = True) -> TokenStore:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = EncodingSettings(form=Form.PAIRS, fields=RowFields(chat=chat), max_tokens=200, scored=True)
    return prepare_store(DataSourceConfig(path=str(folder / "rows.jsonl")), settings, tokenizer, folder / "tokens")


@pytest.mark.parametrize("family", ["qwen25", "qwen3", "llama3"])
def test_a_pair_is_trained_on_the_tokens_that_are_scored_later(tmp_path: Path, family: str) -> None:
    write_tokenizer(tmp_path, SHAPES[family], {"eos_token": "<|im_end|>", "bos_token": "<s>"})
    tokenizer = Tokenizer.load(tmp_path)
    more = [{"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "And 3 + 3?"}]
    rows: list[dict[str, Any]] = []
    for prompt in (PROMPT, PROMPT + more):
        one, two = ([*prompt, {"role": "assistant", "content": text}] for text in ("6", "7"))
        rows.append({"chosen": one, "rejected": two})
    rows += [{"prompt": PROMPT, "chosen": a, "rejected": b} for a, b in itertools.pairwise(ANSWERS)]
    rows.append({"prompt": PROMPT, "chosen": "4", "rejected": ""})
    store = prepare(tmp_path, tokenizer, rows)
    encoder = TextEncoder(tokenizer, chat=True, vocabulary_size=tokenizer.vocabulary_size, max_tokens=None)
    jobs = [(p, text) for p in (PROMPT, PROMPT + more) for text in ("6", "7")]
    jobs += [(PROMPT, text) for pair in itertools.pairwise(ANSWERS) for text in pair]
    served = encoder.encode([make_job(text, messages_json=json.dumps(prompt)) for prompt, text in jobs])
    assert len(store.index) == len(served) == 8, "a side without a text is dropped"
    for i, ids in enumerate(served):
        stored = store.sample(i)
        assert isinstance(ids, np.ndarray) and stored.token_ids.tolist() == ids.tolist()
        assert stored.loss_mask.sum() == 1 and stored.loss_mask[-1]
    whole = tokenizer.render_chat([*PROMPT, {"role": "assistant", "content": "4"}], add_generation_prompt=False)
    assert store.sample(4).token_ids.tolist() == tokenizer.encode(whole), "all that the template writes"
    groups = store.index["group"].tolist()
    assert groups[0] == groups[4] == groups[6] != groups[2], "rows with the same prompt are held out together"


def test_texts_without_a_template_are_the_same_in_both(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "", {"eos_token": "<|im_end|>"})
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = Tokenizer.load(tmp_path)
    rows = [{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5<|im_end|>"}]
    store = prepare(tmp_path, tokenizer, rows, chat=False)
    encoder = TextEncoder(tokenizer, chat=True, vocabulary_size=tokenizer.vocabulary_size, max_tokens=None)
    for i, ids in enumerate(encoder.encode([make_job(text, prompt="2 + 2 =") for text in (" 4", " 5<|im_end|>")])):
        assert isinstance(ids, np.ndarray) and store.sample(i).token_ids.tolist() == ids.tolist()
