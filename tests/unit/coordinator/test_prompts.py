"""Data of every kind, the split that keeps held-out operands out, and the order that can be taken up again."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold import config as configuration
from fourfold.config import Config, DataSourceConfig
from fourfold.errors import ConfigError
from fourfold.model.tokenizer import Tokenizer
from fourfold.seeds import derive_seed
from fourfold_coordinator.data import sources
from fourfold_coordinator.data.load_prompts import load_prompts
from fourfold_coordinator.data.prompts import Prompt, PromptSet
from fourfold_coordinator.data.sources import count_rows, read_rows
from tests.fakes.toy import make_config
from tests.support.chat_templates import write_tokenizer

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.toml"
ROWS = [{"question": f"{a} * {b} =", "answer": str(a * b), "difficulty": a} for a in range(3) for b in range(3)]


class Letters:
    """A tokenizer: one token a character; plain text may get a begin token, 1."""

    def render_chat(
        self, messages: Sequence[dict[str, Any]], /, *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        offered = "".join(f"<tool>{tool['function']['name']}" for tool in tools or ())
        return offered + "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"

    def escape(self, value: Any, /) -> Any:
        return value

    def unescape(self, text: str, /) -> str:
        return text

    def encode(self, text: str, /, *, add_special: bool = False) -> list[int]:
        return ([1] if add_special else []) + [ord(c) for c in text]


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., PromptSet]:
    def load(path: Path | str, **data: Any) -> PromptSet:
        table = {"train": {"path": str(path)}, "holdout": None, **data}
        return load_prompts(make_config(tmp_path, data=table), Letters())

    return load


def write_jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_folder(path: Path, rows: list[dict[str, Any]]) -> Path:
    """As `datasets.Dataset.save_to_disk` writes it: two Arrow streams and state.json."""
    path.mkdir()
    names = [f"data-{i:05d}-of-00002.arrow" for i in range(2)]
    for name, part in zip(names, (rows[:4], rows[4:]), strict=True):
        table = pa.Table.from_pylist(part)
        with pa.OSFile(str(path / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    (path / "dataset_info.json").write_text("{}")
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names]}))
    return path


@pytest.mark.parametrize(
    ("name", "write"), [("a.jsonl", write_jsonl), ("a.parquet", write_parquet), ("a", write_folder)]
)
def test_every_format_gives_the_same_prompts(
    tmp_path: Path, load: Callable[..., PromptSet], name: str, write: Callable[[Path, Any], Path]
) -> None:
    prompts = load(write(tmp_path / name, ROWS)).train
    assert [p.text for p in prompts] == [f"<user>{row['question']}<assistant>" for row in ROWS]
    assert [p.answer for p in prompts] == [row["answer"] for row in ROWS]
    assert [json.loads(p.metadata_json) for p in prompts] == [{"difficulty": row["difficulty"]} for row in ROWS]
    assert prompts[0].token_ids.dtype == np.int32
    assert bytes(prompts[0].token_ids.tolist()).decode() == prompts[0].text


def test_a_size_takes_the_first_rows(tmp_path: Path, load: Callable[..., PromptSet]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    assert len(load(path, train={"path": str(path), "size": 4}).train) == 4


@pytest.mark.parametrize(("name", "separator"), [("a.csv", ","), ("a.TSV", "\t")])
def test_tables_of_text_have_a_header(
    tmp_path: Path, load: Callable[..., PromptSet], name: str, separator: str
) -> None:
    lines = ["\ufeffquestion,answer,level", '"1, 2",3,easy', "", '"two\nlines",4,hard']
    (tmp_path / name).write_text("\r\n".join(lines).replace(",", separator).replace(f"1{separator} 2", "1, 2"))
    first, second = load(tmp_path / name, chat=False).train
    assert (first.text, first.answer, json.loads(first.metadata_json)) == ("1, 2", "3", {"level": "easy"})
    assert second.text == "two\nlines"


def test_prompts_themselves_are_held_out_without_a_field(tmp_path: Path, load: Callable[..., PromptSet]) -> None:
    rows = [{"question": f"q{n % 6}"} for n in range(12)]
    prompts = load(write_jsonl(tmp_path / "a.jsonl", rows), holdout={"field": "", "groups": 2}, chat=False)
    held_out = {prompt.text for prompt in prompts.held_out_prompts}
    assert len(held_out) == 2 and len(prompts.train) == 8
    assert not held_out & {prompt.text for prompt in prompts.train}


def test_chat_messages_and_a_system_prompt(tmp_path: Path, load: Callable[..., PromptSet]) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"from": "human", "value": "x"},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "plain"}, {"question": messages}])
    plain, chat = load(path, system_prompt="Be brief.").train
    assert plain.text == "<system>Be brief.<user>plain<assistant>"
    assert chat.text == "<user>hi<assistant>ho<user>x<assistant>"
    assert plain.answer == ""
    assert json.loads(chat.messages_json) == [*messages[:2], {"role": "user", "content": "x"}]


def test_a_last_message_of_the_assistant_is_refused_or_the_answer(
    tmp_path: Path, load: Callable[..., PromptSet]
) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    rows = [{"question": messages[:1], "answer": "a"}, {"question": messages}, {"question": messages, "answer": "b"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(
        ConfigError, match=r"a.jsonl, row 1: the last message is the assistant's, .*answer_from_messages"
    ):
        load(path)
    prompts = load(path, answer_from_messages=True).train
    assert [(p.text, p.answer) for p in prompts] == [("<user>hi<assistant>", answer) for answer in ("a", "ho", "b")]
    assert json.loads(prompts[1].messages_json) == messages[:1]
    for odd in (messages[1:], [*messages, messages[1]]):
        write_jsonl(path, [{"question": odd}])
        with pytest.raises(ConfigError, match=r"a.jsonl, row 0: no message of another role stands before the assis"):
            load(path, answer_from_messages=True)


def test_an_answer_may_be_a_tool_call(tmp_path: Path, load: Callable[..., PromptSet]) -> None:
    call = {"type": "function", "function": {"name": "sum", "arguments": {"a": 1}}}
    rows = [
        {"question": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}]},
        {"question": [{"from": "human", "value": "hi"}, {"from": "function_call", "value": json.dumps(call)}]},
    ]
    for prompt in load(write_jsonl(tmp_path / "a.jsonl", rows), answer_from_messages=True).train:
        assert (prompt.text, json.loads(prompt.answer)) == ("<user>hi<assistant>", [call])
        assert json.loads(prompt.metadata_json)["answer_value"] == [call]


def test_messages_of_sharegpt_have_their_system_message_in_a_column(
    tmp_path: Path, load: Callable[..., PromptSet]
) -> None:
    said = {"from": "user", "value": "hi"}
    rows: list[dict[str, Any]] = [
        {"question": [said], "system": "Be brief."},
        {"question": [{"from": "system", "value": "x"}, said], "system": "Be brief."},
        {"question": [said], "system": ""},
        {"question": [{"role": "user", "content": "hi"}], "system": "Be brief."},
        {"question": "hi", "system": "Be brief."},
    ]
    prompts = load(write_jsonl(tmp_path / "a.jsonl", rows)).train
    plain = "<user>hi<assistant>"
    assert [p.text for p in prompts] == [f"<system>Be brief.{plain}", f"<system>x{plain}", plain, plain, plain]


def test_a_row_may_be_a_list_of_messages_and_an_answer(tmp_path: Path) -> None:
    said = {"from": "human", "value": "hi"}
    (tmp_path / "a.json").write_text(json.dumps([[said, {"from": "assistant", "ground_truth": {"value": "5"}}]]))
    rows = read_rows(DataSourceConfig(path=str(tmp_path / "a.json")))
    assert list(rows) == [{"conversations": [said], "answer": "5"}]


def test_semicolons_may_separate_values(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('question;answer\n"a; b, c";3,5\n')
    assert list(read_rows(DataSourceConfig(path=str(tmp_path / "a.csv")))) == [{"question": "a; b, c", "answer": "3,5"}]


@pytest.mark.parametrize(("end", "codec"), [("gz", "gzip"), ("bz2", "bz2"), ("zst", "zstd")])
def test_text_files_may_be_compressed(tmp_path: Path, end: str, codec: str) -> None:
    rows = [{"question": "\u00e9", "answer": "1"}, {"question": "b", "answer": "2"}]
    texts = {"a.jsonl": "\n".join(map(json.dumps, rows)), "a.json": json.dumps(rows),
             "a.csv": "question;answer\n\u00e9;1\nb;2\n", "a.tsv": "question\tanswer\n\u00e9\t1\nb\t2\n"}  # fmt: skip
    for name, text in texts.items():
        with pa.output_stream(str(tmp_path / f"{name}.{end}"), compression=codec) as file:
            file.write(text.encode())
        source = DataSourceConfig(path=str(tmp_path / f"{name}.{end}"))
        assert (list(read_rows(source)), count_rows(source)) == (rows, None)
    whole = (tmp_path / f"a.jsonl.{end}").read_bytes()
    (tmp_path / f"a.jsonl.{end}").write_bytes(whole[:-6])
    with pytest.raises(ConfigError, match=rf"a.jsonl.{end}: cannot be read: .*; write it again"):
        list(read_rows(DataSourceConfig(path=str(tmp_path / f"a.jsonl.{end}"))))


def test_a_row_may_have_tools(tmp_path: Path, load: Callable[..., PromptSet]) -> None:
    tool = {"name": "sum", "description": None, "parameters": {"type": "object"}}
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "a", "tools": json.dumps([tool])}, {"question": "b"}])
    first, second = load(path).train
    assert (first.text, second.text) == ("<tool>sum<user>a<assistant>", "<user>b<assistant>")
    for tools in ("hammer, saw", '{"hammer": 1}', {"saw": 2}, 3):
        (prompt,) = load(write_jsonl(path, [{"question": "a", "tools": tools}])).train
        assert (prompt.text, json.loads(prompt.metadata_json)) == ("<user>a<assistant>", {"tools": tools})
    write_jsonl(path, [{"question": "a", "tools": ["a hammer"], "mine": "a hammer"}])
    words = r"a.jsonl, row 0: data.tools_field = '{}': a tool is 'a hammer'; it has .*if the data have no tools"
    with pytest.raises(ConfigError, match=words.format("tools")):
        load(path)
    with pytest.raises(ConfigError, match=words.format("mine")):
        load(path, tools_field="mine")
    (prompt,) = load(path, tools_field="").train
    assert json.loads(prompt.metadata_json) == {"tools": ["a hammer"], "mine": "a hammer"}


def test_rows_of_parquet_are_rendered_without_the_members_of_other_rows(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role ~ ':' ~ m.content }}{% if 'tool_calls' in m %}{{ m.tool_calls | length }}"
    )
    template += "{{ m.tool_calls[0].function.arguments.items() | list }}{% endif %};{% endfor %}"
    write_tokenizer(tmp_path, template, {})
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": null}'}}
    rows: list[dict[str, Any]] = [
        {"question": [{"role": "user", "content": "2<|eot|>"}]},
        {
            "question": [
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "content": "4", "tool_call_id": "c"},
            ]
        },
    ]
    path = write_parquet(tmp_path / "a.parquet", rows)
    config = make_config(
        tmp_path, data={"train": {"path": str(path)}, "holdout": None}, model={"max_context_tokens": 250}
    )
    tokenizer = Tokenizer.load(tmp_path)
    first, second = load_prompts(config, tokenizer).train
    assert (first.text, second.text) == ("user:2<|eot|>;", "assistant:1[('x', None)];tool:4;")
    assert first.token_ids.tolist() == [token for part in ("user:2<", "|eot|>;") for token in tokenizer.encode(part)]
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no tools') if messages | length > 1 }}x")
    with pytest.raises(ConfigError, match=r"a.parquet, row 1: the chat template refuses .*'tool'\]: no tools; change"):
        load_prompts(config, Tokenizer.load(tmp_path))


def test_plain_text_is_sent_as_it_is(tmp_path: Path, load: Callable[..., PromptSet]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "2 + 2"}])
    (prompt,) = load(path, chat=False, prompt_field="text").train
    assert prompt.text == "2 + 2"
    assert prompt.token_ids.tolist() == [1, *map(ord, "2 + 2")]


def test_metadata_is_the_other_columns_and_what_is_in_metadata(tmp_path: Path, load: Callable[..., PromptSet]) -> None:
    row = {"question": "q", "answer": 4, "level": 2, "metadata": {"source": "x", "level": 3}}
    (prompt,) = load(write_jsonl(tmp_path / "a.jsonl", [row])).train
    assert json.loads(prompt.metadata_json) == {"level": 3, "source": "x", "answer_value": 4}
    assert prompt.answer == "4"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("['4']", "['4']"),
        (["Paris", "\u00cele"], '["Paris", "\u00cele"]'),
        ({"a": [1, None]}, '{"a": [1, null]}'),
        (True, "true"),
        (0, "0"),
        (1e-07, "1e-07"),
        ([], "[]"),
        (None, ""),
        (float("nan"), ""),
    ],
)
def test_an_answer_keeps_its_json_value_beside_its_text(
    tmp_path: Path, load: Callable[..., PromptSet], value: Any, text: str
) -> None:
    for row, field in (({"question": "q", "gold": value}, "gold"), ({"question": "q", "a": {"b": value}}, "a.b")):
        (prompt,) = load(write_jsonl(tmp_path / "a.jsonl", [row]), answer_field=field).train
        assert prompt.answer == text
        found = json.loads(prompt.metadata_json).get("answer_value")
        expected = value if text and not isinstance(value, str) else None
        assert (found, type(found)) == (expected, type(expected))


def test_a_column_cannot_hide_the_value_of_the_answer(tmp_path: Path, load: Callable[..., PromptSet]) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "answer": [1], "answer_value": 2}])
    with pytest.raises(ConfigError, match=r"row 0: the column 'answer_value' has the name .* rename the column"):
        load(file)
    assert load(file, answer_field="answer_value").train[0].answer == "2"


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_an_answer_inside_of_an_object(
    tmp_path: Path, load: Callable[..., PromptSet], write: Callable[..., Path]
) -> None:
    rows = [
        {"question": "q", "reward_model": {"style": "rule", "ground_truth": "4"}, "extra": {"a": {"b": 5, "c": 6}}},
        {"question": "r", "reward_model": {"style": "rule", "ground_truth": None}, "extra": {"a": None}},
    ]
    path = write(tmp_path / ("a.jsonl" if write is write_jsonl else "a.parquet"), rows)
    first, second = load(path, answer_field="reward_model.ground_truth", order="file").train
    assert (first.answer, second.answer) == ("4", "")
    assert json.loads(first.metadata_json) == {"reward_model": {"style": "rule"}, "extra": rows[0]["extra"]}
    first, second = load(path, answer_field="extra.a.b", order="file").train
    assert (first.answer, second.answer) == ("5", "")
    assert json.loads(first.metadata_json)["extra"] == {"a": {"c": 6}}
    row = {"question": "q", "metadata": {"key": "4", "level": 2}}
    path = write(tmp_path / ("b.jsonl" if write is write_jsonl else "b.parquet"), [row])
    (prompt,) = load(path, answer_field="metadata.key").train
    assert (prompt.answer, json.loads(prompt.metadata_json)) == ("4", {"level": 2})


def test_a_column_with_a_dot_in_its_name_comes_first(tmp_path: Path, load: Callable[..., PromptSet]) -> None:
    row = {"question": "q", "a.b": "column", "a": {"b": "key"}}
    (prompt,) = load(write_jsonl(tmp_path / "a.jsonl", [row]), answer_field="a.b").train
    assert (prompt.answer, json.loads(prompt.metadata_json)) == ("column", {"a": {"b": "key"}})


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("reward_model.ground_trut", r"'reward_model' has no key 'ground_trut'; did you mean `ground_truth`\? Known"),
        ("rewardmodel.ground_truth", r"no column 'rewardmodel'; did you mean `reward_model`\? Known are question, rew"),
        ("reward_model.style.x", r"'reward_model.style' is a str, not an object; correct data.answer_field, or"),
        ("reward_model.", r"'reward_model' has no key ''; choose one of style, ground_truth"),
    ],
)
def test_a_path_to_no_answer_is_named(tmp_path: Path, load: Callable[..., PromptSet], path: str, words: str) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "reward_model": {"style": "r", "ground_truth": "4"}}])
    with pytest.raises(ConfigError, match=rf"a.jsonl, row 0: answer_field = '{path}': {words}"):
        load(file, answer_field=path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"question": "a"}\n{"question": \n', r"a.jsonl:2: not valid JSON"),
        ('{"question": "a", "x": "\\ud83d"}\n', r"a.jsonl:1: not valid JSON: .*surrogates not allowed"),
        ("[" * 100_000, r"a.jsonl: cannot be read: maximum recursion depth exceeded"),
        ("[1]\n", r"a.jsonl: element 0 of the array: not valid JSON: a int in place of an object"),
        ('{"question": "a"}\n[1]\n', r"a.jsonl:2: not valid JSON: a list in place of an object; each line is one JSON"),
        ('\n[{"question": "a"}, {"question": "\\ud83d"}]', r"element 1 of the array: .*surrogates not allowed"),
        ('[{"question": "a"}, {"question": "b"}', r"element 2 of the array: not valid JSON: Expecting value"),
        ('[{"question": "a"}]\n[{"question": "b"}]', r"a.jsonl: there is text after the array; a file has one array"),
        ('{"prompt": "a"}\n', r"row 0: no column 'question'; it has prompt; set data.prompt_field"),
        ('{"question": 3}\n', r"row 0: a prompt is a text, or a list of messages"),
        (
            '{"question": [{"role": "user"}]}\n',
            r"a.jsonl, row 0: message 0 has the content None; the `content` of a mess",
        ),
        (
            '{"question": [{"role": "wizard", "content": ""}]}\n',
            r"a.jsonl, row 0: message 0 has the role 'wizard'; a role is",
        ),
        ("", r"no prompt is left: it is empty"),
    ],
)
def test_malformed_rows_are_named(tmp_path: Path, load: Callable[..., PromptSet], content: str, words: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        load(path)


@pytest.mark.parametrize("part", [1, 7, 1 << 20])
def test_a_json_array_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    monkeypatch.setattr(sources, "_PART", part)
    rows = [{"question": f'"[{n}], {{', "more": [{"a": [n]}] * n} for n in range(9)]
    for name, text in (
        ("a.json", json.dumps(rows, indent=1)),
        ("b.jsonl", f"\ufeff \n{json.dumps(rows)}\n"),
        ("c.json", "[]"),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert list(read_rows(DataSourceConfig(path=str(tmp_path / name)))) == ([] if name == "c.json" else rows)


def test_large_columns_that_nobody_reads_are_left_out(
    tmp_path: Path, load: Callable[..., PromptSet], caplog: pytest.LogCaptureFixture
) -> None:
    large = {"generations": ["x" * 40_000] * 2, "notes": "y" * 30_000, "level": 1}
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "a", "level": 2}, {"question": "b", **large}])
    first, second = load(path).train
    assert json.loads(first.metadata_json) == {"level": 2}
    assert json.loads(second.metadata_json) == {}
    assert all(f"{column} (1 rows)" in caplog.text for column in large) and "data.columns chooses" in caplog.text
    _, second = load(path, columns=["level"]).train
    assert json.loads(second.metadata_json) == {"level": 1}
    with pytest.raises(ConfigError, match=r"no prompt is left: all 1 have more than 65536 bytes of metadata that is u"):
        load(write_jsonl(path, [{"question": "b", **large}]), columns=["generations"])


def test_large_columns_that_a_function_may_read_are_chosen_by_the_user(tmp_path: Path) -> None:
    rows = [{"question": "a", "tests": "x" * 70_000, "level": 1}, {"question": "b", "tests": "assert f()", "level": 1}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)

    def load(function: str, where: str = "", **data: Any) -> list[Any]:
        reward = {"function": function, "evaluate_text": True, "where": {where: ["1"]} if where else {}}
        data |= {"train": {"path": str(path)}, "holdout": None}
        prompts = load_prompts(make_config(tmp_path, data=data, reward=reward), Letters()).train
        return [(prompt.text[6], *json.loads(prompt.metadata_json)) for prompt in prompts]

    with pytest.raises(
        ConfigError, match=r"row 0: \d+ bytes of metadata, most of them in 'tests'; .* set data.columns"
    ):
        load("mine.py:score")
    assert load("mine.py:score", columns=["level"]) == [("a", "level"), ("b", "level")]
    assert load("mine.py:score", where="level", columns=["other"]) == [("a", "level"), ("b", "level")]
    assert load("code_tests") == [("b", "tests", "level")], "the tests of the other row cannot be left out"
    assert load("last_number") == [("a",), ("b", "tests", "level")]


def test_numbers_that_json_lacks_are_null(tmp_path: Path, load: Callable[..., PromptSet]) -> None:
    row = {"question": "q", "a": float("nan"), "b": [float("-inf"), 1], "c": "NaN"}
    (prompt,) = load(write_jsonl(tmp_path / "a.jsonl", [row])).train
    assert prompt.metadata_json == '{"a": null, "b": [null, 1], "c": "NaN"}'


def test_a_table_may_have_long_texts(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"question\n{'x' * 200_000}\n")
    (row,) = read_rows(DataSourceConfig(path=str(tmp_path / "a.csv")))
    assert len(row["question"]) == 200_000


def _write_damaged_parquet(path: Path) -> None:
    content = bytearray(write_parquet(path, ROWS).read_bytes())
    content[4:30] = b"\xff" * 26  # the header of the first page
    path.write_bytes(content)


def test_a_byte_order_mark_and_pairs_of_utf_16_are_read(tmp_path: Path, load: Callable[..., PromptSet]) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"question": "\\ud83d\\ude00"}\n')
    (prompt,) = load(tmp_path / "a.jsonl").train
    assert prompt.text.endswith("\U0001f600<assistant>")


@pytest.mark.parametrize(
    ("name", "make", "words"),
    [
        ("missing.jsonl", lambda p: None, "does not exist"),
        ("a.xlsx", lambda p: p.write_text("x"), "unknown kind '.xlsx'"),
        ("a.csv", lambda p: p.write_text("question,question\na,b\n"), "a.csv:1: a column is there twice: question"),
        ("b.csv", lambda p: p.write_text("question,answer\na,b\nc\n"), "b.csv:3: 1 values, and the header has 2"),
        ("c.csv", lambda p: p.write_text('question\n"a"b\n'), "c.csv:2: not valid CSV"),
        ("d.csv", lambda p: p.write_bytes(b"question\n\xff\xfe\n"), "d.csv:.*not valid CSV in UTF-8"),
        ("a.parquet", lambda p: p.write_text("x"), "a.parquet: cannot be read: .*give another file"),
        ("b.parquet", _write_damaged_parquet, "b.parquet: cannot be read: .*give another file"),
        ("e.jsonl", lambda p: p.write_bytes(b'\n{"question": "\xe9"}\n'), "e.jsonl:2: not valid JSON: 'utf-8'"),
        ("folder", lambda p: p.mkdir(), "is an empty folder"),
        ("saved", lambda p: (p.mkdir(), (p / "state.json").write_text("{")), "no readable state.json"),
    ],
)
def test_files_that_are_no_data_are_named(
    tmp_path: Path, load: Callable[..., PromptSet], name: str, make: Callable[[Path], Any], words: str
) -> None:
    make(tmp_path / name)
    with pytest.raises(ConfigError, match=words):
        load(tmp_path / name)


def test_a_path_in_the_home_of_no_user_is_named(load: Callable[..., PromptSet]) -> None:
    with pytest.raises(ConfigError, match=r"^path = '~no-user/a.jsonl': this machine has no such user; write the whol"):
        load("~no-user/a.jsonl")


def test_a_split_of_a_dataset_folder_is_named(tmp_path: Path, load: Callable[..., PromptSet]) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    (folder / "dataset_dict.json").write_text("{}")
    write_folder(folder / "train", ROWS)
    assert len(load(folder).train) == 9, "the only split needs no name"
    write_folder(folder / "test", ROWS[:5])
    assert len(load(folder, train={"path": str(folder), "split": "test"}).train) == 5
    with pytest.raises(ConfigError, match=r"holds several splits; set split to one of: test, train"):
        load(folder)
    with pytest.raises(ConfigError, match=r"split = 'tran' is unknown; did you mean `train`\?"):
        load(folder, train={"path": str(folder), "split": "tran"})
    with pytest.raises(ConfigError, match="is one file or one split; remove split and config"):
        load("", train={"path": str(folder / "train"), "split": "train"})


@pytest.mark.parametrize(
    ("task", "options", "words"),
    [
        ("product", {}, "reasoning_gym = 'product': there is no such task; did you mean `products`.*Known are"),
        ("qqq", {}, r"there is no such task; choose one of .*products"),
        ("products", {"min_term": 2}, "options of reasoning_gym 'products': it has no 'min_term'; did you mean `min_"),
        ("products", {"size": 3}, "'size' is a key next to reasoning_gym; move it there"),
        ("composite", {"datasets": [{"name": "chain_sum", "weight": 1}]}, "reasoning_gym 'composite' with options"),
        ("products", {"min_terms": 3, "max_terms": 2}, r"'max_terms': 2\}: max_terms must be >= min_terms"),
    ],
)
def test_a_task_that_cannot_be_made_is_named(
    load: Callable[..., PromptSet], task: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load("", train={"reasoning_gym": task, "options": options, "size": 3})


def test_prompts_that_are_too_long_are_dropped_and_counted(
    tmp_path: Path, load: Callable[..., PromptSet], caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "a"}, {"question": "b" * 80}, {"question": "c" * 47}])
    with caplog.at_level(logging.WARNING):
        prompts = load(path).train
    assert [p.index for p in prompts] == [0]  # 64 tokens of context, 17 of the template: 47 leave no room to answer
    assert "dropped 2 of 3 prompts" in caplog.text and "rows 1, 2" in caplog.text
    with pytest.raises(ConfigError, match=r"no prompt is left: all 1 leave no room in model.max_context_tokens = 64"):
        load(write_jsonl(tmp_path / "b.jsonl", [{"question": "b" * 80}]))


@pytest.mark.parametrize(
    ("asked", "overlaps"),
    [
        ("What is  2 * 3?", True),
        ("what is 2 * 3?\n", True),
        ("\uff37hat is \uff12\u00a0* 3?", True),
        ([{"role": "system", "content": "Think."}, {"role": "user", "content": "What is  2 * 3?"}], True),
        ("What is 2 + 3?", False),
        ([{"role": "user", "content": "Hi"}, {"role": "user", "content": "What is 2 * 3?"}], False),
    ],
)
def test_held_out_prompts_that_are_trained_are_refused(
    tmp_path: Path, load: Callable[..., PromptSet], asked: Any, overlaps: bool
) -> None:
    train = write_jsonl(tmp_path / "a.jsonl", [{"question": "x"}, {"question": "What is  2 * 3?"}])
    held_out = write_jsonl(tmp_path / "b.jsonl", [{"question": "y"}, {"question": asked}])
    data = {"eval": {"path": str(held_out)}, "system_prompt": "Be brief."}
    if not overlaps:
        assert load(train, **data).warnings == ()
        return
    words = r"^1 of 2 prompts of the held-out set b are training prompts, too .*: row 1 is training row 1; remove"
    with pytest.raises(ConfigError, match=words):
        load(train, **data)
    (warning,) = load(train, eval_overlap="warn", **data).warnings
    assert re.match(words, warning)


def test_several_held_out_sets_have_their_own_prompts_and_sampling(
    tmp_path: Path, load: Callable[..., PromptSet]
) -> None:
    train = write_jsonl(tmp_path / "a.jsonl", ROWS)
    other = write_jsonl(tmp_path / "hard problems.jsonl", [{"question": str(i)} for i in range(3)])
    hard = {"path": str(other), "max_prompts": 2, "samples_per_prompt": 5, "temperature": 0.0}
    prompts = load(train, holdout={"field": "", "groups": 4}, eval=[hard, {"path": str(other), "name": "all"}])
    assert [(s.name, len(s.prompts), s.answer_count) for s in prompts.held_out] == [
        ("holdout", 4, 8), ("hard-problems", 2, 10), ("all", 3, 6)
    ]  # fmt: skip
    rules = [(s.rule.temperature, s.rule.max_new_tokens) for s in prompts.held_out]
    assert rules == [(1.0, 8), (0.0, 8), (1.0, 8)]
    assert [p.group_key for p in prompts.held_out[1].prompts] == ["row 0", "row 1"], "no groups of the training data"
    assert len(prompts.train) == 5 and len(prompts.held_out_prompts) == 9


def test_more_groups_than_there_are_cannot_be_held_out(tmp_path: Path, load: Callable[..., PromptSet]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"data.holdout.groups = 3, but the data has 3 groups by 'difficulty'"):
        load(path, holdout={"field": "difficulty", "groups": 3})
    with pytest.raises(
        ConfigError, match=r"data.holdout.field = 'level': .*, row 0 has no such field; it has difficulty;"
    ):
        load(path, holdout={"field": "level", "groups": 1})


# -- the quickstart's split -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quickstart() -> tuple[Config, PromptSet]:
    config = configuration.load(QUICKSTART)
    model = config.model.model_copy(update={"max_context_tokens": 512})  # here a token is one letter
    config = config.model_copy(update={"model": model})
    return config, load_prompts(config, Letters())


def operands(prompt: Prompt) -> tuple[int, int]:
    found = re.search(r"(\d) \* (\d)\. Give", prompt.text)
    assert found
    return int(found[1]), int(found[2])


def test_no_held_out_pair_is_in_training_in_either_order(quickstart: tuple[Config, PromptSet]) -> None:
    _, prompts = quickstart
    held_out = {operands(p) for p in prompts.held_out_prompts}
    trained = {operands(p) for p in prompts.train}
    assert not trained & held_out
    assert not trained & {(b, a) for a, b in held_out}
    both = {(a, b) for a in range(2, 10) for b in range(2, 10)}
    assert trained | held_out == both, "every pair of factors from 2 to 9 is in one of the two, and no other"


def test_rows_whose_prompt_matches_skip_are_left_out(tmp_path: Path, load: Callable[..., PromptSet]) -> None:
    messages = [{"role": "user", "content": "what is 1?"}]
    file = write_jsonl(tmp_path / "a.jsonl", [{"question": text} for text in ("1 * 4", "11 * 4", messages, "2 * 4")])
    prompts = load(file, train={"path": str(file), "skip": r"\b[01]\b"}, order="file").train
    assert [(prompt.index, prompt.text) for prompt in prompts] == [
        (1, "<user>11 * 4<assistant>"),
        (3, "<user>2 * 4<assistant>"),
    ]
    with pytest.raises(ConfigError, match=r"no prompt is left: all 4 match skip = '\\\\d'"):
        load(file, train={"path": str(file), "skip": r"\d"})
    with pytest.raises(ValueError, match=r"skip = '\('.* is no regular expression"):
        configuration.load(QUICKSTART, ["data.train.skip='('"])


def test_the_split_is_a_matter_of_the_seed(quickstart: tuple[Config, PromptSet]) -> None:
    config, prompts = quickstart
    again = load_prompts(config, Letters())
    other = load_prompts(config.model_copy(update={"seed": 18}), Letters())
    assert again.digest() == prompts.digest() != other.digest()
    assert {p.group_key for p in again.held_out_prompts} != {p.group_key for p in other.held_out_prompts}


# -- order ------------------------------------------------------------------------------------------------------------


def numbered(count: int, seed: int = 0, **options: Any) -> PromptSet:
    return PromptSet(train=[a_prompt(i) for i in range(count)], held_out=[], seed=seed, **options)


def a_prompt(index: int, source: str = "") -> Prompt:
    return Prompt(
        index=index, text=str(index), token_ids=np.array([index], np.int32), answer="", metadata_json="{}",
        group_key=str(index), source=source,
    )  # fmt: skip


@given(count=st.integers(1, 20), seed=st.integers(0, 2**31 - 1), position=st.integers(0, 100))
def test_the_order_is_endless_fair_and_can_be_taken_up_anywhere(count: int, seed: int, position: int) -> None:
    prompts = numbered(count, seed)
    start = position - position % count
    one_pass = [prompts.at(start + offset).index for offset in range(count)]
    assert sorted(one_pass) == list(range(count)), "every pass has each prompt once"
    assert numbered(count, seed).at(position).index == one_pass[position - start]


def test_the_order_of_one_source_never_changes() -> None:
    """A release that changes these numbers changes every run: they are those of the first release."""
    prompts = numbered(20, 17)
    first, second = [prompts.at(i).index for i in range(20)], [prompts.at(i).index for i in range(20, 40)]
    assert first == [12, 2, 9, 11, 3, 17, 18, 4, 10, 7, 14, 8, 0, 13, 5, 1, 19, 16, 15, 6]
    assert second == [18, 1, 4, 8, 15, 17, 13, 7, 14, 6, 2, 10, 11, 19, 3, 5, 9, 16, 0, 12]
    assert prompts.digest() == "6ab10110c5a204ece0f88b85ea6b3c6c5cfb9bb4544c84037a7c5d0358471ef0"


def test_the_order_of_the_file_is_the_same_in_each_pass() -> None:
    prompts = numbered(4, 17, shuffled=False)
    assert [prompts.at(i).index for i in range(9)] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert prompts.digest() != numbered(4, 17).digest(), "a position means another prompt"


def test_derived_seeds_leave_room_for_the_samples_of_a_group() -> None:
    seeds = [derive_seed(17, "train", i) for i in range(1000)]
    assert len(set(seeds)) == 1000
    assert all(seed >= 0 and seed + 256 < 2**53 for seed in seeds)
    assert derive_seed(17, "train", 0) == 1325246660875858, "a release that changes this changes every run"
