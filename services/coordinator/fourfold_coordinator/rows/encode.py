"""Encodes a block of rows: from the columns of each row to the tokens of its samples, or the reason why it has none."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np

from fourfold.arrays import Float32Array, Int32Array
from fourfold.errors import ConfigError, InvalidInput
from fourfold.model.conversation import (
    EncodedAnswer,
    EncodingRule,
    RenderedAnswer,
    Span,
    TemplateMismatch,
    check_shown,
    encode_each,
    is_said,
    plain_answer,
    render_answers,
    scored_chat,
    scored_plain,
    scored_steps,
)
from fourfold.model.tokenizer import Tokenizer

from .forms import Row, normalise
from .normal import READS, Chat, Form, NormalRow, Plain, Reason, RowFields, Side, Steps, Tokens

INDEX: Final = np.dtype(
    [
        ("offset", "<i8"),  # of its first token in ids.bin
        ("length", "<i4"),  # in tokens
        ("prompt", "<i4"),  # tokens before the first one of the loss
        ("row", "<i4"),  # number in the source
        ("unit", "<i4"),  # the samples of a unit stay together: the two of a pair
        ("value", "<f4"),  # weight, margin or label; NaN: the row has none
        ("group", "<u8"),  # equal for rows with equal prompts, which are held out together
    ]
)
"""A sample in index.bin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingSettings:
    """Everything that decides the tokens of a row, besides the tokenizer."""

    form: Form
    fields: RowFields = field(default_factory=RowFields)
    rule: EncodingRule = field(default_factory=EncodingRule)
    max_tokens: int
    """Most tokens of a sample: model.max_context_tokens."""
    too_long: Literal["drop", "cut", "split"] = "drop"
    """cut: on the right. split: a text without a prompt becomes several samples; others are dropped."""
    bad_rows: Literal["error", "drop"] = "error"
    scored: bool = False
    """The texts are those that a reward model scores, and their last token alone is in the loss."""


@dataclass(slots=True)
class Block:
    """The samples of some rows."""

    ids: list[Int32Array] = field(default_factory=list)
    loss: list[np.ndarray[Any, np.dtype[np.uint8]]] = field(default_factory=list)
    labels: list[Float32Array] = field(default_factory=list)  # of steps, one value per token; empty: no steps
    index: list[tuple[int, int, int, int, int, float, int]] = field(default_factory=list)  # offset, unit: of the block
    units: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    dropped: list[tuple[int, Reason, str]] = field(default_factory=list)  # row, reason, what is wrong
    doubled_begins: int = 0

    def add(self, row: int, samples: Sequence[_Sample], value: float, group: int, *, one_unit: bool) -> None:
        """Add the samples of a row; each is a unit of its own, unless all are one."""
        for number, sample in enumerate(samples):
            mask = np.zeros(len(sample.ids), np.uint8)
            for begin, end in sample.spans:
                mask[begin:end] = 1
            unit = self.units + (0 if one_unit else number)
            self.index.append((self.tokens, len(mask), sample.spans[0][0], row, unit, value, group))
            self.ids.append(sample.ids)
            self.loss.append(mask)
            if sample.labels is not None:
                self.labels.append(sample.labels)
            self.tokens += len(mask)
            self.loss_tokens += int(mask.sum())
        self.units += 1 if one_unit else len(samples)


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    ids: Int32Array
    spans: Sequence[Span]
    labels: Float32Array | None = None


@dataclass(slots=True)
class _RenderedRow:
    """A row between rendering and encoding."""

    number: int
    row: NormalRow
    sides: list[list[RenderedAnswer]]  # empty for tokens


class _Dropped(Exception):
    def __init__(self, reason: Reason, text: str = "") -> None:
        self.reason, self.text = reason, text


def render_block(
    rows: Sequence[tuple[int, Row]], settings: EncodingSettings, tokenizer: Tokenizer, where: str
) -> tuple[list[_RenderedRow], Block]:
    """Render the rows of a block, each with its number.

    Returns:
        The rendered rows, and a block with those that are dropped already.

    Raises:
        ConfigError: a column is missing, a row is bad and `bad_rows` is "error", or the model has no chat template.
    """
    rendered, block = list[_RenderedRow](), Block()
    rule = settings.rule
    if READS[settings.form] != "answers":  # a label is that of an answer, and not of those in its prompt
        rule = dataclasses.replace(rule, loss_on="completion")
    for number, row in rows:
        try:
            normal = normalise(row, settings.form, settings.fields)
            render = _render_scored if settings.scored else _render
            sides = [render(side, rule, tokenizer) for side in normal.sides]
            rendered.append(_RenderedRow(number, normal, sides))
        except InvalidInput as error:
            _refuse(number, error, settings, where, block)
        except RecursionError:
            _refuse(number, InvalidInput("is nested too deeply; flatten its columns"), settings, where, block)
        except ConfigError as error:
            raise ConfigError(f"{where}, row {number}: {error.message}") from None
    return rendered, block


