"""Writes the recipe of `fourfold new` for data whose answers are trained on: its form, its lengths and a preset."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fourfold import config as configuration
from fourfold.config import DataSourceConfig
from fourfold.config.algorithm import AlgorithmConfig
from fourfold.errors import ConfigError, InvalidInput
from fourfold.model import folder as model_folder
from fourfold.model.conversation import EncodingRule
from fourfold.model.tokenizer import Tokenizer

from ..data.sources import Row, count_rows
from ..rows.encode import EncodingSettings, encode_block, render_block
from ..rows.forms import normalise, recognise
from ..rows.normal import READS, Chat, Form, Plain, Reads, RowFields, default_loss_on

_PROPOSED: Final[Mapping[Reads, str]] = {"answers": "sft", "pairs": "dpo", "labels": "kto", "steps": "process-reward"}
_RATES: Final[Mapping[Reads, str]] = {"answers": "1e-5", "pairs": "1e-6", "labels": "1e-6"}
_HELD_OUT_SHARE: Final = 0.05
# Keys for templates that write earlier turns in another way, and for base models with another end token.
_KEYS: Final[Sequence[Mapping[str, Any]]] = (
    {}, {"turns": "each"}, {"end": "token"}, {"turns": "each", "end": "token"},
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAnswers:
    """The values from which the recipe is made."""

    name: str
    model: str
    sources: tuple[DataSourceConfig, ...]
    rows: Sequence[Row]  # the first ones
    preset: str  # of ROW_PRESETS
    fields: Mapping[str, Any]  # keys of [data] that name columns, and the system prompt
    steps: int  # 0: one pass
    gpus: int


def answers_of(rows: Sequence[Row]) -> tuple[Form | None, list[str]]:
    """Return the form of rows and their last answers, as far as they are texts; None: no form fits."""
    try:
        form = recognise(rows, RowFields())
        sides = [normalise(row, form, RowFields()).sides[0] for row in rows] if READS[form] == "answers" else []
    except (ConfigError, InvalidInput):
        return None, []
    if form == Form.TEXT and "text" not in rows[0]:  # any column may be the only text
        return None, []
    chats = [str(side.messages[-1].get("content") or "") for side in sides if isinstance(side, Chat)]
    return form, chats + [side.answer for side in sides if isinstance(side, Plain) and side.prompt]


def proposed_preset(form: Form) -> str:
    """Return a preset that reads rows of a form; empty: there is none."""
    return "pretrain" if form == Form.TEXT else _PROPOSED.get(READS[form], "")


def rows_recipe(answers: RowAnswers) -> str:
    """Return the recipe with comments. Raises ConfigError: the preset does not read these rows, or one is wrong."""
    loss = AlgorithmConfig(preset=answers.preset).loss
    reads: Reads = "answers" if loss.reads == "trajectories" else loss.reads
    scores = loss.trains == "scores"
    where = answers.sources[0].path
    fields = RowFields(**answers.fields)
    try:
        form = recognise(answers.rows, fields, reads)
    except ConfigError as error:
        raise ConfigError(f"{where}, --preset {answers.preset}: {error.message}") from None
    keys, longest = _fitting_keys(answers, form, fields, where, scored=scores and reads != "steps")
    context = -(-longest * 5 // 4 // 64) * 64
    total = sum(count_rows(source) or len(answers.rows) for source in answers.sources)
    rows_per_step = max(1, min(128 if answers.gpus else 32, total // 4))
    steps = answers.steps or math.ceil(total / rows_per_step)
    value, pair = configuration.toml_value, 2 if reads == "pairs" else 1
    lines = [
        "# Check it: fourfold plan RECIPE. Run it: fourfold run RECIPE. All keys: docs/reference/recipe.md",
        f"name = {value(answers.name)}", "seed = 17", *([f"steps = {answers.steps}"] if answers.steps else []), "",
        "[model]", f"source = {value(answers.model)}",
        f"# The longest sample of the first {len(answers.rows)} rows has {longest} tokens. Longer rows are left out.",
        f"max_context_tokens = {context}",
        *([] if answers.gpus else ["# CPUs multiply float32 fast, and no small change is lost.", 'dtype = "float32"']),
        "", f"[data]  # rows of the form {form}",
        *([] if answers.steps else ["passes = 1  # or `steps` at the top"]),
        *(f"{key} = {value(given)}" for key, given in {**keys, **answers.fields}.items()),
    ]  # fmt: skip
    for source in answers.sources:
        given = source.model_dump(exclude_unset=True)
        lines += ["", "[data.train]" if len(answers.sources) == 1 else "[[data.train]]"]
        lines += [f"{key} = {value(found)}" for key, found in given.items() if found]
    if (groups := int(total * _HELD_OUT_SHARE)) > 1:
        lines += [
            "", f"# Prompts that are never trained on, to measure the {'loss' if reads == 'answers' else 'accuracy'}.",
            "[data.holdout]", 'field = ""', f"groups = {min(groups, 200)}",
            "", "[evaluation]", f"every_steps = {max(1, min(50, steps // 4))}",
        ]  # fmt: skip
    lines += [
        "", "[batch]", f"rows_per_step = {rows_per_step}",
        f"tokens_per_micro_batch = {max(pair * context, 16_384 if answers.gpus else 2048)}",
        "", "[algorithm]", f"preset = {value(answers.preset)}",
        *(["", "# Name the teacher here, a larger model with the same tokenizer.", "[reference]",
           f"source = {value(answers.model)}", *(['device = "cuda"'] if answers.gpus else [])]
          if loss.teacher_tokens else []),
        "", "[trainer]", *(['device = "cuda"', f"ranks = {answers.gpus}"] if answers.gpus else []),
        f"learning_rate = {'1e-5' if scores else _RATES[reads]}",
        "", "[checkpoint]", f"every_steps = {max(1, min(100, steps // 4))}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _fitting_keys(
    answers: RowAnswers, form: Form, fields: RowFields, where: str, *, scored: bool
) -> tuple[Mapping[str, Any], int]:
    """Return the keys of [data] with which the chat template fits the rows, and the tokens of the longest sample."""
    tokenizer = Tokenizer.load(model_folder.resolve(answers.model))
    first: ConfigError | None = None
    for keys in _KEYS:
        rule = EncodingRule(loss_on=default_loss_on(form), **keys)
        settings = EncodingSettings(form=form, fields=fields, rule=rule, max_tokens=1 << 30, scored=scored)
        try:
            rendered, block = render_block(list(enumerate(answers.rows)), settings, tokenizer, where)
            block = encode_block(rendered, block, settings, tokenizer, where)
        except ConfigError as error:
            first = first or error
        else:
            if not block.index:
                raise ConfigError(f"{where}: none of its first {len(answers.rows)} rows has a token in the loss")
            return keys, max(length for _, length, *_ in block.index)
    assert first is not None
    raise first
