"""Opens the rows of a recipe: recognises their form, makes the missing token stores, and orders their samples."""

from __future__ import annotations

import contextlib
import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from fourfold.algorithm.losses.bradley_terry import BradleyTerryLoss
from fourfold.config.rows import STEP_SEPARATOR
from fourfold.config.schema import Config
from fourfold.config.sources import DataSourceConfig
from fourfold.errors import ConfigError
from fourfold.model import folder as model_folder
from fourfold.model.conversation import EncodingRule
from fourfold.model.tokenizer import Tokenizer, chat_template
from fourfold.paths import expand_home

from ..data.sources import describe, read_rows
from .encode import EncodingSettings
from .forms import RECOGNISED_ROWS, recognise
from .held_out import HeldOutRows, check_overlap
from .normal import CONVERSATIONS, READS, Form, Reads, RowFields, default_loss_on
from .row_source import RowSource, split_held_out
from .store import TokenStore, check_dropped, check_labels, prepare_store

STORES_KEY: Final = "token_stores"
"""Key in the ledger for the folders of the token stores of a run, a JSON list, which `fourfold view` reads."""
_SPLIT_PRESET: Final = "pretrain"
_GENERATED: Final = {"question": "", "answer": ""}  # columns of every task of reasoning-gym


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRows:
    """The rows of a recipe."""

    train: RowSource
    held_out: tuple[HeldOutRows, ...]
    warnings: tuple[str, ...] = ()

    def digest(self) -> str:
        """Return a SHA-256 (hex) of the rows to train on; a resumed run must have the same."""
        return self.train.digest()

    def folders(self) -> list[str]:
        """Return the folders of the token stores, those of the rows to train on first."""
        stores = itertools.chain(self.train.stores, *(each.stores for each in self.held_out))
        return list(dict.fromkeys(str(store.folder.absolute()) for store in stores))


def open_rows(config: Config, tokenizer: Tokenizer) -> OpenRows:
    """Return the rows of a recipe, at position 0. Encodes what no run has encoded before: call it in a thread.

    Raises:
        ConfigError: the data cannot be read, has no form that the loss reads, too many of its rows are unusable, or
            `steps` contradicts `data.passes`.
    """
    data = config.data
    stores = [open_store_of(config, source, tokenizer) for source in data.train]
    weights = [source.weight for source in data.train if source.weight is not None]
    held_out, units = list[HeldOutRows](), None
    if data.holdout is not None:
        units, held = split_held_out(stores, data.holdout.groups, seed=config.seed)
        held_out.append(HeldOutRows(name="holdout", stores=stores, units=held))
    for source in data.eval:
        store = open_store_of(config, source, tokenizer)
        most = source.max_prompts if source.max_prompts is not None else config.evaluation.max_prompts
        found = HeldOutRows(name=source.title, stores=[store], units=np.arange(min(len(store), most or len(store))))
        check_overlap(found, stores, fails=data.eval_overlap == "error")
        held_out.append(found)
    train = RowSource(
        stores,
        units=units,
        rows_per_step=config.batch.rows_per_step,
        seed=config.seed,
        weights=weights,
        shuffled=data.order == "shuffled",
        passes=data.passes or None,
        mismatched_tokens=config.model.max_context_tokens if config.algorithm.loss.measures_distance else 0,
    )
    if config.algorithm.loss.measures_distance:
        for each in held_out:
            each.steps(config)  # refuses a set that is too small
    if train.steps is not None and config.steps not in (0, train.steps):
        raise ConfigError(
            f"steps = {config.steps}, and data.passes = {data.passes:g} makes {train.steps} steps; remove steps, or "
            f"set data.passes = 0"
        )
    warnings = tuple(filter(None, map(check_labels, stores)))
    return OpenRows(train=train, held_out=tuple(held_out), warnings=warnings)


