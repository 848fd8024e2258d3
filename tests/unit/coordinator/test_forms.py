"""Rows of every form that public data sets have load without a key that names it, and wrong rows say what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Final

import pytest

from fourfold.errors import ConfigError, InvalidInput
from fourfold_coordinator.rows.forms import normalise, recognise
from fourfold_coordinator.rows.normal import READS, Chat, Form, NormalRow, Plain, Reads, RowFields, Steps, Tokens

FIELDS: Final = RowFields()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def sharegpt(sender: str, value: str) -> dict[str, Any]:
    return {"from": sender, "value": value}


def read(row: dict[str, Any], fields: RowFields = FIELDS, form: Form | None = None) -> NormalRow:
    return normalise(row, form or recognise([row], fields), fields)


def pair(chosen: Any, rejected: Any, **others: Any) -> dict[str, Any]:
    return {"chosen": chosen, "rejected": rejected, **others}


CHAT: Final = [user("q"), reply("a")]
CALL: Final = {"type": "function", "function": {"name": "rain", "arguments": {"city": "Ulm"}}}
TOOL: Final = {"type": "function", "function": {"name": "rain", "description": "", "parameters": {"type": "object"}}}
TRANSCRIPT: Final = "\n\nHuman: q\n\nAssistant: a\n\nHuman: r\n\nAssistant: "

# Form, what the loss reads, row, sides, value. Chats are (messages, answers_from).
ROWS: Final[dict[str, tuple[Form, Reads, dict[str, Any], list[Any], float | None]]] = {
    "tulu-sft": (Form.MESSAGES, "answers", {"id": "1", "messages": CHAT, "source": "x"}, [(CHAT, 0)], None),
    "sharegpt": (
        Form.MESSAGES, "answers",
        {"conversations": [sharegpt("prompter", "q"), sharegpt("bot", "a")], "system": "s", "tools": None},
        [([{"role": "system", "content": "s"}, *CHAT], 0)], None,
    ),
    "ultrachat": (Form.MESSAGES, "answers", {"prompt": "q", "prompt_id": "1", "messages": CHAT}, [(CHAT, 0)], None),
    "trl-completion": (Form.COMPLETION, "answers", {"prompt": "q", "completion": "a"}, [(CHAT, 1)], None),
    "trl-completion-messages": (
        Form.COMPLETION, "answers", {"prompt": CHAT[:1], "completion": CHAT[1:]}, [(CHAT, 1)], None
    ),
    "openrlhf": (Form.COMPLETION, "answers", {"input": "q", "output": "a"}, [(CHAT, 1)], None),
    "openorca": (
        Form.COMPLETION, "answers", {"id": "1", "system_prompt": "s", "question": "q", "response": "a"},
        [([{"role": "system", "content": "s"}, *CHAT], 2)], None,
    ),
    "alpaca": (
        Form.ALPACA, "answers", {"instruction": "q", "input": "i", "output": "a", "text": "### q i a"},
        [([user("q\ni"), reply("a")], 1)], None,
    ),
    "alpaca-history": (
        Form.ALPACA, "answers",
        {"instruction": "q", "input": "", "output": "a", "system": "s", "history": [["q0", "a0"]]},
        [([{"role": "system", "content": "s"}, user("q0"), reply("a0"), *CHAT], 4)], None,
    ),
    "text": (Form.TEXT, "answers", {"text": "abc", "url": "x"}, [Plain(prompt="", answer="abc")], None),
    "one-text": (Form.TEXT, "answers", {"content": "abc", "stars": 3}, [Plain(prompt="", answer="abc")], None),
    "input-ids": (
        Form.TOKENS, "answers", {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "text": "x"},
        [Tokens(token_ids=[5, 6, 7], in_loss=[False, True, True])], None,
    ),
    "loss-mask": (
        Form.TOKENS, "answers", {"input_ids": [5, 6], "loss_mask": [0, 1], "attention_mask": [1, 1]},
        [Tokens(token_ids=[5, 6], in_loss=[False, True])], None,
    ),
    "ultrafeedback": (
        Form.PAIRS, "pairs",
        pair(CHAT, [user("q"), reply("b")], prompt="q", messages=CHAT, score_chosen=8.0, score_rejected=2.0),
        [(CHAT, 1), ([user("q"), reply("b")], 1)], None,
    ),
    "trl-implicit": (
        Form.PAIRS, "pairs", pair([*CHAT, *CHAT], [*CHAT, user("q"), reply("b")]),
        [([*CHAT, *CHAT], 3), ([*CHAT, user("q"), reply("b")], 3)], None,
    ),
    "trl-explicit": (
        Form.PAIRS, "pairs", pair(CHAT[1:], [reply("b")], prompt=CHAT[:1], margin=1.5),
        [(CHAT, 1), ([user("q"), reply("b")], 1)], 1.5,
    ),
    "openrlhf-pairs": (
        Form.PAIRS, "pairs", pair("a", "b", prompt="q", system="s"),
        [([{"role": "system", "content": "s"}, user("q"), reply(t)], 2) for t in "ab"], None,
    ),
    "texts-without-a-prompt": (
        Form.PAIRS, "pairs", pair("q a", "q b"), [Plain(prompt="", answer=t) for t in ("q a", "q b")], None
    ),
    "anthropic-hh": (
        Form.PAIRS_IN_TRANSCRIPTS, "pairs", pair(TRANSCRIPT + "c", TRANSCRIPT + "d"),
        [([*CHAT, user("r"), reply(t)], 3) for t in "cd"], None,
    ),
    "llama-factory-pairs": (
        Form.PAIRS_SHAREGPT, "pairs",
        pair(sharegpt("gpt", "a"), sharegpt("gpt", "b"), conversations=[sharegpt("human", "q")]),
        [(CHAT, 1), ([user("q"), reply("b")], 1)], None,
    ),
    "trl-kto": (Form.LABELLED, "labels", {"prompt": "q", "completion": "a", "label": True}, [(CHAT, 1)], 1.0),
    "labelled-messages": (Form.LABELLED, "labels", {"messages": CHAT, "label": "0"}, [(CHAT, 1)], 0.0),
    "llama-factory-kto": (Form.LABELLED, "labels", {"messages": CHAT, "kto_tag": False}, [(CHAT, 1)], 0.0),
    "trl-stepwise": (
        Form.STEPS, "steps", {"prompt": "q", "completions": ["1", "2"], "labels": [True, False]},
        [Steps(prompt=Chat(messages=[user("q")]), steps=["1", "2"], labels=[1.0, 0.0], separator="\n\n")],
        None,
    ),
}  # fmt: skip


def as_side(expected: Any, tools: Any = ()) -> Any:
    return (
        Chat(messages=expected[0], answers_from=expected[1], tools=list(tools))
        if isinstance(expected, tuple)
        else expected
    )


def plain_lists(side: Any) -> Any:
    """Return a side whose empty tools are a list."""
    if isinstance(side, Steps) and isinstance(side.prompt, Chat):
        return replace(side, prompt=plain_lists(side.prompt))
    return (
        Chat(messages=side.messages, answers_from=side.answers_from, tools=list(side.tools))
        if isinstance(side, Chat)
        else side
    )


@pytest.mark.parametrize("name", ROWS)
def test_form_is_recognised_and_read(name: str) -> None:
    form, reads, row, sides, value = ROWS[name]
    assert recognise([row], FIELDS, reads) == form and READS[form] == reads
    found = normalise(row, form, FIELDS)
    assert [plain_lists(side) for side in found.sides] == [plain_lists(as_side(side)) for side in sides]
    assert found.value == value


def test_math_shepherd_needs_its_marker() -> None:
    fields = RowFields(step_marker="\u043a\u0438")
    row = {"input": "q 1 \u043a\u0438\n2 \u043a\u0438", "label": "q 1 +\n2 -", "task": "x"}
    expected = Steps(prompt="", steps=["q 1 ", "\n2 "], labels=[1.0, 0.0], separator="\u043a\u0438")
    assert recognise([row], fields, "steps") == Form.STEPS_IN_TEXT
    assert read(row, fields, Form.STEPS_IN_TEXT).sides == (expected,)
    assert read(row | {"label": ["+", "-"]}, fields, Form.STEPS_IN_TEXT).sides == (expected,)
    with pytest.raises(InvalidInput, match=r"2 steps end with .* there are 1 labels"):
        read(row | {"label": ["+"]}, fields, Form.STEPS_IN_TEXT)
    with pytest.raises(InvalidInput, match=r"not the text with \+ or -"):
        read(row | {"label": "q 2 +\n2 -"}, fields, Form.STEPS_IN_TEXT)


def test_calls_and_tools_may_be_json_text() -> None:
    said = [sharegpt("human", "Rain?"), sharegpt("function_call", json.dumps(CALL["function"])),
            sharegpt("observation", "no"), sharegpt("gpt", "No.")]  # fmt: skip
    (side,) = read({"conversations": said, "tools": json.dumps([TOOL["function"]])}).sides
    assert isinstance(side, Chat)
    assert [m["role"] for m in side.messages] == ["user", "assistant", "tool", "assistant"]
    assert side.messages[1]["tool_calls"][0]["function"] == CALL["function"] and side.tools == [TOOL]
    openai = [user("Rain?"), {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "rain", "arguments": '{"city": "Ulm"}'}}]}]  # fmt: skip
    (side,) = read({"messages": openai, "tools": [TOOL]}).sides
    assert isinstance(side, Chat) and side.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Ulm"}


def test_other_names_of_columns_and_plain_text() -> None:
    fields = RowFields(prompt_field="ask", answer_field="say", chat=False, system_prompt="S", weight_field="w")
    assert read({"ask": "q", "say": "a", "w": 0.5}, fields) == NormalRow(
        sides=(Plain(prompt="S\n\nq", answer="a"),), value=0.5
    )
    fields = RowFields(chosen_field="good", rejected_field="bad", margin_field="m", system_prompt="S")
    found = read({"good": "a", "bad": "b", "prompt": "q", "m": 2}, fields)
    assert found.value == 2 and isinstance(side := found.sides[0], Chat) and side.messages[0]["content"] == "S"
    (side,) = read({"text": CHAT}, RowFields(messages_field="text")).sides
    assert isinstance(side, Chat) and side.messages == CHAT


def test_the_loss_decides_which_form_is_read() -> None:
    row = ROWS["ultrafeedback"][2]
    assert recognise([row], FIELDS, "answers") == Form.MESSAGES
    assert recognise([row], FIELDS) == Form.PAIRS
    assert recognise([{"messages": None, "text": "x"}, {"messages": CHAT}], FIELDS) == Form.MESSAGES, "null: absent"


def test_a_pair_of_several_turns_is_compared_only_if_asked() -> None:
    row = pair([user("q"), reply("a"), user("r"), reply("b")], [user("q"), reply("c"), user("r"), reply("d")])
    with pytest.raises(InvalidInput, match=r"differ before their last message, at message 1: .*data\.loss_on"):
        read(row)
    sides = read(row, RowFields(several_turns=True)).sides
    assert [side.answers_from for side in sides if isinstance(side, Chat)] == [1, 1]


@pytest.mark.parametrize(
    ("rows", "reads", "text"),
    [
        ([{"a": 1, "b": "x", "c": "y"}], "pairs", r"columns a, b, c; the loss reads pairs.*chosen_field"),
        ([{"a": 1}], None, r"columns a; these need `messages`.*data\.prompt_field"),
        ([{"promt": "q", "completion": "a"}], "answers", r"there is no column 'prompt': did you mean `promt`\?"),
        ([{"messages": CHAT}], "labels", r"data\.label_field"),
        ([{"messages": CHAT}], "steps", r"the loss reads steps, and these need `prompt`, `completions` and `labels`"),
        (
            [{"prompt": "q", "chosen": CHAT, "rejected": [*CHAT[:1], reply("b")]}],
            "answers",
            r"are those of pairs, and the loss reads answers; set a preset .*data\.form = \"text\"",
        ),
        ([{"prompt": "q", "completions": ["s"], "labels": [True]}], "answers", r"are those of steps, and the loss"),
        ([{"messages": CHAT, "conversations": CHAT}], "answers", r"messages and conversations; .*messages_field"),
        (
            [{"messages": CHAT, "prompt": "q", "completion": "a"}],
            "answers",
            r'forms messages and completion; .*data\.form = "mess',
        ),
    ],
)
def test_columns_that_fit_no_form_or_two(rows: list[dict[str, Any]], reads: Reads | None, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        recognise(rows, FIELDS, reads)


@pytest.mark.parametrize(
    ("form", "row", "text"),
    [
        (Form.MESSAGES, {"message": CHAT}, r"no column 'messages'; did you mean `message`\?.*data\.messages_field"),
        (Form.COMPLETION, {"prompt": "q", "complete": "a"}, r"no column 'completion'; did you mean `complete`"),
        (Form.PAIRS, {"chosen": CHAT}, r"no column 'rejected'; the row has chosen; set data\.rejected_field"),
    ],
)
def test_missing_column_is_an_error_of_the_recipe(form: Form, row: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read(row, form=form)


@pytest.mark.parametrize(
    ("form", "row", "text"),
    [
        (Form.MESSAGES, {"messages": []}, r"the messages are \[\]"),
        (Form.MESSAGES, {"messages": "hello"}, r"the messages are 'hello'"),
        (Form.MESSAGES, {"messages": [{"role": "wizard", "content": "x"}]}, r"message 0 has the role 'wizard'"),
        (Form.MESSAGES, {"messages": [{"role": "user", "content": 3}]}, r"message 0 has the content 3"),
        (Form.MESSAGES, {"messages": CHAT[:1]}, r"last message has the role 'user'"),
        (Form.MESSAGES, {"messages": CHAT, "tools": [3]}, r"a tool is 3"),
        (Form.COMPLETION, {"prompt": 3, "completion": "a"}, r"the messages are 3"),
        (Form.TEXT, {"text": 3}, r"the column text is 3; it is a text"),
        (Form.ALPACA, {"instruction": "q", "output": "a", "history": [["x"]]}, r"an entry of the history is \['x'\]"),
        (Form.LABELLED, {"messages": CHAT, "label": 0.5}, r"the label \(label\) is 0\.5; it is true or false"),
        (Form.PAIRS, pair("a", "b", margin=-1), r"the margin \(margin\) is -1; it is at least 0"),
        (Form.PAIRS, pair("a", "b", margin=float("inf")), r"the margin \(margin\) is inf; it is a finite number"),
        (
            Form.PAIRS,
            pair(CHAT, [user("p"), reply("b")]),
            r"differ before their last message, at message 0: .*has \"q.*other \"p.*one prompt$",
        ),
        (Form.PAIRS, pair(CHAT[1:], [reply("b")]), r"answers without a prompt"),
        (Form.STEPS, {"prompt": "q", "completions": ["1"], "labels": []}, r"1 completions and 0 labels"),
        (Form.TOKENS, {"input_ids": [1, 2], "labels": [1]}, r"two lists of numbers, of the same length"),
        (Form.TOKENS, {"input_ids": [1, -2], "labels": [1, 1]}, r"input_ids holds -2"),
        (Form.TOKENS, {"input_ids": [1, 2], "labels": [2, -100]}, r"labels\[0\] is 2 .*shifted by one"),
    ],
)
def test_wrong_row_says_what_is_wrong(form: Form, row: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        read(row, form=form)


def test_wrong_weight() -> None:
    with pytest.raises(InvalidInput, match=r"the weight \(w\) is -1; it is at least 0"):
        read({"messages": CHAT, "w": -1}, RowFields(weight_field="w"))


def test_a_template_makes_the_prompt_of_an_answer() -> None:
    row = {"instruction": "Add", "input": "1, 2", "output": "3"}
    fields = RowFields(template="{instruction}: {input}\n", answer_field="output", chat=False)
    form = recognise([row], fields, "answers")
    assert form == Form.COMPLETION and normalise(row, form, fields).sides == (Plain(prompt="Add: 1, 2\n", answer="3"),)
    with pytest.raises(ConfigError, match="template: no column 'input', which template"):
        normalise({"instruction": "Add", "output": "3"}, form, fields)
