"""Recognises the form of rows by their columns, and brings a row of any form into the normal one (`normal.py`).

Functions here are pure. InvalidInput says what is wrong with one row; the caller adds its file and number, and may
leave the row out. ConfigError says what is wrong with the columns of all.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from fourfold.config.sources import parse_template
from fourfold.errors import ConfigError, InvalidInput
from fourfold.model.chat import argument_value, read_messages, read_tools
from fourfold.model.conversation import first_difference
from fourfold.text import clean, nearest_name

from ..data.load_prompts import fill_template
from .normal import READS, Chat, Form, NormalRow, Plain, Reads, RowFields, Steps, Tokens

RECOGNISED_ROWS: Final = 200
"""Number of rows whose columns tell the form."""
_MESSAGES: Final = ("messages", "conversations", "conversation")
# Columns of a prompt and of its answer, as TRL, OpenOrca and others name them.
_COMPLETIONS: Final = (
    ("prompt", "completion"), ("prompt", "response"), ("question", "response"), ("query", "response"),
    ("question", "answer"), ("input", "output"),
)  # fmt: skip
_ALPACA_INPUTS: Final = ("input", "context")  # the second one of each is Dolly's
_ALPACA_ANSWERS: Final = ("output", "response")
_PROMPTS: Final = ("prompt", "question", "query", "input")
_TRANSCRIPT: Final = re.compile(r"\n\n(Human|Assistant):")
_GLAIVE: Final = re.compile(r"(?:^|\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE):")
_GLAIVE_ROLES: Final = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
_GLAIVE_CALL: Final = re.compile(r"(.*)<functioncall>\s*(\{.*\})\s*", re.DOTALL)
_GLAIVE_ARGUMENTS: Final = re.compile(r"""("arguments":\s*)'(.*)'(\s*\})$""", re.DOTALL)
_GLAIVE_END: Final = "<|endoftext|>"
_IGNORED_LABEL: Final = -100  # of transformers: a token outside the loss
_FLAGS: Final = {"0": 0.0, "1": 1.0, "false": 0.0, "true": 1.0, "+": 1.0, "-": 0.0}  # CSV has texts alone

Row = Mapping[str, Any]


def recognise(rows: Sequence[Row], fields: RowFields, reads: Reads | None = None) -> Form:
    """Return the form of a data set.

    Args:
        rows: its first rows, at least one.
        fields: columns with other names.
        reads: what the loss reads; None: pairs, labels, steps and answers are tried in this order.

    Raises:
        ConfigError: no form fits, or two forms do.
    """
    columns: dict[str, Any] = {}  # with a value that is not null
    for row in rows[:RECOGNISED_ROWS]:
        columns |= {name: value for name, value in row.items() if value is not None and name not in columns}
    for wanted in ("pairs", "labels", "steps", "answers") if reads is None else (reads,):
        fitting = [form for form in Form if READS[form] == wanted and _FITS[form](columns, fields)]
        if Form.TEXT in fitting and len(fitting) > 1:  # Alpaca has its rendered text in a column, too
            fitting.remove(Form.TEXT)
        if len(fitting) > 1:
            raise ConfigError(
                f"the rows have the columns {_names(columns)}, which fit the forms {' and '.join(fitting)}; choose one "
                f'with data.form, such as data.form = "{fitting[0]}"'
            )
        if fitting == [Form.TEXT] and _text_column(columns, fields) not in ("text", fields.answer_field):
            _check_only_text(columns, fields)
        if fitting:
            return fitting[0]
    needs = {
        "pairs": "`chosen` and `rejected` (data.chosen_field, data.rejected_field)",
        "labels": "`label` (data.label_field) beside `messages`, or beside `prompt` and `completion`",
        "steps": "`prompt`, `completions` and `labels`, or a text with marks in it and `label` (data.step_marker)",
    }.get(reads or "", "`messages` (data.messages_field), or `prompt` and `completion` (data.prompt_field and "
          "data.answer_field), or `text`")  # fmt: skip
    what = f"the loss reads {reads}, and these" if reads else "these"
    raise ConfigError(
        f"the rows have the columns {_names(columns)}; {what} need {needs}{_missing(columns, fields, reads)}"
    )


def _missing(columns: Row, fields: RowFields, reads: Reads | None) -> str:
    """Return which columns the recipe names and the rows lack, and the nearest names of those that are there."""
    named = [name for name in (fields.messages_field, fields.prompt_field, fields.answer_field) if name]
    usual = {
        "pairs": (fields.chosen_field, fields.rejected_field),
        "labels": (fields.label_field,),
        "steps": ("completions", "labels"),
    }.get(reads or "", ("messages", "prompt", "completion", "text"))
    found = list[str]()
    for name in dict.fromkeys((*named, *usual)):
        near = nearest_name(name, columns) if name not in columns else ""
        if near or (name in named and name not in columns):
            found.append(f"; there is no column {name!r}{f': did you mean `{near}`?' if near else ''}")
    return "".join(found)


def _check_only_text(columns: Row, fields: RowFields) -> None:
    """Raise ConfigError if the only column with texts is that of rows of another form, such as their prompt."""
    if other := next((form for form in Form if READS[form] != "answers" and _FITS[form](columns, fields)), None):
        raise ConfigError(
            f"the rows have the columns {_names(columns)}, which are those of {READS[other]}, and the loss reads "
            f'answers; set a preset that reads {READS[other]}, or train on their texts with data.form = "text"'
        )


def normalise(row: Row, form: Form, fields: RowFields) -> NormalRow:
    """Return a row in the normal form.

    Raises:
        ConfigError: a column is missing.
        InvalidInput: a value of the row is wrong.
    """
    return _READERS[form](row, fields)


def _messages_column(columns: Row, fields: RowFields) -> str:
    """Return the column with the messages; empty if there is none, or if there are two."""
    found = [name for name in ((fields.messages_field,) if fields.messages_field else _MESSAGES) if name in columns]
    if len(found) > 1:
        raise ConfigError(
            f"the rows have messages in the columns {' and '.join(found)}; choose one with data.messages_field"
        )
    return found[0] if found else ""


def _completion_columns(columns: Row, fields: RowFields) -> tuple[str, str]:
    """Return the columns of a prompt and of its answer; empty if there are none."""
    filled = parse_template(fields.template)[0][1] if fields.template else ""
    for prompt, answer in _COMPLETIONS:
        names = filled or fields.prompt_field or prompt, fields.answer_field or answer
        if all(name in columns for name in names):
            return names
    return "", ""


def _is_alpaca(columns: Row, fields: RowFields) -> bool:
    has_answer = any(name in columns for name in _ALPACA_ANSWERS)
    return "instruction" in columns and has_answer and not (fields.prompt_field or fields.template)


def _is_pair(columns: Row, fields: RowFields) -> bool:
    return fields.chosen_field in columns and fields.rejected_field in columns


def _is_transcript(columns: Row, fields: RowFields) -> bool:
    return _is_pair(columns, fields) and str(columns[fields.chosen_field]).startswith("\n\nHuman:")


def _is_sharegpt_pair(columns: Row, fields: RowFields) -> bool:
    return _is_pair(columns, fields) and bool(_messages_column(columns, fields)) and not _prompt_column(columns, fields)


def _prompt_column(columns: Row, fields: RowFields) -> str:
    names = (fields.prompt_field,) if fields.prompt_field else _PROMPTS
    return next((name for name in names if name in columns), "")


def _is_labelled(columns: Row, fields: RowFields) -> bool:
    has_label = fields.label_field in columns or "kto_tag" in columns
    return has_label and bool(_messages_column(columns, fields) or _completion_columns(columns, fields)[0])


def _text_column(columns: Row, fields: RowFields) -> str:
    texts = [name for name, value in columns.items() if isinstance(value, str)]
    return fields.answer_field or ("text" if "text" in texts else texts[0] if len(texts) == 1 else "")


_FITS: Final[dict[Form, Callable[[Row, RowFields], bool]]] = {
    Form.TOKENS: lambda c, f: "input_ids" in c and ("labels" in c or "loss_mask" in c),
    Form.STEPS: lambda c, f: bool(_prompt_column(c, f)) and "completions" in c and "labels" in c,
    Form.STEPS_IN_TEXT: lambda c, f: bool(f.step_marker) and f.label_field in c,
    Form.PAIRS: lambda c, f: _is_pair(c, f) and not _is_transcript(c, f) and not _is_sharegpt_pair(c, f),
    Form.PAIRS_IN_TRANSCRIPTS: _is_transcript,
    Form.PAIRS_SHAREGPT: lambda c, f: _is_sharegpt_pair(c, f) and not _is_transcript(c, f),
    Form.LABELLED: _is_labelled,
    Form.MESSAGES: lambda c, f: bool(_messages_column(c, f)),
    Form.GLAIVE: lambda c, f: isinstance(c.get("chat"), str) and bool(_GLAIVE.match(c["chat"])),
    Form.COMPLETION: lambda c, f: bool(_completion_columns(c, f)[0]) and not _is_alpaca(c, f),
    Form.ALPACA: _is_alpaca,
    Form.TEXT: lambda c, f: isinstance(c.get(_text_column(c, f)), str),
}


def _column(row: Row, name: str, key: str) -> Any:
    """Return a value. Raises ConfigError: the column is missing."""
    if row.get(name) is None:
        near = nearest_name(name, row)
        raise ConfigError(
            f"no column {name!r}{f'; did you mean `{near}`?' if near else ''}; the row has {_names(row)}; set {key}, "
            f"or the same key of the source"
        )
    return row[name]


def _names(columns: Row) -> str:
    return clean(", ".join(sorted(columns)), 500) or "none"


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise InvalidInput(f"{what} is {_show(value)}; it is a text")
    return value


def _show(value: Any) -> str:
    return clean(repr(value), 80)


def _number(value: Any, what: str) -> float:
    """Return a finite number; texts of CSV files are numbers, too."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidInput(f"{what} is {_show(value)}; it is a finite number")
    return number


