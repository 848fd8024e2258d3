"""Turns the rows of a data set into tokenized prompts: held-out ones, and the others in an endless shuffled order.

    rows --template, tokens--> prompts --holdout--> training prompts (endless, shuffled by seed)
                                               \\--> evaluation prompts (each once)

The order is a function of the seed and the position alone: `at(position)` is the same in every process, so that a
checkpoint needs to store nothing but the position.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from fourfold.arrays import Int32Array
from fourfold.config import Config, DataConfig, DataSourceConfig, HoldoutConfig
from fourfold.errors import ConfigError
from fourfold.seeds import derive_seed

from .sources import Row, describe, read_rows

log = logging.getLogger("fourfold.coordinator")

_NUMBER: Final = re.compile(r"\d+(?:\.\d+)?")
_MAX_METADATA_BYTES: Final = 64 << 10


class PromptTokenizer(Protocol):
    """The methods of `fourfold.model.tokenizer.Tokenizer` that are used here."""

    def render_chat(self, messages: Sequence[dict[str, Any]], /) -> str: ...

    def encode(self, text: str, /, *, add_special: bool = False) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """One task: the text for the policy, and the fields for a scorer."""

    index: int  # of its row, from 0
    text: str  # with the chat template
    messages_json: str = ""  # its chat messages, a JSON array; empty: a plain text
    token_ids: Int32Array  # [n], n >= 1
    answer: str  # reference answer; empty if the task has none
    metadata_json: str  # the other fields of the row, a JSON object
    group_key: str  # task group: held out as a whole, and a cluster in the confidence interval of the evaluation


def own_prompt(text: str, *, answer: str, metadata_json: str) -> Prompt:
    """Return the problem of a group of the agents' own: the run has no row and no tokens of it."""
    return Prompt(
        index=0,
        text=text,
        token_ids=np.empty(0, np.int32),
        answer=answer,
        metadata_json=metadata_json or "{}",
        group_key="",
    )


class PromptSet:
    """Training prompts in an endless, reproducible order, and held-out prompts."""

    def __init__(self, *, train: Sequence[Prompt], held_out: Sequence[Prompt], seed: int) -> None:
        """Shuffle the training prompts by `seed`, differently in every pass; own groups of agents need none."""
        self.train = tuple(train)
        self.held_out = tuple(held_out)
        self._seed = seed
        self._pass = -1
        self._order: list[int] = []

    def at(self, position: int) -> Prompt:
        """Return the training prompt at `position` of the endless order, from 0."""
        number, offset = divmod(position, len(self.train))
        if number != self._pass:
            self._order = list(range(len(self.train)))
            random.Random(derive_seed(self._seed, "order", number)).shuffle(self._order)
            self._pass = number
        return self.train[self._order[offset]]

    def digest(self) -> str:
        """Return a SHA-256 (hex) of the tokens and reference answers; a resumed run must have the same data."""
        digest = hashlib.sha256()
        for prompt in (*self.train, *self.held_out):
            for part in (prompt.token_ids.astype("<i4").tobytes(), prompt.answer.encode()):
                digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()


def load_prompts(config: Config, tokenizer: PromptTokenizer) -> PromptSet:
    """Read, tokenize and split the data of a recipe. Takes seconds: call it in a thread."""
    data = config.data
    train: list[Prompt] = [] if data.train is None else _load(data.train, config, tokenizer)
    held_out: list[Prompt] = []
    if data.eval is not None:
        held_out = _load(data.eval, config, tokenizer)
    elif data.holdout is not None:
        train, held_out = split_holdout(train, data.holdout, seed=config.seed)
        if not train:
            raise ConfigError("the holdout leaves no training prompt; add data, or lower data.holdout.groups")
    if config.evaluation.max_prompts:
        held_out = held_out[: config.evaluation.max_prompts]
    return PromptSet(train=train, held_out=held_out, seed=config.seed)


