"""Steps of rows: each row once per pass, the same after a resume, and as samples that a trainer takes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fourfold.config.sources import DataSourceConfig
from fourfold.errors import ConfigError
from fourfold.model.tokenizer import Tokenizer
from fourfold.sample.columns import Samples
from fourfold_coordinator.rows.encode import EncodingSettings
from fourfold_coordinator.rows.normal import Form, RowFields
from fourfold_coordinator.rows.row_source import RowBatch, RowSource, split_held_out
from fourfold_coordinator.rows.store import TokenStore, prepare_store
from tests.support.chat_templates import write_tokenizer
from tests.support.template_shapes import SHAPES


@pytest.fixture
def store(tmp_path: Path) -> Callable[..., TokenStore]:
    write_tokenizer(tmp_path, SHAPES["qwen25"], {"eos_token": "<|im_end|>"})
    tokenizer = Tokenizer.load(tmp_path)

    def store(rows: list[dict[str, Any]], form: Form = Form.COMPLETION, **fields: Any) -> TokenStore:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = EncodingSettings(form=form, max_tokens=200, fields=RowFields(**fields))
        return prepare_store(DataSourceConfig(path=str(path)), settings, tokenizer, tmp_path / "tokens")

    return store


def rows(count: int, prompts: int = 1000) -> list[dict[str, Any]]:
    return [{"prompt": f"q{i % prompts}", "completion": f"a{i}"} for i in range(count)]


def take_all(source: RowSource) -> list[RowBatch]:
    batches = list[RowBatch]()
    while (batch := source.take(len(batches) + 1)) is not None:
        batches.append(batch)
    return batches


def content(batch: RowBatch) -> list[bytes]:
    return [sample.token_ids.tobytes() for sample in batch.samples]


def test_each_row_is_in_one_step_of_each_pass(store: Callable[..., TokenStore]) -> None:
    source = RowSource([store(rows(10))], rows_per_step=4, seed=1, passes=2.5)
    batches = take_all(source)
    assert [batch.units for batch in batches] == [4, 4, 2, 4, 4, 2, 4, 1]
    assert source.steps == 8 and source.passes_done == 2.5
    passes = [[c for batch in part for c in content(batch)] for part in (batches[:3], batches[3:6])]
    assert all(set(Counter(one).values()) == {1} and len(one) == 10 for one in passes)
    assert sorted(passes[0]) == sorted(passes[1]) and passes[0] != passes[1], "shuffled differently"
    assert batches[2].next_position == batches[3].first_position == 10


def test_a_resumed_run_goes_on_with_the_next_row(store: Callable[..., TokenStore]) -> None:
    stored = store(rows(10))
    batches = take_all(RowSource([stored], rows_per_step=4, seed=1, passes=2))
    position = batches[1].next_position
    resumed = take_all(RowSource([stored], rows_per_step=4, seed=1, passes=3, position=position))
    assert list(map(content, resumed[:4])) == list(map(content, batches[2:]))
    assert len(resumed) == 7, "with more passes it goes on"
    assert RowSource([stored], rows_per_step=4, seed=1, passes=2, position=20).take(1) is None


def test_rows_may_keep_the_order_of_their_file(store: Callable[..., TokenStore]) -> None:
    stored = store(rows(5))
    (batch,) = take_all(RowSource([stored], rows_per_step=5, seed=1, shuffled=False, passes=1))
    assert content(batch) == [stored.sample(i).token_ids.tobytes() for i in range(5)]


def test_weighted_stores_have_their_shares_and_no_end(store: Callable[..., TokenStore]) -> None:
    first, second = store(rows(8)), store([{"prompt": "x", "completion": str(i)} for i in range(4)])
    source = RowSource([first, second], rows_per_step=8, seed=1, weights=[3, 1])
    batches = [batch for step in range(128) if (batch := source.take(step)) is not None]
    assert source.steps is None and {batch.units for batch in batches} == {8}
    other = {second.sample(i).token_ids.tobytes() for i in range(4)}
    assert sum(one in other for batch in batches for one in content(batch)) == 256, "of 1024"
    with pytest.raises(ConfigError, match=r"data\.passes = 1: a mixture with weights"):
        RowSource([first, second], rows_per_step=1, seed=1, weights=[3, 1], passes=1)
    with pytest.raises(ConfigError, match="no row is left to train on"):
        RowSource([first, second], rows_per_step=1, seed=1, weights=[3, 1], units=np.arange(8))


def test_stores_without_weights_are_one_pool(store: Callable[..., TokenStore]) -> None:
    stores = [store(rows(3)), store([{"prompt": "x", "completion": str(i)} for i in range(2)])]
    (batch,) = take_all(RowSource(stores, rows_per_step=5, seed=1, passes=1))
    assert sorted(content(batch)) == sorted(s.sample(i).token_ids.tobytes() for s in stores for i in range(len(s)))


def test_other_data_or_another_order_has_another_digest(store: Callable[..., TokenStore]) -> None:
    first, second = store(rows(8)), store(rows(9))
    one = RowSource([first], rows_per_step=4, seed=1, passes=1)
    others = [
        RowSource([second], rows_per_step=4, seed=1),
        RowSource([first], rows_per_step=4, seed=1, units=np.arange(7)),
        RowSource([first], rows_per_step=4, seed=1, shuffled=False),
        *(RowSource([first, second], rows_per_step=4, seed=1, weights=w) for w in ([], [1, 1], [1, 2])),
    ]
    assert len({source.digest() for source in (one, *others)}) == 7
    assert RowSource([first], rows_per_step=2, seed=1, passes=3).digest() == one.digest(), "a run may be extended"


def test_fewer_rows_than_a_step_has_are_an_error(store: Callable[..., TokenStore]) -> None:
    with pytest.raises(ConfigError, match=r"batch\.rows_per_step = 4, and the data has 3 rows"):
        RowSource([store(rows(3))], rows_per_step=4, seed=1)


def test_samples_have_what_a_trainer_reads(store: Callable[..., TokenStore]) -> None:
    pairs = [{"prompt": f"q{i}", "chosen": "yes", "rejected": "no", "margin": 0.5} for i in range(4)]
    batch = RowSource([store(pairs, Form.PAIRS)], rows_per_step=3, seed=1).take(7)
    assert batch is not None
    samples = Samples.of(batch.samples)
    assert len(set(samples.values["sample_id"])) == 6
    assert len(set(samples.values["group_id"])) == 3
    for chosen, rejected in zip(batch.samples[::2], batch.samples[1::2], strict=True):
        assert chosen.group_id == rejected.group_id and (chosen.score, rejected.score) == (0.5, 0.0)
        assert len(chosen.token_ids) > len(rejected.token_ids), "the chosen answer is the first"
        for sample in (chosen, rejected):
            assert sample.loss_mask.dtype == np.bool_ and sample.token_ids.dtype == np.int32
            assert (sample.loss_mask == sample.action_mask).all() and not sample.action_mask[0]
            assert len(sample.behavior_logprobs) == 0 and sample.version_spans == ()


@pytest.mark.parametrize(
    ("row", "form", "fields", "score"),
    [
        ({"prompt": "q", "completion": "a"}, Form.COMPLETION, {}, 1.0),
        ({"prompt": "q", "completion": "a", "w": 0.25}, Form.COMPLETION, {"weight_field": "w"}, 0.25),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, Form.PAIRS, {}, 1.0),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": 0}, Form.PAIRS, {}, 2.0**-100),
        ({"prompt": "q", "completion": "a", "label": False}, Form.LABELLED, {}, 0.0),
        ({"prompt": "q", "completions": ["a"], "labels": [1]}, Form.STEPS, {}, 1.0),
    ],
)
def test_score_is_the_weight_the_margin_or_the_label(
    store: Callable[..., TokenStore], row: dict[str, Any], form: Form, fields: dict[str, str], score: float | None
) -> None:
    batch = RowSource([store([row], form, **fields)], rows_per_step=1, seed=1).take(1)
    assert batch is not None and batch.samples[0].score == score
    assert [sample.score for sample in batch.samples[1:]] == [0.0] * (form == Form.PAIRS)
    assert (len(batch.samples[0].token_rewards) > 0) == (form == Form.STEPS)


def test_a_held_out_prompt_is_in_no_training_row(store: Callable[..., TokenStore]) -> None:
    stores = [store(rows(20, prompts=10)), store(rows(30, prompts=10))]
    train, held = split_held_out(stores, 3, seed=5)
    assert sorted([*train, *held]) == list(range(50)) and len(held) == 15
    groups = np.concatenate([s.groups() for s in stores])
    assert not set(groups[train]) & set(groups[held]) and len(set(groups[held])) == 3
    batches = take_all(RowSource(stores, rows_per_step=7, seed=1, units=train, passes=1))
    assert sum(batch.units for batch in batches) == 35
    assert split_held_out(stores, 3, seed=5)[1].tolist() == held.tolist()
    with pytest.raises(ConfigError, match=r"data\.holdout\.groups = 10, but the data has 10 prompts"):
        split_held_out(stores, 10, seed=5)