def _flag(value: Any, what: str) -> float:
    found = _FLAGS.get(value.strip().lower()) if isinstance(value, str) else value if value in (0, 1) else None
    if found is None:
        raise InvalidInput(f"{what} is {_show(value)}; it is true or false, or 1 or 0")
    return float(found)


def _weight(row: Row, fields: RowFields) -> float | None:
    if not fields.weight_field:
        return None
    weight = _number(_column(row, fields.weight_field, "data.weight_field"), f"the weight ({fields.weight_field})")
    if weight < 0:
        raise InvalidInput(f"the weight ({fields.weight_field}) is {weight:g}; it is at least 0")
    return weight


def _chat_of(prompt: Any, row: Row, fields: RowFields) -> list[dict[str, Any]]:
    """Return a prompt, a text or messages, as messages; with the system message of the row or of the recipe."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _messages(prompt)
    named = row.get("system") or row.get("system_prompt")
    system = named if isinstance(named, str) else fields.system_prompt if isinstance(prompt, str) else ""
    if system and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _messages(value: Any) -> list[dict[str, Any]]:
    """Return messages: of a list, of one message, or of JSON text with either."""
    value = argument_value(value)
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not value:
        raise InvalidInput(f"the messages are {_show(value)}; they are a list of objects with `role` and `content`")
    return read_messages(value)


def _answer_messages(value: Any) -> list[dict[str, Any]]:
    """Return an answer as messages: a text, one message, or a list of messages."""
    return [{"role": "assistant", "content": value}] if isinstance(value, str) else _messages(value)


def _tools(row: Row, fields: RowFields) -> list[dict[str, Any]]:
    tools = argument_value(row.get(fields.tools_field))
    return read_tools(tools) if isinstance(tools, list) else []


def _conversation(row: Row, fields: RowFields) -> Chat:
    column = _messages_column(row, fields)
    value = argument_value(_column(row, column or fields.messages_field or "messages", "data.messages_field"))
    if isinstance(value, str):
        raise InvalidInput(f"the messages are {_show(value)}; they are a list of objects with `role` and `content`")
    return _checked(Chat(messages=_chat_of(value, row, fields), tools=_tools(row, fields)))


def _checked(chat: Chat) -> Chat:
    if (role := chat.messages[-1]["role"]) != "assistant":
        raise InvalidInput(f"the last message has the role {role!r}; the last one of a row is the assistant's")
    return chat


def _completion(row: Row, fields: RowFields) -> Chat | Plain:
    prompt_column, answer_column = _completion_columns(row, fields)
    if not prompt_column:
        _column(row, fields.prompt_field or _prompt_column(row, fields) or "prompt", "data.prompt_field")
        _column(row, fields.answer_field or "completion", "data.answer_field")
    prompt = fill_template(fields.template, row, "template") if fields.template else row[prompt_column]
    return _joined(prompt, row[answer_column], row, fields)


def _joined(prompt: Any, answer: Any, row: Row, fields: RowFields) -> Chat | Plain:
    """Return a prompt with its answer; each is a text or messages."""
    if not fields.chat:
        text = _text(prompt, "the prompt (with data.chat = false)")
        system = f"{fields.system_prompt}\n\n" if fields.system_prompt else ""
        return Plain(prompt=system + text, answer=_text(answer, "the answer (with data.chat = false)"))
    before, after = _chat_of(prompt, row, fields), _answer_messages(answer)
    return _checked(Chat(messages=[*before, *after], answers_from=len(before), tools=_tools(row, fields)))


def _pair(row: Row, fields: RowFields) -> NormalRow:
    chosen = _column(row, fields.chosen_field, "data.chosen_field")
    rejected = _column(row, fields.rejected_field, "data.rejected_field")
    margin = row.get(fields.margin_field)
    if margin is not None and (margin := _number(margin, f"the margin ({fields.margin_field})")) < 0:
        raise InvalidInput(
            f"the margin ({fields.margin_field}) is {margin:g}; it is at least 0: swap chosen and rejected, or set 0"
        )
    prompt_column = _prompt_column(row, fields) or _messages_column(row, fields)
    prompt = row[prompt_column] if prompt_column else None
    if isinstance(chosen, str) and isinstance(rejected, str):
        if chosen.startswith("\n\nHuman:"):
            return _compared(_transcript(chosen), _transcript(rejected), margin, row, fields)
        if prompt is None:  # the texts are whole; what they have in common cancels out of a difference
            return NormalRow(sides=tuple(Plain(prompt="", answer=text) for text in (chosen, rejected)), value=margin)
        return NormalRow(sides=tuple(_joined(prompt, text, row, fields) for text in (chosen, rejected)), value=margin)
    sides = [_answer_messages(side) for side in (chosen, rejected)]
    if all(side[0]["role"] == "assistant" for side in sides):  # answers alone
        if prompt is None:
            raise InvalidInput("chosen and rejected are answers without a prompt; name its column in data.prompt_field")
        before = _chat_of(prompt, row, fields)
        sides = [[*before, *side] for side in sides]
    return _compared(sides[0], sides[1], margin, row, fields)


def _compared(
    chosen: list[dict[str, Any]], rejected: list[dict[str, Any]], margin: float | None, row: Row, fields: RowFields
) -> NormalRow:
    """Return a pair of whole conversations, whose common beginning is the prompt."""
    chosen, rejected = (_chat_of(side, row, fields) for side in (chosen, rejected))
    common = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    if common is None:  # equal, or one continues the other
        common = min(len(chosen), len(rejected)) - 1
    last = len(chosen) == len(rejected) == common + 1
    answers = all(side[common]["role"] == "assistant" for side in (chosen, rejected))
    if not answers or not (last or fields.several_turns):
        what = f"at message {common}: {first_difference(str(chosen[common]), str(rejected[common]))}"
        raise InvalidInput(
            f"chosen and rejected differ before their last message, {what}; both answer one prompt"
            + ('. data.loss_on = "assistant" compares answers of several turns' if answers else "")
        )
    tools = _tools(row, fields)
    sides = (_checked(Chat(messages=m, answers_from=common, tools=tools)) for m in (chosen, rejected))
    return NormalRow(sides=tuple(sides), value=margin)


def _transcript(text: str) -> list[dict[str, Any]]:
    """Return the messages of a text of Anthropic's form: "\\n\\nHuman: ...\\n\\nAssistant: ..."."""
    parts = _TRANSCRIPT.split(text)
    roles = {"Human": "user", "Assistant": "assistant"}
    said = zip(parts[1::2], parts[2::2], strict=True)
    return [{"role": roles[name], "content": content.strip()} for name, content in said]