def open_store_of(config: Config, source: DataSourceConfig, tokenizer: Tokenizer) -> TokenStore:
    """Return the tokens of one source, as `open_rows`."""
    data, fields = config.data, _fields(config, source)
    form = _form(config, source, fields)
    _check_chat(config, source, form, tokenizer)
    if fields.template and form != Form.COMPLETION:
        raise ConfigError(
            f"{describe(source)}: template = {fields.template!r:.200} makes the prompt of rows with an answer, and "
            f"these have the form {form}; remove it, or set data.answer_field to the column with the answer"
        )
    rule = EncodingRule(
        loss_on=data.loss_on or default_loss_on(form),
        turns=data.turns,
        end=data.end,
        trust_special_tokens=data.trust_special_tokens,
    )
    settings = EncodingSettings(
        form=form,
        fields=fields,
        rule=rule,
        max_tokens=config.model.max_context_tokens,
        too_long=data.too_long or ("split" if config.algorithm.preset == _SPLIT_PRESET else "drop"),
        bad_rows=data.bad_rows,
        scored=config.algorithm.loss.trains == "scores" and config.algorithm.loss.reads != "steps",
    )
    store = prepare_store(source, settings, tokenizer, cache_folder(config), keys=_keys(config))
    check_dropped(store.meta, data.max_dropped)
    if store.meta.longest_unit > config.batch.tokens_per_micro_batch:
        unit = "pair" if config.algorithm.loss.reads == "pairs" else "row"
        raise ConfigError(
            f"{store.meta.source}: a {unit} has {store.meta.longest_unit:,} tokens, and batch.tokens_per_micro_batch = "
            f"{config.batch.tokens_per_micro_batch:,} must hold it whole; raise it, or lower model.max_context_tokens"
        )
    loss, without = config.algorithm.loss, store.index["row"][np.isnan(store.index["value"])]
    if isinstance(loss, BradleyTerryLoss) and loss.margin and len(without):
        raise ConfigError(
            f"{store.meta.source}, row {without[0]}: it has no margin, and algorithm.loss.margin = true subtracts one; "
            f"add a column `margin` with a number that is at least 0, or set algorithm.loss.margin = false"
        )
    return store


def cache_folder(config: Config) -> Path:
    """Return the folder of the token stores."""
    if config.data.cache:
        return expand_home(config.data.cache, f"data.cache = {config.data.cache!r}")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fourfold" / "tokens"


def _form(config: Config, source: DataSourceConfig, fields: RowFields) -> Form:
    """Return the form of the rows of a source, which the loss must read."""
    loss = config.algorithm.loss
    wanted: Reads = "answers" if loss.reads == "trajectories" else loss.reads
    if config.data.form == "auto":
        return _recognise(source, fields, wanted)
    form = Form(config.data.form)
    if READS[form] != wanted:
        forms = ", ".join(form for form in Form if READS[form] == wanted)
        raise ConfigError(
            f"data.form = {config.data.form!r} has {READS[form]}, and algorithm.loss.kind = `{loss.kind}` reads "
            f"{wanted}; set one of {forms}, or another preset"
        )
    return form


def _recognise(source: DataSourceConfig, fields: RowFields, reads: Reads) -> Form:
    if source.reasoning_gym:  # its import takes a second, which a run with a store does not need
        with contextlib.suppress(ConfigError):  # the recipe names columns of the task
            return recognise([_GENERATED], fields, reads)
    rows = list(itertools.islice(read_rows(source), RECOGNISED_ROWS))
    if not rows:
        raise ConfigError(f"{describe(source)}: it has no row; give more data")
    try:
        return recognise(rows, fields, reads)
    except ConfigError as error:
        raise ConfigError(f"{describe(source)}: {error.message}") from None


def _check_chat(config: Config, source: DataSourceConfig, form: Form, tokenizer: Tokenizer) -> None:
    """Refuse conversations that cannot be written as text."""
    if form not in CONVERSATIONS or (config.data.chat and tokenizer.has_chat_template):
        return
    what = "data.chat = false" if not config.data.chat else f"{config.model.source} has no chat template"
    fix = (
        "remove data.chat"
        if tokenizer.has_chat_template
        else "set data.chat_template to a Jinja file, such as that of an instruction-tuned model of the same family"
    )
    raise ConfigError(
        f"{describe(source)}: its rows are conversations (form {form}), which a chat template writes as text, and "
        f"{what}; {fix}, or give rows with `prompt` and `completion` as texts, and data.chat = false"
    )


def _fields(config: Config, source: DataSourceConfig) -> RowFields:
    data = config.data
    return RowFields(
        template=source.template,
        prompt_field=source.prompt_field or data.prompt_field,
        answer_field=source.answer_field or data.answer_field,
        chosen_field=data.chosen_field or "chosen",
        rejected_field=data.rejected_field or "rejected",
        label_field=data.label_field or "label",
        step_marker=data.step_marker,
        step_separator=data.step_separator or STEP_SEPARATOR,
        several_turns=data.loss_on == "assistant",
        messages_field=data.messages_field,
        tools_field=data.tools_field,
        weight_field=data.weight_field,
        chat=data.chat,
        system_prompt=data.system_prompt,
    )


def _keys(config: Config) -> dict[str, str]:
    """Return what else decides a token: the date, if the chat template writes it."""
    template = chat_template(model_folder.resolve(config.model.source, config.data.chat_template)) or ""
    return {"date": config.data.date} if "strftime_now" in template else {}