def encode_block(
    rendered: Sequence[_RenderedRow], block: Block, settings: EncodingSettings, tokenizer: Tokenizer, where: str
) -> Block:
    """Encode the rows of `render_block` in one batch, and add them to its block.

    Raises:
        ConfigError: a row is bad, and `bad_rows` is "error".
    """
    encoded = encode_each([answer for one in rendered for side in one.sides for answer in side], tokenizer)
    for one in rendered:
        answers = [[next(encoded) for _ in side] for side in one.sides]
        try:
            _add_row(one, answers, block, settings, tokenizer)
        except InvalidInput as error:
            _refuse(one.number, error, settings, where, block)
        except _Dropped as dropped:
            block.dropped.append((one.number, dropped.reason, dropped.text))
    return block


def _refuse(number: int, error: InvalidInput, settings: EncodingSettings, where: str, block: Block) -> None:
    if settings.bad_rows == "error":
        fix = '; correct the row, or leave such rows out with data.bad_rows = "drop"'
        raise ConfigError(f"{where}, row {number}: {error.message}{'' if isinstance(error, TemplateMismatch) else fix}")
    block.dropped.append((number, Reason.BAD_ROW, error.message))


def _render(side: Side, rule: EncodingRule, tokenizer: Tokenizer) -> list[RenderedAnswer]:
    if isinstance(side, Chat):
        return render_answers(side.messages, side.tools, tokenizer, rule, answers_from=side.answers_from)
    if isinstance(side, Plain):
        return [plain_answer(side.prompt, side.answer)]
    if isinstance(side, Tokens):
        return []
    prompt, tools = (side.prompt, ()) if isinstance(side.prompt, str) else (side.prompt.messages, side.prompt.tools)
    trusted = rule.trust_special_tokens or not prompt  # a text that has its prompt in it is rendered already
    answer = scored_steps(prompt, tools, side.steps, side.separator, tokenizer, trusted=trusted)
    if not isinstance(side.prompt, str):
        check_shown(answer.pieces[0].text, side.prompt.messages, side.prompt.tools)
    return [answer]


def _render_scored(side: Side, rule: EncodingRule, tokenizer: Tokenizer) -> list[RenderedAnswer]:
    if isinstance(side, Chat) and is_said(side.messages[-1]):
        answer = scored_chat(side.messages, side.tools, tokenizer, trusted=rule.trust_special_tokens)
        check_shown(answer.pieces[0].text, side.messages, side.tools)
        return [answer]
    return [scored_plain(side.prompt, side.answer, tokenizer)] if isinstance(side, Plain) and side.answer else []


def _add_row(
    one: _RenderedRow,
    answers: Sequence[Sequence[EncodedAnswer | InvalidInput]],
    block: Block,
    settings: EncodingSettings,
    tokenizer: Tokenizer,
) -> None:
    """Add the samples of a row to a block. Raises _Dropped or InvalidInput: it has none."""
    is_pair = len(one.row.sides) == 2
    sides = list[list[_Sample]]()
    for side, found in zip(one.row.sides, answers, strict=True):
        samples = list(_samples(side, found, tokenizer, scored=settings.scored))
        if not any(sample.spans for sample in samples):
            raise _Dropped(Reason.EMPTY_SIDE if is_pair else Reason.NO_LOSS_TOKENS)
        sides.append([sample for sample in samples if sample.spans])
    if is_pair:
        if any(len(side) > 1 for side in sides):
            raise InvalidInput(
                'the answers of this pair have several turns, and data.turns = "each" would tear them apart; use a '
                'template that writes earlier turns as they were, or remove data.loss_on = "assistant"'
            )
        if np.array_equal(sides[0][0].ids, sides[1][0].ids):
            raise _Dropped(Reason.EQUAL_PAIR)
    whole = [sample for side in sides for sample in side]
    fitting = [part for sample in whole for part in _fit(sample, settings)]
    if not fitting or (is_pair and len(fitting) < 2):
        if settings.too_long == "cut":
            raise _Dropped(Reason.NO_LOSS_TOKENS)
        longest = max(len(sample.ids) for sample in whole)
        raise _Dropped(Reason.TOO_LONG, f"{longest:,} tokens, above model.max_context_tokens = {settings.max_tokens:,}")
    block.doubled_begins += sum(isinstance(a, EncodedAnswer) and a.doubled_begin for side in answers for a in side)
    value = np.nan if one.row.value is None else one.row.value
    group = _group(_prompt(one.row.sides[0], whole[0], scored=settings.scored), one.number)
    block.add(one.number, fitting, value, group, one_unit=is_pair)