def _glaive(row: Row, fields: RowFields) -> NormalRow:
    """Read glaive-function-calling: the turns are one text, and the tools are JSON objects in another."""
    text = _text(_column(row, "chat", "data.form"), "the column chat")
    start, *parts = _GLAIVE.split(text)
    if start.strip() or not parts:
        raise InvalidInput(f"the chat is {_show(text)}; it begins with USER: or ASSISTANT:")
    messages = list[dict[str, Any]]()
    for name, said in zip(parts[::2], parts[1::2], strict=True):
        content = said.strip().removesuffix(_GLAIVE_END).strip()
        message: dict[str, Any] = {"role": _GLAIVE_ROLES[name], "content": content}
        if name == "ASSISTANT" and (call := _GLAIVE_CALL.fullmatch(content)):
            # The arguments are JSON in single quotes, in which no character is escaped.
            quoted = _GLAIVE_ARGUMENTS.sub(lambda m: m[1] + json.dumps(m[2]) + m[3], call[2])
            message |= {"content": call[1].strip(), "function_call": _json_objects(quoted)[0]}
        messages.append(message)
    system, brace, rest = (
        _text(row.get("system") or "", "the column system").removeprefix("SYSTEM:").strip().partition("{")
    )
    tools = _json_objects(brace + rest)
    if system and not tools:  # with tools, the chat template of the model says what this text says
        messages.insert(0, {"role": "system", "content": system})
    chat = Chat(messages=read_messages(messages), tools=read_tools(tools))
    return NormalRow(sides=(_checked(chat),), value=_weight(row, fields))


