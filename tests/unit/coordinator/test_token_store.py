"""Tokens of rows on the disk: what is kept of them, why others are dropped, and what a damaged store gets."""

from __future__ import annotations

import errno
import json
import os
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from fourfold.config.sources import DataSourceConfig
from fourfold.errors import ConfigError
from fourfold.model.conversation import EncodingRule, render_answers
from fourfold.model.tokenizer import Tokenizer
from fourfold_coordinator.rows import store as module
from fourfold_coordinator.rows.encode import EncodingSettings
from fourfold_coordinator.rows.normal import Form, Reason, RowFields
from fourfold_coordinator.rows.store import (
    TokenStore,
    check_dropped,
    check_labels,
    open_store,
    prepare_store,
    store_digest,
)
from tests.support.chat_templates import encode_rendered, write_tokenizer
from tests.support.template_shapes import SHAPES

Prepare = Callable[..., TokenStore]


def chat(question: str, answer: str, *more: str) -> dict[str, Any]:
    said = [question, answer, *more]
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]}


CHATS: Final = [chat(f"q{i}", f"a{i}" * (i % 3 + 1)) for i in range(7)]
FILES: Final = {"ids.bin", "loss.bin", "index.bin"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tmp_path_factory.mktemp("model"), "qwen25")


def load(folder: Path, family: str) -> Tokenizer:
    write_tokenizer(folder, SHAPES[family], {"eos_token": "<|im_end|>"})
    return Tokenizer.load(folder)


def write(path: Path, rows: list[dict[str, Any]]) -> DataSourceConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataSourceConfig(path=str(path))


@pytest.fixture
def prepare(tmp_path: Path, tokenizer: Tokenizer) -> Prepare:
    def prepare(rows: list[dict[str, Any]], form: Form = Form.MESSAGES, **settings: Any) -> TokenStore:
        chosen = EncodingSettings(**{"form": form, "max_tokens": 200, **settings})
        return prepare_store(write(tmp_path / "rows.jsonl", rows), chosen, tokenizer, tmp_path / "tokens", block_rows=3)

    return prepare


def texts(store: TokenStore, tokenizer: Tokenizer) -> list[str]:
    """Return the part of each sample that is in the loss."""
    samples = (store.sample(i) for i in range(len(store.index)))
    return [tokenizer.decode(s.token_ids[s.loss_mask].tolist(), skip_special=False) for s in samples]


def test_blocks_hold_the_tokens_that_each_row_has_alone(prepare: Prepare, tokenizer: Tokenizer) -> None:
    store = prepare(CHATS)
    assert len(store) == store.meta.samples == store.meta.rows == store.meta.kept_rows == 7
    for number, row in enumerate(CHATS):
        (alone,) = encode_rendered(render_answers(row["messages"], [], tokenizer, EncodingRule()), tokenizer)
        sample = store.sample(store.samples_of(number)[0])
        assert sample.token_ids.tolist() == alone.token_ids.tolist()
        assert sample.loss_mask.tolist() == alone.loss_mask().tolist()
        assert (sample.row, sample.prompt_length, sample.value) == (number, alone.prompt_length, None)
    assert store.meta.tokens == sum(store.index["length"]) and store.meta.longest_unit == max(store.index["length"])
    assert store.meta.loss_tokens == sum(store.sample(i).loss_mask.sum() for i in range(7))
    assert isinstance(store.sample(0).token_ids.base, np.memmap), "mapped, not read"