def _samples(
    side: Side, found: Sequence[EncodedAnswer | InvalidInput], tokenizer: Tokenizer, *, scored: bool
) -> Sequence[_Sample]:
    """Return the samples of one side; those without a token in the loss have no span."""
    if isinstance(side, Tokens):
        return [_sample_of_tokens(side, tokenizer)]
    samples = list[_Sample]()
    for answer in found:
        if isinstance(answer, InvalidInput):
            raise answer
        labels = None
        if isinstance(side, Steps):
            labels = np.zeros(len(answer.token_ids), np.float32)
            if len(answer.spans) != len(side.labels):
                raise InvalidInput("a step has no token; each step is a text")
            ends = [end - 1 for _, end in answer.spans]
            labels[ends] = side.labels
            # The label of a step is a statement about its last token alone.
            spans: Sequence[Span] = [(end, end + 1) for end in ends]
        elif scored:
            spans = [(len(answer.token_ids) - 1, len(answer.token_ids))]
        else:
            spans = answer.spans
        samples.append(_Sample(answer.token_ids, spans, labels))
    return samples


def _sample_of_tokens(side: Tokens, tokenizer: Tokenizer) -> _Sample:
    size = tokenizer.vocabulary_size
    if side.token_ids and (most := max(side.token_ids)) >= size:
        raise InvalidInput(f"input_ids holds {most}, and the model has {size:,} tokens; encode with its tokenizer")
    in_loss = np.array(side.in_loss, np.bool_)
    in_loss[:1] = False
    edges = np.flatnonzero(np.diff(np.concatenate([[False], in_loss, [False]]).astype(np.int8)))
    spans = [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
    return _Sample(np.array(side.token_ids[: spans[-1][1] if spans else None], np.int32), spans)


def _fit(sample: _Sample, settings: EncodingSettings) -> Sequence[_Sample]:
    """Return a sample, or what is left of one that is too long."""
    most, length = settings.max_tokens, len(sample.ids)
    if length <= most:
        return [sample]
    if settings.too_long == "cut":
        windows = [(0, most)]
    elif settings.too_long == "split" and settings.form == Form.TEXT:
        windows = [(begin, min(begin + most, length)) for begin in range(0, length, most)]
    else:
        return []
    parts = []
    for begin, end in windows:
        clipped = ((max(a - begin, 1), min(b, end) - begin) for a, b in sample.spans)
        spans = [(a, b) for a, b in clipped if b > a]
        labels = None if sample.labels is None else sample.labels[begin : begin + spans[-1][1]] if spans else None
        if spans:
            parts.append(_Sample(sample.ids[begin : begin + spans[-1][1]], spans, labels))
    return parts


def _prompt(side: Side, sample: _Sample, *, scored: bool) -> bytes:
    """Return what rows with the same prompt have in common; empty for a row without a prompt."""
    if isinstance(side, Steps):
        asked = side.prompt if isinstance(side.prompt, str) else [side.prompt.messages, side.prompt.tools]
        return json.dumps(asked, sort_keys=True).encode() if asked else b""
    if not scored:
        prompt = sample.spans[0][0]
        return sample.ids[:prompt].tobytes() if prompt > 1 else b""
    if isinstance(side, Chat) and len(side.messages) > 1:
        return json.dumps([side.messages[:-1], side.tools], sort_keys=True).encode()
    return (isinstance(side, Plain) and side.prompt.encode()) or sample.ids.tobytes()


def _group(prompt: bytes, row: int) -> int:
    """Return a number for rows with the same prompt; a row without a prompt is a group of its own."""
    data = prompt or f"row {row}".encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