def _json_objects(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects of a text, one after the other."""
    found, decoder = list[dict[str, Any]](), json.JSONDecoder(strict=False)
    while text := text.strip():
        try:
            value, end = decoder.raw_decode(text)
        except ValueError as error:
            raise InvalidInput(f"a function or a call is {_show(text)}; it is a JSON object ({error})") from None
        found.append(value)
        text = text[end:]
    return found


def _labelled(row: Row, fields: RowFields) -> NormalRow:
    column = "kto_tag" if "kto_tag" in row and fields.label_field not in row else fields.label_field
    label = _flag(_column(row, column, "data.label_field"), f"the label ({column})")
    if not _messages_column(row, fields):
        return NormalRow(sides=(_completion(row, fields),), value=label)
    chat = _conversation(row, fields)  # the label is that of the last answer
    return NormalRow(sides=(dataclasses.replace(chat, answers_from=len(chat.messages) - 1),), value=label)


def _alpaca(row: Row, fields: RowFields) -> NormalRow:
    prompt = _text(_column(row, "instruction", "data.prompt_field"), "the instruction")
    for name in _ALPACA_INPUTS:
        if more := row.get(name):
            prompt = f"{prompt}\n{_text(more, f'the {name}')}"
    history: list[dict[str, Any]] = []
    for entry in row.get("history") or ():
        if not isinstance(entry, list | tuple) or len(entry) != 2 or not all(isinstance(text, str) for text in entry):
            raise InvalidInput(f"an entry of the history is {_show(entry)}; each is a question and its answer")
        history += [{"role": "user", "content": entry[0]}, {"role": "assistant", "content": entry[1]}]
    name = next((name for name in _ALPACA_ANSWERS if row.get(name) is not None), "output")
    answer = _text(_column(row, name, "data.answer_field"), f"the {name}")
    if not fields.chat:
        if history:
            raise InvalidInput("a row with a history needs a chat template; set data.chat = true")
        return NormalRow(sides=(_joined(prompt, answer, row, fields),), value=_weight(row, fields))
    first, *rest = _chat_of(prompt, row, fields)
    before = [first, *history, *rest] if rest else [*history, first]
    chat = Chat(messages=[*before, *_answer_messages(answer)], answers_from=len(before))
    return NormalRow(sides=(chat,), value=_weight(row, fields))


def _tokens(row: Row, fields: RowFields) -> NormalRow:
    ids = _column(row, "input_ids", "data.form")
    labels, mask = row.get("labels"), row.get("loss_mask")
    other = mask if labels is None else labels
    if not isinstance(ids, list) or not isinstance(other, list) or len(ids) != len(other):
        raise InvalidInput("input_ids and labels (or loss_mask) are two lists of numbers, of the same length")
    if wrong_ids := [i for i in ids if not isinstance(i, int) or i < 0]:
        raise InvalidInput(f"input_ids holds {_show(wrong_ids[0])}; an id is a whole number of at least 0")
    if labels is None:
        in_loss = [bool(_flag(flag, "loss_mask")) for flag in other]
    else:
        in_loss = [label != _IGNORED_LABEL for label in labels]
        wrong = next(
            (n for n, (i, label) in enumerate(zip(ids, labels, strict=True)) if in_loss[n] and i != label), None
        )
        if wrong is not None:
            raise InvalidInput(
                f"labels[{wrong}] is {labels[wrong]} and input_ids[{wrong}] is {ids[wrong]}; a label is the id at the "
                f"same place, or {_IGNORED_LABEL} (shifted by one? they must not be)"
            )
    return NormalRow(sides=(Tokens(token_ids=ids, in_loss=in_loss),), value=_weight(row, fields))


def _steps(row: Row, fields: RowFields) -> NormalRow:
    prompt = _column(row, _prompt_column(row, fields) or fields.prompt_field or "prompt", "data.prompt_field")
    steps, labels = _column(row, "completions", "data.form"), _column(row, "labels", "data.form")
    if not isinstance(steps, list) or not isinstance(labels, list) or len(steps) != len(labels) or not steps:
        counts = [len(value) if isinstance(value, list) else _show(value) for value in (steps, labels)]
        raise InvalidInput(f"{counts[0]} completions and {counts[1]} labels; each step has one label")
    texts = [_text(step, "a step") for step in steps]
    values = [_number(label, "the label of a step") for label in labels]
    if wrong := [value for value in values if not 0 <= value <= 1]:
        raise InvalidInput(f"the label of a step is {wrong[0]:g}; it is true or false, or a number from 0 to 1")
    start: Chat | str
    if fields.chat:
        start = Chat(messages=_chat_of(prompt, row, fields), tools=_tools(row, fields))
    else:
        start = _text(prompt, "the prompt (with data.chat = false)")
    return NormalRow(sides=(Steps(prompt=start, steps=texts, labels=values, separator=fields.step_separator),))


def _steps_in_text(row: Row, fields: RowFields) -> NormalRow:
    """Read steps that end with a marker; the labels are a list, or the same text with "+" or "-" for each marker."""
    column = fields.prompt_field or _prompt_column(row, fields) or "input"
    *steps, rest = _text(_column(row, column, "data.prompt_field"), f"the column {column}").split(fields.step_marker)
    label = _column(row, fields.label_field, "data.label_field")
    if isinstance(label, str):
        labels, position = list[Any](), 0
        for step in steps:
            position += len(step)
            labels.append(label[position : position + 1])
            position += 1
        whole = "".join(step + str(found) for step, found in zip(steps, labels, strict=True)) + rest
        if whole != label:
            raise InvalidInput(
                f"the label is not the text with + or - in place of {fields.step_marker!r}: "
                f"{first_difference(whole, label)}"
            )
    else:
        labels = label if isinstance(label, list) else [label]
    if not steps or len(labels) != len(steps):
        raise InvalidInput(f"{len(steps)} steps end with {fields.step_marker!r}, and there are {len(labels)} labels")
    values = [_flag(value, "the label of a step") for value in labels]
    return NormalRow(sides=(Steps(prompt="", steps=steps, labels=values, separator=fields.step_marker),))


def _text_row(row: Row, fields: RowFields) -> NormalRow:
    column = _text_column(row, fields) or "text"
    text = _text(_column(row, column, "data.answer_field"), f"the column {column}")
    return NormalRow(sides=(Plain(prompt="", answer=text),), value=_weight(row, fields))


_READERS: Final[dict[Form, Callable[[Row, RowFields], NormalRow]]] = {
    Form.TOKENS: _tokens,
    Form.STEPS: _steps,
    Form.STEPS_IN_TEXT: _steps_in_text,
    Form.PAIRS: _pair,
    Form.PAIRS_IN_TRANSCRIPTS: _pair,
    Form.PAIRS_SHAREGPT: _pair,
    Form.LABELLED: _labelled,
    Form.MESSAGES: lambda row, fields: NormalRow(sides=(_conversation(row, fields),), value=_weight(row, fields)),
    Form.GLAIVE: _glaive,
    Form.COMPLETION: lambda row, fields: NormalRow(sides=(_completion(row, fields),), value=_weight(row, fields)),
    Form.ALPACA: _alpaca,
    Form.TEXT: _text_row,
}