def test_a_second_start_reads_no_row(prepare: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(CHATS)
    monkeypatch.setattr(module, "read_rows", None)
    assert prepare(CHATS).meta == first.meta


def test_everything_that_decides_a_token_has_a_digest_of_its_own(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = write(tmp_path / "rows.jsonl", CHATS)
    other_tokenizer = load(tmp_path, "chatml")
    settings = EncodingSettings(form=Form.MESSAGES, max_tokens=200)
    changed = [
        settings,
        EncodingSettings(form=Form.MESSAGES, max_tokens=100),
        EncodingSettings(form=Form.MESSAGES, max_tokens=200, too_long="cut"),
        EncodingSettings(form=Form.MESSAGES, max_tokens=200, rule=EncodingRule(turns="each")),
        EncodingSettings(form=Form.MESSAGES, max_tokens=200, fields=RowFields(weight_field="w")),
    ]
    digests = [store_digest(source, one, tokenizer, {}) for one in changed]
    digests.append(store_digest(source, settings, other_tokenizer, {}))
    digests.append(store_digest(source, settings, tokenizer, {"date": "2026-11-28"}))
    digests.append(store_digest(source.model_copy(update={"size": 3}), settings, tokenizer, {}))
    write(tmp_path / "rows.jsonl", CHATS[:-1])
    digests.append(store_digest(source, settings, tokenizer, {}))
    assert len(set(digests)) == len(digests)
    write(tmp_path / "rows.jsonl", CHATS)
    assert store_digest(source, settings, tokenizer, {}) == digests[0]


def test_the_two_answers_of_a_pair_are_neighbours_with_one_prompt(prepare: Prepare, tokenizer: Tokenizer) -> None:
    sides = {"chosen": "good", "rejected": "bad"}
    rows = [
        {name: chat("p", "earlier", f"q{i}", text)["messages"] for name, text in sides.items()} | {"margin": i}
        for i in range(4)
    ]
    store = prepare(rows, Form.PAIRS)
    assert (len(store), store.meta.samples) == (4, 8)
    for unit in range(4):
        good, bad = (store.sample(i) for i in store.samples_of(unit))
        assert good.prompt_length == bad.prompt_length and good.value == bad.value == unit
        assert (good.token_ids[: good.prompt_length] == bad.token_ids[: bad.prompt_length]).all()
    assert texts(store, tokenizer)[:2] == ["good<|im_end|>", "bad<|im_end|>"]
    assert store.meta.longest_unit == store.index["length"][:2].sum()


def test_each_answer_is_a_unit_with_the_group_of_its_row(prepare: Prepare, tokenizer: Tokenizer) -> None:
    rows = [chat("q", "a", "r", "b"), chat("q", "c"), chat("p", "d")]
    store = prepare(rows, rule=EncodingRule(turns="each"))
    assert texts(store, tokenizer) == [f"{text}<|im_end|>" for text in "abcd"]
    assert len(store) == 4 and store.index["row"].tolist() == [0, 0, 1, 2]
    groups = store.groups().tolist()
    assert groups[0] == groups[1] == groups[2] != groups[3], "equal first prompts"


@pytest.mark.parametrize(
    ("form", "row", "reason"),
    [
        (Form.MESSAGES, chat("q", ""), Reason.NO_LOSS_TOKENS),
        (Form.MESSAGES, chat("q", "a" * 300), Reason.TOO_LONG),
        (Form.MESSAGES, {"messages": [{"role": "wizard", "content": "x"}]}, Reason.BAD_ROW),
        (Form.TEXT, {"text": ""}, Reason.NO_LOSS_TOKENS),
        (Form.PAIRS, {"prompt": "q", "chosen": "a", "rejected": "a"}, Reason.EQUAL_PAIR),
        (Form.PAIRS, {"prompt": "q", "chosen": "a", "rejected": ""}, Reason.EMPTY_SIDE),
        (Form.PAIRS, {"prompt": "q", "chosen": "a", "rejected": "b" * 300}, Reason.TOO_LONG),
        (Form.TOKENS, {"input_ids": [1, 2], "labels": [1, -100]}, Reason.NO_LOSS_TOKENS),
        (Form.TOKENS, {"input_ids": [1, 9999], "labels": [1, 9999]}, Reason.BAD_ROW),
    ],
)
def test_rows_are_dropped_by_reason(prepare: Prepare, form: Form, row: dict[str, Any], reason: Reason) -> None:
    good = {
        Form.MESSAGES: chat("q", "a"),
        Form.TEXT: {"text": "abc"},
        Form.PAIRS: {"prompt": "q", "chosen": "a", "rejected": "b"},
        Form.TOKENS: {"input_ids": [1, 2], "labels": [1, 2]},
    }[form]
    store = prepare([good, row, good], form, bad_rows="drop")
    assert dict(store.meta.dropped) == {reason: 1} and store.meta.kept_rows == 2
    assert store.index["row"].tolist() in ([0, 2], [0, 0, 2, 2])
    (example,) = store.meta.examples[reason]
    assert example.startswith("row 1")
    with pytest.raises(ConfigError, match=rf"1 of 3 rows \(33\.3%\) were dropped as {reason}: row 1.*At most 5%"):
        check_dropped(store.meta, 0.05)
    check_dropped(store.meta, 0.5)


def test_a_data_set_without_a_sample_is_an_error(prepare: Prepare) -> None:
    with pytest.raises(ConfigError, match="were dropped as NO_LOSS_TOKENS"):
        check_dropped(prepare([chat("q", "")]).meta, 1.0)
    with pytest.raises(ConfigError, match="it has no row"):
        check_dropped(prepare([]).meta, 0.05)


def test_a_pattern_of_prompts_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = write(tmp_path / "rows.jsonl", CHATS).model_copy(update={"skip": "x"})
    with pytest.raises(ConfigError, match=r"rows\.jsonl: skip = .* is for prompts"):
        prepare_store(source, EncodingSettings(form=Form.MESSAGES, max_tokens=200), tokenizer, tmp_path)


def test_long_texts_are_cut_or_split(prepare: Prepare, tokenizer: Tokenizer) -> None:
    rows = [{"text": "abcdefgh" * 5}]
    store = prepare(rows, Form.TEXT, too_long="split", max_tokens=16)
    assert store.index["length"].max() <= 16 and store.meta.units == store.meta.samples == 3
    whole = prepare(rows, Form.TEXT)
    joined = np.concatenate([store.sample(i).token_ids for i in range(3)])
    assert joined.tolist() == whole.sample(0).token_ids.tolist(), "no token is lost"
    assert all(not store.sample(i).loss_mask[0] for i in range(3)), "the first of a window has no probability"
    cut = prepare([chat("q", "ab" * 30)], too_long="cut", max_tokens=60)
    assert cut.index["length"].tolist() == [60] and cut.meta.loss_tokens > 0
    with pytest.raises(ConfigError, match="NO_LOSS_TOKENS"):  # the answer is cut away
        check_dropped(prepare([chat("q" * 90, "ab")], too_long="cut", max_tokens=60).meta, 0.05)


def test_labels_of_steps_stand_at_their_last_tokens(prepare: Prepare, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": "q", "completions": ["one", "two"], "labels": [0.25, True]}]
    sample = prepare(rows, Form.STEPS).sample(0)
    at = np.flatnonzero(sample.loss_mask)
    assert sample.labels[at].tolist() == [0.25, 1.0] and np.count_nonzero(sample.labels) == 2
    assert tokenizer.decode(sample.token_ids[: at[0] + 1].tolist()).endswith("one\n\n")
    other = [{"prompt": "q", "completions": ["zero", "two"], "labels": [0, 1]}, {**rows[0], "prompt": "r"}]
    groups = prepare([*rows, *other], Form.STEPS).groups().tolist()
    assert groups[0] == groups[1] != groups[2], "rows with the same prompt are held out together"
    for label in (1.5, -0.25):
        with pytest.raises(ConfigError, match=rf"row 0: the label of a step is {label}; it is true or false, or a num"):
            prepare([{**rows[0], "labels": [label, True]}], Form.STEPS)


def test_labels_of_answers_must_differ(prepare: Prepare) -> None:
    rows = [{"messages": CHATS[0]["messages"], "label": i == 0} for i in range(100)]
    assert "1.0% of the answers are desirable; algorithm.loss.desirable_weight = 99 " in check_labels(
        prepare(rows, Form.LABELLED)
    )
    assert check_labels(prepare(rows[:5], Form.LABELLED)) == ""
    with pytest.raises(ConfigError, match=r"all 99 labels are 0; .*add answers with the other label"):
        check_labels(prepare(rows[1:], Form.LABELLED))


@pytest.mark.parametrize("name", sorted(FILES))
@pytest.mark.parametrize("damage", ["cut", "changed", "removed"])
def test_a_damaged_store_is_refused(prepare: Prepare, name: str, damage: str) -> None:
    store = prepare(CHATS)
    assert set(store.meta.files) == FILES
    path = store.folder / name
    data = bytearray(path.read_bytes())
    if damage == "removed":
        path.unlink()
    else:
        data[5] ^= 1
        path.write_bytes(data[:-1] if damage == "cut" else data)
    expected = "other bytes" if damage == "changed" else "bytes that were written"
    with pytest.raises(ConfigError, match=rf"{name} has .*{expected}.*remove the folder"):
        prepare(CHATS)


def test_a_damaged_table_of_contents_is_refused(prepare: Prepare) -> None:
    store = prepare(CHATS)
    (store.folder / "meta.json").write_text('{"form": ')
    with pytest.raises(ConfigError, match=r"meta\.json cannot be read .*remove the folder"):
        open_store(store.folder)


@pytest.mark.parametrize("error", [ConfigError("the source ended"), KeyboardInterrupt()])
def test_a_build_that_ends_early_leaves_nothing(
    prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def broken(_: DataSourceConfig) -> Iterator[dict[str, Any]]:
        yield from CHATS[:4]
        raise error

    (tmp_path / "tokens" / "fourfold-tokens-killed").mkdir(parents=True)  # of a process that was killed
    monkeypatch.setattr(module, "read_rows", broken)
    with pytest.raises(type(error)):
        prepare(CHATS)
    assert list((tmp_path / "tokens").iterdir()) == []
    monkeypatch.undo()
    assert len(prepare(CHATS)) == 7


def test_memory_does_not_grow_with_the_rows(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def peak(count: int) -> int:
        monkeypatch.setattr(module, "read_rows", lambda _: (chat(f"q{i}", "a" * 50) for i in range(count)))
        settings = EncodingSettings(form=Form.MESSAGES, max_tokens=200 + count)
        tracemalloc.start()
        store = prepare_store(source, settings, tokenizer, tmp_path / "tokens", block_rows=50)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(store) == count
        return found

    source = write(tmp_path / "rows.jsonl", CHATS)
    peak(100)  # fills caches
    assert peak(2000) < 1.5 * peak(200)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EEXIST])
def test_a_full_disk_says_what_to_do(prepare: Prepare, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module._HashedFile, "write", full)
    with pytest.raises(ConfigError, match=rf"cannot write the tokens of .*{os.strerror(number)}.*data\.cache"):
        prepare(CHATS)


def test_two_runs_at_once_get_one_store(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "rows.jsonl", CHATS)
    settings = EncodingSettings(form=Form.MESSAGES, max_tokens=200)
    both = threading.Barrier(2, timeout=60)
    write_meta = module._Builder._write_meta

    def late(builder: Any, digest: str) -> None:
        write_meta(builder, digest)
        both.wait()  # both are whole before either is renamed

    monkeypatch.setattr(module._Builder, "_write_meta", late)
    found: list[TokenStore] = []

    def prepare() -> None:
        found.append(prepare_store(source, settings, tokenizer, tmp_path / "tokens"))

    threads = [threading.Thread(target=prepare) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 2 and found[0].folder == found[1].folder and found[0].meta == found[1].meta
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == [found[0].meta.digest]
