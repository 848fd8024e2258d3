"""Checks the data of a recipe before anything is started; see `fourfold.plan.preflight`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np

from fourfold import config as configuration
from fourfold.config import Config
from fourfold.model import folder as model_folder
from fourfold.model.tokenizer import Tokenizer, chat_template, check_template
from fourfold.plan.preflight import ExampleRow, Preflight

from ..data.load_prompts import load_prompts
from ..data.prompts import Prompt, PromptSet
from ..rows.describe import describe_reference, describe_steps, describe_store, render_rows
from ..rows.open_rows import open_rows
from .scoring import check_scorers, scorer_names

_EXAMPLES: Final = 4


def check_data(preflight: Preflight) -> None:
    """Load and tokenize the data as the coordinator does, and describe them.

    Raises ConfigError: data, columns or holdout do not fit the recipe, or a row has no scorer.
    """
    config = preflight.config
    if config.data.chat_template:
        check_template(config.data.chat_template)
    if not config.needs_engines:
        _check_rows(preflight)
        return
    if not config.data.train and not config.data.held_out:
        return
    folder = model_folder.resolve(config.model.source, config.data.chat_template)
    config = configuration.fix_date(config, None)
    prompts = load_prompts(config, Tokenizer.load(folder, date=config.data.date))
    preflight.warnings += [*prompts.warnings, *check_scorers(config, config.reward, prompts)]
    if config.data.chat and "strftime_now" in (chat_template(folder) or ""):
        when = "data.date" if preflight.config.data.date else "now; a run writes the date on which it begins"
        preflight.note("data", f"The chat template writes the date: {config.data.date} ({when}).")
    if prompts.train:
        preflight.note("data", _describe(config, prompts.train))
        for text in _describe_sources(config, prompts.train):
            preflight.note("data", text)
        if prompts.left_out:
            rule = "have more than data.max_prompt_tokens tokens, and are left out"
            preflight.note("data", f"{prompts.left_out:,} rows {rule}.")
        preflight.examples = _examples(config, prompts.train)
        preflight.prompt_tokens = float(np.mean(_lengths(prompts.train)))
    for held_out in prompts.held_out:
        groups = len({prompt.group_key for prompt in held_out.prompts})
        name = f" {held_out.name}" if len(prompts.held_out) > 1 else ""
        preflight.note("held out", f"read{name}: {len(held_out.prompts):,} prompts in {groups:,} task groups.")
    preflight.warnings += _warnings(config, prompts)


def _check_rows(preflight: Preflight) -> None:
    """Encode the rows as the coordinator does, describe them, and set the steps of the passes over them."""
    config = configuration.fix_date(preflight.config, None)
    folder = model_folder.resolve(config.model.source, config.data.chat_template)
    tokenizer = Tokenizer.load(folder, date=config.data.date)
    rows = open_rows(config, tokenizer)
    preflight.warnings += rows.warnings
    held_out_stores = [store for held_out in rows.held_out for store in held_out.stores]
    stores = dict.fromkeys([*rows.train.stores, *held_out_stores])
    for store in stores:
        meta = store.meta
        preflight.note("data" if store in rows.train.stores else "held out", describe_store(meta))
        if meta.doubled_begins:
            preflight.warnings.append(
                f"{meta.source}: {meta.doubled_begins:,} samples began with two begin tokens, one of which was "
                f"removed; the chat template writes one that the tokenizer adds, too"
            )
    for held_out in rows.held_out:
        preflight.note("held out", f"read {held_out.name}: {len(held_out.units):,} rows.")
    preflight.note("data", describe_steps(rows.train, config))
    if config.prepares_reference:
        preflight.note("reference", describe_reference(stores, config))
    preflight.rendered = render_rows(rows.train, tokenizer)
    if rows.train.steps is not None:
        preflight.config = preflight.config.model_copy(update={"steps": rows.train.steps})


def _examples(config: Config, train: Sequence[Prompt]) -> list[ExampleRow]:
    """Return the first rows that have a reference answer."""
    answered = itertools.islice((prompt for prompt in train if prompt.answer), _EXAMPLES)
    return [
        ExampleRow(
            index=prompt.index,
            prompt=prompt.text,
            answer=prompt.answer,
            metadata_json=prompt.metadata_json,
            messages_json=prompt.messages_json,
            scorers=scorer_names(config.reward, prompt, config.data.scorers_field),
        )
        for prompt in answered
    ]


def _lengths(prompts: Sequence[Prompt]) -> list[int]:
    return [len(prompt.token_ids) for prompt in prompts]


def _describe(config: Config, train: Sequence[Prompt]) -> str:
    lengths = _lengths(train)
    shortest, longest = min(lengths), max(lengths)
    size = f"{longest:,}" if shortest == longest else f"{shortest:,} to {longest:,} (mean {np.mean(lengths):,.0f})"
    drawn = config.steps * config.batch.prompts_per_step
    return f"read: {len(train):,} training prompts of {size} tokens. {_draws(drawn, len(train))}"


def _draws(drawn: float, count: int) -> str:
    share = drawn / count
    amount = f"{100 * share:.3g}% of them" if share < 1 else f"{share:,.3g} pass{'es' * (share != 1)} over them"
    return f"The run draws {drawn:,.0f} prompts: {amount}."


def _describe_sources(config: Config, train: Sequence[Prompt]) -> list[str]:
    """Return a line for each source, if there are several: its prompts, and how many of them the run draws."""
    counts = Counter(prompt.source for prompt in train)
    if len(counts) < 2:
        return []
    weights = {source.title: source.weight for source in config.data.train if source.weight is not None} or counts
    drawn = config.steps * config.batch.prompts_per_step / sum(weights.values())
    return [
        f"{name}: {count:,} training prompts. {_draws(drawn * weights[name], count)}" for name, count in counts.items()
    ]


def _warnings(config: Config, prompts: PromptSet) -> list[str]:
    limit, sampled = config.model.max_context_tokens, config.sampling.max_new_tokens
    cut = sum(length + sampled > limit for length in _lengths(prompts.train))
    found = []
    if cut:
        found.append(
            f"{cut:,} of {len(prompts.train):,} training prompts leave less than sampling.max_new_tokens = {sampled:,} "
            f"tokens for their answers; raise model.max_context_tokens = {limit:,}, or lower sampling.max_new_tokens"
        )
    if prompts.held_out and config.evaluation.every_steps > config.steps:
        found.append(
            f"evaluation.every_steps = {config.evaluation.every_steps} is above steps = {config.steps}, so that only "
            f"the first and the last weights are evaluated; lower it to see the score between them"
        )
    return found