def split_holdout(prompts: Sequence[Prompt], holdout: HoldoutConfig, *, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Return the training prompts, and one of each distinct prompt of the held-out groups.

    The seed draws the groups. If most groups have the same number of distinct prompts, only those groups are drawn, so
    that each has the same weight in a mean score. Example: among products of two digits, 3 * 7 and 7 * 3 are one group
    of two prompts. Squares are groups of one prompt, so they all stay in the training data.
    """
    distinct: dict[str, dict[str, Prompt]] = {}
    for prompt in prompts:
        distinct.setdefault(prompt.group_key, {}).setdefault(prompt.text, prompt)
    if len(distinct) <= holdout.groups:
        raise ConfigError(
            f"data.holdout.groups = {holdout.groups}, but the data has {len(distinct)} groups by "
            f"{holdout.field!r}; hold fewer out, or give more data"
        )
    size, frequency = Counter(len(group) for group in distinct.values()).most_common(1)[0]
    keys = sorted(distinct)
    if frequency > len(keys) / 2 and frequency >= holdout.groups:
        keys = [key for key in keys if len(distinct[key]) == size]
    drawn = set(random.Random(derive_seed(seed, "holdout")).sample(keys, holdout.groups))
    train = [prompt for prompt in prompts if prompt.group_key not in drawn]
    held_out = [prompt for key in sorted(drawn) for prompt in sorted(distinct[key].values(), key=lambda p: p.text)]
    return train, held_out


def _load(source: DataSourceConfig, config: Config, tokenizer: PromptTokenizer) -> list[Prompt]:
    max_context = config.model.max_context_tokens
    prompts: list[Prompt] = []
    too_long: list[int] = []
    count = 0
    for index, row in enumerate(read_rows(source)):
        count += 1
        prompt = _make_prompt(index, row, config, tokenizer, f"{describe(source)}, row {index}")
        if len(prompt.token_ids) < max_context:
            prompts.append(prompt)
        else:
            too_long.append(index)
    if too_long:
        log.warning(
            "%s: dropped %d of %d prompts that leave no room in model.max_context_tokens = %d; rows %s",
            describe(source), len(too_long), count, max_context,
            ", ".join(map(str, too_long[:5])) + (", ..." if len(too_long) > 5 else ""),
        )  # fmt: skip
    if not prompts:
        why = f"all {count} are too long for model.max_context_tokens = {max_context}" if count else "it is empty"
        raise ConfigError(f"{describe(source)}: no prompt is left: {why}")
    return prompts


def _make_prompt(index: int, row: Row, config: Config, tokenizer: PromptTokenizer, where: str) -> Prompt:
    data = config.data
    if data.prompt_field not in row:
        raise ConfigError(
            f"{where}: no column {data.prompt_field!r}; it has {', '.join(sorted(row))}; set data.prompt_field"
        )
    messages = _messages(row[data.prompt_field], data, where) if data.chat else None
    text, ids = _tokenize(row[data.prompt_field], messages, data, tokenizer, where)
    if not ids:
        raise ConfigError(f"{where}: an empty prompt; remove the row")
    answer = row.get(data.answer_field)
    metadata = {k: v for k, v in row.items() if k not in (data.prompt_field, data.answer_field, "metadata")}
    nested = row.get("metadata")
    if isinstance(nested, dict):
        metadata |= nested
    elif nested is not None:
        metadata["metadata"] = nested
    # Generators give tuples and dates, which JSON turns into lists and texts.
    encoded = json.dumps(metadata, ensure_ascii=False, default=str)
    if (size := len(encoded.encode())) > _MAX_METADATA_BYTES:
        raise ConfigError(f"{where}: {size} bytes of metadata; the limit is {_MAX_METADATA_BYTES}; remove columns")
    return Prompt(
        index=index,
        text=text,
        token_ids=np.asarray(ids, np.int32),
        answer="" if answer is None else str(answer),
        metadata_json=encoded,
        messages_json=json.dumps(messages, ensure_ascii=False) if messages else "",
        group_key=_group_key(index, metadata, data.holdout, where),
    )


def _messages(value: Any, data: DataConfig, where: str) -> list[dict[str, Any]]:
    """Return the chat messages of a prompt, with the recipe's system message before a text."""
    if isinstance(value, str):
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        return [*system, {"role": "user", "content": value}]
    if not isinstance(value, list) or not all(isinstance(m, dict) and "role" in m and "content" in m for m in value):
        raise ConfigError(f"{where}: a prompt is a text, or a list of messages with `role` and `content`")
    return value


def _tokenize(
    value: Any, messages: list[dict[str, Any]] | None, data: DataConfig, tokenizer: PromptTokenizer, where: str
) -> tuple[str, list[int]]:
    if messages is not None:
        text = tokenizer.render_chat(messages)
        return text, tokenizer.encode(text)
    if not isinstance(value, str):
        raise ConfigError(f"{where}: a {type(value).__name__} as prompt; data.chat = false needs a text")
    text = f"{data.system_prompt}\n\n{value}" if data.system_prompt else value
    return text, tokenizer.encode(text, add_special=True)


def _group_key(index: int, metadata: dict[str, Any], holdout: HoldoutConfig | None, where: str) -> str:
    if holdout is None:
        return f"row {index}"
    if holdout.field not in metadata:
        raise ConfigError(
            f"{where}: no field {holdout.field!r} for data.holdout; it has {', '.join(sorted(metadata)) or 'none'}"
        )
    value = str(metadata[holdout.field])
    if not holdout.unordered_numbers:
        return value
    return " ".join(sorted(_NUMBER.findall(value), key=lambda n: (float(n), n)))
